"""Data against model parallelism: the rows say where regimes end; what is averaged is the mean."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from click.testing import CliRunner
from torch import nn

from bigbrain_fx.errors import InputError
from tools.dp_vs_mp.__main__ import main, row_of
from tools.dp_vs_mp.cells import ONE, ROWS, WAYS, StudyRow, cells, model_text
from tools.dp_vs_mp.page import draw, page, regimes
from tools.dp_vs_mp.scaling import Scaled, average, wanted


def curve(*steps: float) -> list[Scaled]:
    """Return trainings of batches of 8, 16, ..., with these numbers of steps."""
    return [
        Scaled(8 * 2**n, 0, 0.1, (int(s),) * 3 if s < 1e9 else (None,) * 3, 0.01)
        for n, s in enumerate(steps)
    ]


@pytest.mark.parametrize(
    ("steps", "ends"),
    [
        ((800, 400, 210, 150, 140, 141), (32, 64)),
        ((800, 700, 690), (None, None)),
        ((800, 600, 300, 290), (None, 32)),
        ((800, 400, 1e9, 100), (16, 16)),
        ((800, 400), (16, 16)),
    ],
)
def test_where_a_larger_batch_no_longer_pays(
    steps: tuple[float, ...], ends: tuple[int | None, int | None]
) -> None:
    assert regimes(curve(*steps)[::-1]) == ends


def test_all_replicas_have_the_mean_of_their_weights() -> None:
    nets = [nn.Linear(3, 2) for _ in range(3)]
    mean = torch.stack([net.weight.detach() for net in nets]).mean(0)
    average(nets)
    assert all(torch.equal(net.weight, mean) for net in nets)


@pytest.mark.nightly
def test_a_page_of_some_rows_says_how_many_lack(tmp_path: Path) -> None:
    rows = [
        StudyRow("mlp", ROWS, str(way), 1000.0, 0.1 * way.devices, 10**6, 2**20, 2**21, 0.5)
        for way in (ONE, WAYS[0])
    ]
    text = page(rows, curve(800, 400, 300), "plot.svg")
    total = len([*cells()])
    assert total == len({cell.key for cell in cells()})
    assert f"2 of {total} cells and 3 of {len([*wanted()])} trainings" in text
    assert "| pipeline, 2 devices | 1000 | 320 | 0.50x | 1.00 | 1.0 | 2.0 |" in text
    assert "up to a batch of 16, diminishing (1/1.2) up to 32" in text
    draw(tmp_path / "a.svg", rows, curve(800, 400, 300))
    draw(tmp_path / "b.svg", rows, curve(800, 400, 300))
    assert (tmp_path / "a.svg").read_text() == (tmp_path / "b.svg").read_text()


def test_a_file_goes_on_where_it_was_and_other_lines_are_refused(tmp_path: Path) -> None:
    out, to = tmp_path / "rows.jsonl", tmp_path / "page.md"
    found = {"batch": 8, "every": 0, "rate": 0.1, "steps": [3, None, 5], "step_s": 0.1}
    out.write_text(json.dumps(found) + "\n")
    assert row_of(found).key == (8, 0)
    words = ["--out", str(out), "--write", str(to), "--rows-only"]
    assert CliRunner().invoke(main, words).exit_code == 0
    assert "0 of" in to.read_text()
    out.write_text('{"batch": 8}\n')
    assert isinstance(CliRunner().invoke(main, words).exception, InputError)


def test_a_model_is_of_as_many_rows_as_its_cell() -> None:
    for cell in cells():
        assert str(cell.rows) in model_text(cell.model, cell.rows, "/here").rpartition("return")[2]

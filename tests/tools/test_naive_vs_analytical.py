"""Naive against analytical against auto: what the page makes of rows."""

from __future__ import annotations

from pathlib import Path

from click.testing import CliRunner

from tools.naive_vs_analytical import PLANNERS, SITES, Measured, main, page, studied


def row(model: str, planner: str, step_s: float) -> Measured:
    about = (model, SITES[0].name, planner, 64, 8, 2, "1f1b")
    return Measured(*about, (step_s, step_s * 2, step_s / 2), step_s * 1.1, 2**20, 2**21, 1.5)


def test_planners_are_compared_by_the_middle_step() -> None:
    seconds = {"gpt": (4.0, 2.0, 1.0), "moe": (3.0, 3.0, 1.5)}
    rows = [
        row(m, p, s) for m, each in seconds.items() for p, s in zip(PLANNERS, each, strict=True)
    ]
    found = page(rows)
    assert "6 of 108 runs are here" in found
    assert "| analytical against naive | 2 | 1.00 | 1.50 | 2.00 | 1.50 |" in found
    assert "| auto against naive | 2 | 2.00 | 3.00 | 4.00 | 3.00 |" in found
    assert "| gpt | analytical | 2 | 1f1b, 8 | 32.0 (16.0, 64.0) | 2.00 | +10% | 1 | 2 |" in found


def test_all_models_are_studied_and_a_cnn_at_several_batches() -> None:
    found = studied()
    assert len({model.name for model in found.values()}) == 7
    assert [model.rows for model in found.values() if model.name == "cnn"] == [16, 64, 256]


def test_a_page_of_rows_that_are_there(tmp_path: Path) -> None:
    out, written = tmp_path / "rows.jsonl", tmp_path / "page.md"
    words = ["--out", str(out), "--write", str(written), "--rows-only"]
    done = CliRunner().invoke(main, words)
    assert done.exit_code == 0, done.output
    assert "0 of 108 runs are here" in written.read_text()

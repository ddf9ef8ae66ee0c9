"""`tools.divided`: what is run where, and what its page says of rows."""

from __future__ import annotations

import json
from dataclasses import asdict, replace
from pathlib import Path

import pytest
from click.testing import CliRunner

from bigbrain_fx.core import Device, Link
from bigbrain_fx.core.cluster import Cluster
from tools.divided.__main__ import main, row_of
from tools.divided.cells import ALONE, EQUAL, ONE, PLANNED, Row, rows_of, site_of, wanted, ways
from tools.divided.page import page
from tools.fidelity_models import MODELS


def row(way: str, *step_s: float, forecast_s: float = 1.0, site: str = "uneven2-1000") -> Row:
    """Return a row of so many rounds."""
    many = len(step_s)
    return Row("unet", site, way, step_s, (0.01,) * many, forecast_s, (0.5,) * many, (8, 4))


def test_unlike_devices_divide_equally_and_by_speed_and_alike_ones_once() -> None:
    unlike, alike = ([way.name for way in ways(site_of(s))] for s in ("uneven2-1000", "equal2-100"))
    assert {EQUAL, PLANNED, "tensor 1:1", "tensor 2:1"} <= set(unlike)
    assert EQUAL not in alike
    assert [name for name in unlike if name.startswith(ALONE)] == [f"{ALONE}1"]
    assert not [name for name in alike if name.startswith(ALONE)]
    assert [name for name in alike if "tensor" in name] == ["tensor 1:1"]


def test_one_device_is_the_first_and_all_are_hosts_of_their_own() -> None:
    devices = tuple(Device(f"d{i}", f"h{i}", "cpu", 2**30, 1e9, 1e9) for i in range(2))
    cluster = Cluster(devices, Link(1e-3, 1e8))
    by_name = {way.name: way for way in ways(site_of("uneven2-1000"))}
    assert [d.name for d in by_name[ONE].of(cluster).devices] == ["d0"]
    assert {d.host for d in by_name[PLANNED].of(cluster).devices} == {"h0", "h1"}


def test_only_is_a_part_of_model_and_cluster() -> None:
    assert wanted(("unet/uneven2",)) == [("unet", "uneven2-1000")]
    assert len(wanted(())) == len(set(wanted(()))) == 16


@pytest.mark.parametrize("model", ["llama", "encdec", "unet", "mixer"])
def test_a_batch_has_as_many_rows_as_said(model: str) -> None:
    example: dict[str, object] = {}
    source = MODELS[model].sized(rows_of(model)).batch
    exec(f"import torch\nbatch = {source}", example)
    batch = example["batch"]
    entries = batch.values() if isinstance(batch, dict) else batch
    assert {len(entry) for entry in entries} == {rows_of(model)}  # type: ignore[attr-defined]


def test_ratios_are_of_each_round_and_the_fluid_limit_of_the_speeds() -> None:
    rows = [row(ONE, 2.0, 4.0), row(EQUAL, 1.8, 4.2), row(PLANNED, 1.5, 3.0, forecast_s=2.0)]
    text = page(rows)
    assert "| unet | uneven2-1000 | 12 | 1.30 | 1.33 | 0.89 |" in text
    slower = row(f"{ALONE}1", 6.0, 8.0)  # 1 / (1/2 + 1/6) = 1.5 s and 1 / (1/4 + 1/8) = 2.667 s
    assert "| unet | uneven2-1000 | 12 | 1.30 | 1.33 | 0.94 |" in page([*rows, slower])
    assert "| unet | uneven2-1000 | replicas | 8:4 | 2.000 | 2.250 | -11.1 % | 50 % |" in text


def test_a_larger_batch_has_rows_of_its_own() -> None:
    rows = [row(ONE, 2.0), row(PLANNED, 1.5)]
    larger = [replace(each, batches=4, step_s=(4 * each.step_s[0] - 0.6,)) for each in rows]
    text = page([*rows, *larger])
    assert "| unet | uneven2-1000 | 12 | - | 1.33 | 0.89 |" in text
    assert "| unet | uneven2-1000 | 48 | - | 1.37 | 0.91 |" in text
    assert "| unet | uneven2-1000 | replicas, batch x 4 |" in text
    by_name = {way.name: way for way in ways(site_of("uneven2-1000"), 4)}
    assert (by_name[PLANNED].micro_batches, by_name["tensor 2:1"].micro_batches) == (48, 4)
    assert rows_of("unet", 4) == 4 * rows_of("unet")


def test_the_command_writes_the_page_of_rows_at_hand(tmp_path: Path) -> None:
    out, written = tmp_path / "rows.jsonl", tmp_path / "page.md"
    rows = [row(ONE, 2.0, 4.0), row("tensor 2:1", 1.0, 1.0)]
    out.write_text("".join(json.dumps(asdict(each)) + "\n" for each in rows))
    assert [row_of(json.loads(line)) for line in out.read_text().splitlines()] == rows
    done = CliRunner().invoke(
        main, ["--out", str(out), "--rows-only", "--write", str(written)], catch_exceptions=False
    )
    assert done.exit_code == 0
    assert "tensor groups, with and without replicas and pipelines | 1 | 0.0 %" in (
        written.read_text()
    )

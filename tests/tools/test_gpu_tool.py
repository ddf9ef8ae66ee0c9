"""The tool that measures one GPU: on the CPU, on made-up rows, and on a GPU that is not there."""

from __future__ import annotations

import json
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from click.testing import CliRunner, Result

from bigbrain_fx.core import Device
from bigbrain_fx.errors import InputError
from tools.bench.gpu import __main__ as gpu
from tools.bench.gpu.card import lacking, preset_of
from tools.bench.gpu.models import TINY
from tools.bench.gpu.report import summary
from tools.bench.gpu.rows import Family, Rates, Row, append_row, read_rows

CPU = '{"name": "d0", "host": "a", "kind": "cpu", "threads": 1, "memory": "4GiB", "flops": '
CLUSTER = f'{{"devices": [{CPU}"60GFLOP/s", "memory_bandwidth": "12GB/s"}}]}}'
GPU = Device("d0", "h", "cuda", 1 << 34, 1e12, 1e11, half_flops_per_s=8e12)
SHEET = Rates(2e12, 16e12, 2e11, 1 << 34)
LINEAR = Family("linear", 3, 0.03, 0.06, 0.02, 0.04, 0.015, 0.03)


def made_row(**changes: Any) -> Row:
    """A row of 0.1 s and 1000 bytes."""
    whole: dict[str, Any] = {
        "model": "gpt",
        "size": "small",
        "card": "Some GPU",
        "kind": "cuda",
        "torch": "2.13",
        "date": "2026-01-01",
        "rows": 8,
        "micro_batches": 2,
        "step_s": [0.09, 0.1, 0.3],
        "forecast_s": {"measured": 0.105, "analytical": 0.08},
        "covered": 1.0,
        "forecast_bytes": 1040,
        "measured_bytes": 1000,
        "doctor": Rates(1e12, 8e12, 1e11, 1 << 34, 5e-6),
        "ops": [LINEAR],
    }
    return Row(**{**whole, **changes})


def called(*words: str) -> Result:
    return CliRunner().invoke(gpu.main, list(words), catch_exceptions=False)


# --------------------------------------------------------------------------- without a GPU


@pytest.mark.parametrize("as_json", [False, True])
def test_without_a_gpu_it_says_so_in_one_line(
    as_json: bool, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    out = tmp_path / "rows.jsonl"
    done = called("--out", str(out), *(["--json"] if as_json else []))
    (line,) = done.stdout.splitlines()
    said = json.loads(line)["skipped"] if as_json else line
    assert (done.exit_code, said) == (0, lacking("cuda"))
    assert said.startswith("no CUDA device was found")
    assert not out.exists()


def test_unknown_models_and_sizes_are_refused() -> None:
    assert "'huge' is none of small" in called("--sizes", "huge").stderr
    assert "'bert' is none of gpt" in called("--models", "gpt,bert").stderr


# --------------------------------------------------------------------------- one CPU, for real


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder in which one tiny model was measured on the CPU."""
    folder = tmp_path_factory.mktemp("gpu")
    (folder / "cluster.json").write_text(CLUSTER)
    return folder


@pytest.fixture(scope="module")
def tiny(place: Path) -> tuple[Result, Row]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("BIGBRAIN_PROFILES", "")  # the tool sets it; here it goes back
        done = called(*words(place), "--json")
    (row,) = read_rows(place / "rows.jsonl")
    return done, row


def words(place: Path) -> tuple[str, ...]:
    given = {"--cluster": "cluster.json", "--out": "rows.jsonl", "--write": "page.md"}
    paths = (text for flag, name in given.items() for text in (flag, str(place / name)))
    return ("--device", "cpu", "--sizes", TINY, "--models", "gpt", "--steps", "4", *paths)


@pytest.mark.nightly
def test_the_whole_tool_on_the_cpu(tiny: tuple[Result, Row], place: Path) -> None:
    done, row = tiny
    assert done.exit_code == 0
    first, last = map(json.loads, done.stdout.splitlines())
    assert first == json.loads(json.dumps(asdict(row)))
    assert (last["rows"], last["step_goal"], last["memory_goal"]) == (1, 0.10, 0.05)
    assert len(row.step_s) == 4
    assert row.forecast_s.keys() == {"measured", "analytical"}  # no datasheet speaks of a CPU
    assert row.covered > 0.99  # it profiled the very ops
    assert abs(row.memory_error) < 0.06
    assert (row.preset, row.datasheet, row.blas_bytes) == ("", None, 0)
    assert row.products_use_tf32 is None
    assert row.profiled_launch_s is not None
    assert "| gpt | tiny |" in (place / "page.md").read_text()


# --------------------------------------------------------------------------- a GPU, made up


@pytest.mark.parametrize(
    ("name", "preset"),
    [
        ("NVIDIA H200", "h200"),
        ("NVIDIA H100 80GB HBM3 MIG 1g.10gb", None),
        ("NVIDIA H100 80GB HBM3", "h100"),
        ("NVIDIA H100 PCIe", "h100-pcie"),
        ("NVIDIA A100-SXM4-40GB", "a100-40"),
        ("NVIDIA A100 80GB PCIe", "a100-80-pcie"),
        ("Tesla V100-SXM2-16GB", "v100-16"),
        ("Tesla T4", "t4"),
        ("NVIDIA L4", "l4"),
        ("NVIDIA GeForce RTX 3090", "rtx-3090"),
        ("NVIDIA RTX A6000", "a6000"),
        ("NVIDIA GeForce RTX 3090 Ti", "rtx-3090-ti"),
        ("NVIDIA RTX 6000 Ada Generation", "rtx-6000-ada"),
        ("NVIDIA GeForce RTX 3060", None),
        ("NVIDIA L40S", "l40s"),
        ("AMD EPYC", None),
    ],
)
def test_a_card_finds_its_datasheet(name: str, preset: str | None) -> None:
    assert preset_of(name) == preset


# --------------------------------------------------------------------------- numbers


def test_errors_are_of_the_median_step_and_of_the_peak() -> None:
    row = made_row()
    assert row.measured_s == 0.1
    assert row.error("measured") == pytest.approx(0.05)
    assert row.error("analytical") == pytest.approx(-0.2)
    assert row.memory_error == pytest.approx(0.04)
    found = summary([row, made_row(size="large", step_s=[0.2], measured_bytes=1300)])
    assert found.step_within == {"measured": 1, "analytical": 0}
    assert found.step_worst["measured"] == pytest.approx(-0.475)
    assert found.step_mape["measured"] == pytest.approx((0.05 + 0.475) / 2)
    assert found.memory_within == 1
    assert found.memory_worst == pytest.approx(-0.2)


def test_rows_survive_a_file_and_a_line_that_was_cut_off(tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    row = made_row(preset="h200", datasheet=SHEET)
    append_row(path, row)
    with path.open("a") as file:
        file.write('{"model": "gp')
    assert read_rows(path) == [row]
    append_row(path, replace(row, size="large"))
    assert [found.size for found in read_rows(path)] == ["small", "large"]
    done = called("--out", str(path), "--report", "--json")
    assert (done.exit_code, json.loads(done.stdout.splitlines()[-1])["rows"]) == (0, 2)
    path.write_text('{"model": "gpt"}\n')
    with pytest.raises(InputError, match=r"not a row of tools\.bench\.gpu"):
        read_rows(path)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_the_whole_tool_on_a_gpu(tmp_path: Path) -> None:
    out = tmp_path / "rows.jsonl"
    done = called("--sizes", TINY, "--models", "gpt", "--steps", "4", "--out", str(out))
    assert done.exit_code == 0
    (row,) = read_rows(out)
    assert (row.kind, row.card) == ("cuda", torch.cuda.get_device_name(0))
    assert row.measured_bytes > row.blas_bytes > 0

"""Forecasts beside published rows: the tool on rows made here; the real ones where given.

`BIGBRAIN_GPU_DATA=/folder/of/shared/data` holds a sample of forecasts against published rows.
"""

from __future__ import annotations

import csv
from pathlib import Path
from statistics import fmean

import pytest

from tools.bench.published_gpus.__main__ import said_of
from tools.bench.published_gpus.rows import FILES, data_folder, read_rows
from tools.bench.published_gpus.table import spearman

DATA = data_folder(None)
published = pytest.mark.skipif(
    DATA is None, reason="set BIGBRAIN_GPU_DATA to the folder of the published GPU data"
)
_HEADS = """
id source url model task gpu n_gpus parallelism micro_batch accum seq_or_img precision recompute
value unit notes
"""
HEADS = _HEADS.split()
SAMPLE = 16  # each so many rows one: seconds, not minutes
SAMPLE_MEAN = 0.0289  # as it was when tools/studies/published_gpus was written
POINT = 0.01


def written(folder: Path) -> Path:
    """Write rows of a made-up measurement, and others that cannot be asked."""
    row = {
        "source": "NVIDIA DeepLearningExamples",
        "model": "resnet50v1.5",
        "task": "infer",
        "gpu": "T4",
        "n_gpus": "1",
        "parallelism": "none",
        "micro_batch": "8",
        "accum": "1",
        "seq_or_img": "224",
        "precision": "fp32",
        "recompute": "False",
        "unit": "images/s",
    }
    rows = [
        {**row, "id": "a", "value": "400"},
        {**row, "id": "b", "value": "500", "micro_batch": "64"},
        {**row, "id": "c", "value": "1", "precision": "amp_fp8"},
        {**row, "id": "d", "value": "1", "parallelism": "TP4"},
    ]
    for name in FILES:
        with (folder / f"{name}.csv").open("w", newline="", encoding="utf-8") as file:
            writer = csv.DictWriter(file, HEADS, restval="")
            writer.writeheader()
            writer.writerows(rows if name == "deeplearningexamples" else [])
    return folder


def test_rows_are_read_or_left_out_with_a_reason(tmp_path: Path) -> None:
    rows, skipped = read_rows(written(tmp_path))
    assert [(row.id, row.card, row.step_s) for row in rows] == [
        ("a", "t4", 8 / 400),
        ("b", "t4", 64 / 500),
    ]
    assert [(each.id, each.why.split()[0]) for each in skipped] == [("c", "FP8"), ("d", "tensor")]


def test_a_row_is_forecast_through_the_products_own_road(tmp_path: Path) -> None:
    rows, _ = read_rows(written(tmp_path))
    small, large = said_of(rows)
    assert 0 < small.step_s < large.step_s
    assert large.error == pytest.approx(large.step_s / (64 / 500) - 1)
    usual = said_of(rows, usual=True)
    assert [each.row.id for each in usual] == ["a", "b"]


@published
def test_forecasts_are_no_worse_than_they_were() -> None:
    assert DATA is not None
    rows, _ = read_rows(DATA)
    plain = [row for row in rows if row.parallelism != "PP"]
    known = [row for row in plain if row.source != "timm"][::SAMPLE]
    said = said_of(known)
    assert len(said) > 10
    assert fmean(abs(each.error) for each in said) <= SAMPLE_MEAN + POINT
    rank = spearman([s.step_s for s in said], [s.row.step_s for s in said])
    assert rank is not None
    assert rank >= 0.98

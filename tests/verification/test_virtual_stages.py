"""Several pieces a device train as one process does, bit for bit: tied head, dropout, clipping."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import pytest
import torch

from bigbrain_fx.frontend import capture, load_model_file
from bigbrain_fx.plan import Options, Plan, Source, make_plan
from tests.support.bundles import MODEL
from tools.conformance.matrix import Bench, Cell, cluster

CELL = Cell("small", "naive", 2, "")


@pytest.fixture(scope="module")
def bench(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Bench]:
    path = tmp_path_factory.mktemp("small") / "model.py"
    path.write_text(MODEL.replace("(8, 6)", "(16, 9)"))
    count = torch.get_num_threads()
    torch.set_num_threads(1)
    file = load_model_file(path)
    yield Bench(file, capture(file.model, file.example_batch, file.loss, name="small"), 2)
    torch.set_num_threads(count)


def planned(bench: Bench, options: Options) -> Plan:
    file = bench.file
    source = Source(str(file.path), True, False, True, True, file.clip_norm)
    return make_plan(bench.captured.graph, cluster(2), source, options)


@pytest.mark.gate("interleaved-2-None-4", "dualpipe-v-8-None-4")
@pytest.mark.parametrize(
    ("schedule", "micro_batches", "pieces", "stages"),
    [
        pytest.param("interleaved", 4, None, 4, marks=pytest.mark.nightly),
        ("interleaved", 2, None, 4),  # one round: all forwards, then all backwards
        ("interleaved", 4, 4, 8),
        ("zb-v", 4, None, 4),
        ("dualpipe-v", 8, None, 4),
        pytest.param("auto", 4, None, 2, marks=pytest.mark.nightly),
    ],
)
def test_every_bit_is_that_of_one_process(
    bench: Bench, schedule: str, micro_batches: int, pieces: int | None, stages: int
) -> None:
    options = Options("naive", schedule=schedule, micro_batches=micro_batches, pieces=pieces)
    plan = planned(bench, options)
    assert len(plan.stages.stages) == stages
    assert bool(plan.stages.deferring) == (schedule != "interleaved")
    assert bench.fault(replace(CELL, schedule=schedule), plan) == ""

"""How long compiling takes: the whole `split` of a model file, and writing the files alone.

The suite's processes are forks that have imported torch, so that import (seconds) is not in these
times; `python -m tools.bench compiling` times whole commands, by depth.
"""

from __future__ import annotations

import itertools
from pathlib import Path

import pytest
from pytest_benchmark.fixture import BenchmarkFixture

import bigbrain_fx as bb
from bigbrain_fx.emit import bundle_texts
from bigbrain_fx.planning.registry import preset
from tests.support import samples

ROUNDS = 3


def model(measuring: bool) -> str:
    """A GPT; a small model where nothing is measured."""
    return "gpt" if measuring else "digits"


@pytest.mark.nightly
@pytest.mark.benchmark(group="compile, whole split of a model file")
@pytest.mark.parametrize("name", ["naive", "analytical"])
def test_split(benchmark: BenchmarkFixture, name: str, tmp_path: Path, measuring: bool) -> None:
    method, judge = preset(name)
    path = samples.ROOT / "models" / f"{model(measuring)}.py"
    options, numbers = bb.Options(method, judge, micro_batches=4), itertools.count()

    def split() -> bb.Split:
        return bb.split(path, samples.cluster(2), tmp_path / f"bundle{next(numbers)}", options)

    made = benchmark.pedantic(split, rounds=ROUNDS)
    benchmark.extra_info["ops"] = len(made.plan.graph.ops)
    benchmark.extra_info["capture_s"] = made.capture_s
    assert (made.bundle / "train.py").is_file()


@pytest.mark.gate("chain-dp")
@pytest.mark.benchmark(group="compile, a plan's files as text")
@pytest.mark.parametrize("name", ["naive", "chain-dp"])
def test_emit(benchmark: BenchmarkFixture, name: str, measuring: bool) -> None:
    plan = samples.plan(model(measuring), name, devices=2)
    texts = benchmark.pedantic(bundle_texts, (plan,), rounds=ROUNDS)
    assert "train.py" in texts

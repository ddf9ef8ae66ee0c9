"""A llama whose sequence is divided, under a split backward: norms' gradients are the graph's."""

from __future__ import annotations

from pathlib import Path

import pytest

from bigbrain_fx.verification.members import same_graph
from tests.verification.test_members import planned, trained
from tests.verification.test_members_sequence import AXES, sequences
from tests.verification.test_replicas import bench_of

pytestmark = pytest.mark.usefixtures("one_thread")
LLAMA = Path(__file__).resolve().parents[2] / "models" / "llama.py"


@pytest.mark.nightly
@pytest.mark.parametrize(
    ("members", "devices"), [(2, 4), pytest.param(3, 6, marks=pytest.mark.nightly)]
)
def test_norms_of_a_llama_under_a_split_backward(
    tmp_path: Path, members: int, devices: int
) -> None:
    """1e-12 in float64; the bits are those of members in lockstep."""
    bench = bench_of(tmp_path / "net.py", LLAMA.read_text())
    choices = {"tensor": members, "schedule": "zb-h1", **AXES}
    plan = planned(bench, devices, **choices)
    assert sequences(plan)
    assert plan.stages.deferring
    checked = same_graph(bench.captured, plan)
    assert checked["passed"], checked
    actual, fault = trained(bench, plan, tmp_path / "bundle")
    assert fault == ""
    assert not actual.unlike

"""What is expected of an op alone: as the estimator `analytical` says of a graph of it."""

from __future__ import annotations

from bigbrain_fx.costs.fit import work_of
from bigbrain_fx.costs.model import LEAST_S, device_of, expected_s, graph_of
from tests.support.fitted import CPU, linear_op, pointwise_op


def test_an_op_of_a_profile_is_an_op_of_a_graph() -> None:
    work = work_of(linear_op(4, 8, 16))
    (op,) = graph_of(work).ops
    assert (op.target, op.flops) == ("aten.linear.default", 2 * 4 * 8 * 16)
    assert op.requires_grad
    assert str(op.outputs[0]) == "float32[4, 16]"
    assert graph_of(work).param["p1"].spec.shape == (16, 8)
    assert device_of(CPU).flops_per_s == CPU.flops_per_s


def test_analytical_is_asked_about_one_op() -> None:
    found = expected_s(work_of(linear_op(64, 256, 256)), CPU)
    flops_s = 2 * 64 * 256 * 256 / CPU.flops_per_s
    assert flops_s < found["forward"] < 1.5 * flops_s
    assert found["backward_input"] > flops_s
    assert found["backward_weight"] > flops_s
    relu = expected_s(work_of(pointwise_op("relu", 64, 256)), CPU)
    assert relu["backward_weight"] == LEAST_S  # it has none

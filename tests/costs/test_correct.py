"""A base corrected by a few ops of a new device, and what is expected of an op alone."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from bigbrain_fx.costs.correct import FEWEST, OF_DEVICE, correct, correct_file
from bigbrain_fx.costs.fit import Row, fit, work_of
from bigbrain_fx.costs.model import (
    LEAST_S,
    CostModel,
    device_of,
    expected_s,
    graph_of,
    read_model,
    write_model,
)
from bigbrain_fx.costs.profiles import ProfileStore
from bigbrain_fx.errors import InputError
from tests.support.command_line import call
from tests.support.fitted import CPU, GPU, linear_op, pointwise_op, rows

NEW = replace(CPU, processor="Another CPU")


@pytest.fixture(scope="module")
def base() -> CostModel:
    return fit(rows(machines=[CPU]), "linear")


def slower(model: CostModel, times: float, some: list[Row]) -> list[Row]:
    """Make profiles of a device on which every op takes so many times what the base says."""
    works = [work_of(profile) for _, profile in some]
    forward_s = [times * float(s) for s in model.seconds("forward", works, NEW)]
    return [
        (NEW, replace(profile, forward_s=s, backward_input_s=0.0, backward_weight_s=0.0))
        for (_, profile), s in zip(some, forward_s, strict=True)
    ]


def products(count: int) -> list[Row]:
    found = [row for row in rows(machines=[CPU]) if "linear" in row[1].signature.target]
    return found[:count]


def test_a_slower_device_is_found_and_drawn_towards_the_base(base: CostModel) -> None:
    few = slower(base, 4.0, products(8))
    report = correct(base, few)
    assert report.model.correction.device == pytest.approx(2.0 * 8 / (8 + OF_DEVICE))
    assert report.ops == 8
    assert report.before == pytest.approx(0.75)
    assert report.after < 0.25
    (forward_s,) = report.model.seconds("forward", [work_of(few[0][1])], NEW)
    assert forward_s == pytest.approx(few[0][1].forward_s, rel=0.2)


def test_unmeasured_ops_have_the_devices_factor_alone(base: CostModel) -> None:
    model = correct(base, slower(base, 4.0, products(8))).model
    relu = [work_of(p) for _, p in rows(machines=[CPU]) if "relu" in p.signature.target]
    ratio = model.seconds("forward", relu, NEW) / base.seconds("forward", relu, NEW)
    assert ratio == pytest.approx(2.0**model.correction.device)
    assert "relu" not in model.correction.families


def test_a_corrected_base_is_a_base_and_the_same_from_its_file(
    base: CostModel, tmp_path: Path
) -> None:
    few = slower(base, 4.0, products(40))
    once = correct(base, few).model
    write_model(once, tmp_path / "once.json")
    assert read_model(tmp_path / "once.json").correction == once.correction
    twice = correct(once, few)
    assert twice.before < 0.1  # little is left
    assert 0.0 < twice.model.correction.device - once.correction.device < 0.2


def _unknown(some: list[Row]) -> list[Row]:
    return [
        (m, replace(p, signature=replace(p.signature, target="aten.erfinv.default")))
        for m, p in some
    ]


@pytest.mark.parametrize(
    ("few", "why", "what"),
    [
        (lambda some: some[: FEWEST - 1], "at least 5 measured ops", "profile a model"),
        (lambda some: [], "profiles of 0", "profile the new device"),
        (lambda some: [*some, (CPU, some[0][1])], "profiles of 2", "a database of its own"),
        (_unknown, "knows none of the ops that were profiled: erfinv", "of such ops"),
        (lambda some: [(GPU, p) for _, p in some], "of cpu devices, not of cuda", "cuda device"),
    ],
)
def test_a_correction_without_effect_is_refused(
    base: CostModel, few: Callable[[list[Row]], list[Row]], why: str, what: str
) -> None:
    with pytest.raises(InputError, match=why) as caught:
        correct(base, few(slower(base, 2.0, products(8))))
    assert what in str(caught.value.help)


def test_a_base_of_another_version_is_refused(tmp_path: Path) -> None:
    old = tmp_path / "old.json"
    old.write_text('{"format": "bigbrain-fx cost model", "version": 1}')
    with pytest.raises(InputError, match="expected version 3, found 1"):
        correct_file(tmp_path / "p.sqlite", str(old), tmp_path / "mine.json")
    assert not (tmp_path / "mine.json").exists()


def test_the_command_corrects_the_shipped_base(tmp_path: Path) -> None:
    store, out = ProfileStore(tmp_path / "p.sqlite"), tmp_path / "mine.json"
    for machine, profile in rows(machines=[NEW])[:20]:
        store.put(machine, profile)
    done = call("fit", store.path, "--base", "shipped", "--out", out, "--json")
    assert done.code == 0, done.err
    (found,) = done.objects
    assert (found["machine"], found["ops"]) == (NEW.key, 20)
    assert found["after"] < found["before"]
    assert read_model(out).correction.device != 0.0
    both = call(
        "fit", store.path, "--base", "shipped", "--model", "linear", "--out", out, "--force"
    )
    assert both.code == 2
    assert "--base corrects one" in both.err


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

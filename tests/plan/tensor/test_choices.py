"""What explain says of each axis: what it sends, and the step without it, of that very plan."""

from __future__ import annotations

from dataclasses import replace
from functools import cache

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from bigbrain_fx.core import Cluster, Graph, Link
from bigbrain_fx.errors import InputError
from bigbrain_fx.frontend import capture
from bigbrain_fx.plan import (
    Options,
    Plan,
    Source,
    divisible_axes,
    make_plan,
    part_channels,
    wanted_axes,
)
from bigbrain_fx.plan.tensor import (
    AxisChoice,
    axis_choices,
    cheaper_whole,
    named_axes,
    tensor_text,
)
from bigbrain_fx.plan.tensor.choices import step_with
from tests.support.synthetic import device

WIDTH = 256


class Layers(nn.Module):
    """Hidden layers in a row; the first is wider than the others."""

    def __init__(self) -> None:
        super().__init__()
        hidden = (6 * WIDTH, WIDTH, WIDTH)
        self.up = nn.ModuleList(nn.Linear(WIDTH, each) for each in hidden)
        self.down = nn.ModuleList(nn.Linear(each, WIDTH) for each in hidden)

    def forward(self, x: Tensor) -> Tensor:
        for up, down in zip(self.up, self.down, strict=True):
            x = torch.relu(x + down(F.gelu(up(x))))
        return x.pow(2).mean()


@cache
def graph() -> Graph:
    return capture(Layers(), {"x": torch.randn(48, WIDTH)}).graph


def planned(devices: int, **choices: object) -> Plan:
    given = {"partitioner": "naive", "micro_batches": 4, "tensor": 2, **choices}
    where = Cluster(tuple(device(f"d{i}") for i in range(devices)), Link(1e-5, 1e9))
    return make_plan(graph(), where, Source("model.py"), Options(**given))  # type: ignore[arg-type]


WAYS = [
    (2, {}),
    (2, {"tensor_shares": (3, 1), "recompute": "all"}),
    (3, {"tensor": 3}),
    (4, {"schedule": "1f1b", "defer": (0,)}),
    (4, {"schedule": "interleaved"}),
    (4, {"schedule": "gpipe", "recompute": "ops"}),
    (4, {"schedule": "zb-h1"}),
    (8, {"replicas": 2, "recompute": (0,), "zero_stage": 1}),
]


@pytest.mark.parametrize(("devices", "choices"), WAYS, ids=str)
def test_the_same_axes_give_the_plans_own_step(devices: int, choices: dict[str, object]) -> None:
    plan = planned(devices, **choices)
    assert plan.placement.tensor is not None
    assert step_with(plan, plan.placement.tensor.axes) == plan.forecast.step_s


@pytest.mark.parametrize(("devices", "choices"), WAYS, ids=str)
def test_axes_send_what_the_members_channels_carry(
    devices: int, choices: dict[str, object]
) -> None:
    plan = planned(devices, **choices)
    member = {stage.device: stage.member for stage in plan.stages.stages}
    sent = dict.fromkeys(range(plan.stages.members), 0)
    for part in part_channels(plan):
        if member[part.receiver] == (member[part.sender] + 1) % plan.stages.members:
            sent[member[part.sender]] += part.nbytes
    assert sum(choice.sent_bytes for choice in axis_choices(plan)) == max(sent.values())


def test_a_step_with_an_axis_whole_is_that_of_a_plan_without_it() -> None:
    plan = planned(2)
    assert plan.placement.tensor is not None
    assert [choice.name for choice in axis_choices(plan)] == ["hidden", "hidden.*"]
    for choice in axis_choices(plan):
        rest = tuple(a for a in plan.placement.tensor.axes if a.name not in choice.axes)
        other = planned(2, tensor_tried=rest)
        assert other.placement.tensor is not None
        assert other.placement.tensor.axes == rest
        assert choice.whole_s == other.forecast.step_s


@cache
def two_kinds() -> Graph:
    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.table, self.scores = nn.Embedding(WIDTH, 8), nn.Linear(8, WIDTH)
            self.up, self.down = nn.Linear(8, 64 * WIDTH), nn.Linear(64 * WIDTH, 8)

        def forward(self, words: Tensor) -> Tensor:
            made: Tensor = self.scores(self.down(F.gelu(self.up(self.table(words)))))
            return made

    batch = {"words": torch.arange(48), "next": torch.arange(48)}
    return capture(Model(), batch, lambda y, b: F.cross_entropy(y, b["next"])).graph


@pytest.mark.nightly
def test_an_axis_better_left_whole_is_named_with_its_option() -> None:
    where = Cluster((device("d0"), device("d1")), Link(1e-4, 1e9))
    options = Options(partitioner="naive", micro_batches=4, tensor=2)
    plan = make_plan(two_kinds(), where, Source("model.py"), options)
    choices = axis_choices(plan)
    said = cheaper_whole(choices, plan.forecast.step_s, 0.012)
    assert said == "by this forecast faster with scores:vocabulary whole: --tp-axes 'hidden.*'"
    (rest,) = (choice.name for choice in choices if choice.kind != "vocabulary")
    other = make_plan(two_kinds(), where, Source("model.py"), replace(options, tensor_axes=(rest,)))
    (whole_s,) = (choice.whole_s for choice in choices if choice.kind == "vocabulary")
    assert other.forecast.step_s == whole_s
    assert not cheaper_whole(axis_choices(other), other.forecast.step_s, 0.012)


def test_no_option_is_said_that_would_take_all_of_its_kind() -> None:
    """`--tp-axes hidden` divides `hidden.*`, too."""
    first = AxisChoice("hidden", "hidden", ("hidden",), 8, (4, 4), 100, 2.0)
    others = replace(first, name="hidden.*", axes=("hidden.1",), whole_s=0.5)
    assert not cheaper_whole((first, others), 1.0, 0.012)
    assert not cheaper_whole((first, replace(others, whole_s=0.99)), 1.0, 0.012)  # too near to tell
    assert not cheaper_whole((others,), 1.0, 0.012)  # nothing would be divided


class Ordered(nn.Module):
    """A hidden width that is sorted: an op without a rule."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(self.up(x).sort(-1).values).pow(2).mean()


@pytest.mark.nightly
def test_ops_computed_whole_are_named_with_their_lines() -> None:
    graph = capture(Ordered(), {"x": torch.randn(48, WIDTH)}).graph
    where = Cluster((device("d0"), device("d1")), Link(1e-5, 1e9))
    options = Options(partitioner="naive", micro_batches=4, tensor=2)
    said = tensor_text(make_plan(graph, where, Source("model.py"), options))
    assert "Computed whole, for want of a rule or over all of it: sort (test_choices.py:" in said
    assert "Computed whole" not in tensor_text(planned(2))


@pytest.mark.nightly
def test_a_name_that_is_none_lists_those_that_are() -> None:
    with pytest.raises(InputError, match="no axis 'hiden'") as caught:
        planned(2, tensor_axes=("hiden",))
    assert "the nearest are hidden" in str(caught.value.help)
    assert "by name" in str(caught.value.help)
    assert "tools" not in str(caught.value.help)  # which no wheel has


class Scores(nn.Module):
    """A vocabulary, its scores and its loss: no member joins the scores."""

    def __init__(self) -> None:
        super().__init__()
        self.table, self.scores = nn.Embedding(WIDTH, 8), nn.Linear(8, WIDTH)

    def forward(self, words: Tensor) -> Tensor:
        made: Tensor = self.scores(self.table(words))
        return made


def test_a_vocabulary_sends_what_its_channels_carry_and_no_scores() -> None:
    batch = {"words": torch.arange(48), "next": torch.arange(48)}
    found = capture(Scores(), batch, lambda y, b: F.cross_entropy(y, b["next"]))
    where = Cluster((device("d0"), device("d1")), Link(1e-5, 1e9))
    options = Options(partitioner="naive", micro_batches=4, tensor=2, tensor_axes=("vocabulary",))
    plan = make_plan(found.graph, where, Source("model.py"), options)
    sent = sum(part.nbytes for part in part_channels(plan) if part.sender == "d0")
    assert sum(choice.sent_bytes for choice in axis_choices(plan)) == sent


class Dropping(nn.Module):
    """One hidden width, and dice before it: an op that sees how its input lies in memory."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(F.gelu(self.up(F.dropout(x, 0.5)))).pow(2).mean()


def test_the_only_axis_of_a_model_that_draws_is_compared_with_none() -> None:
    found = capture(Dropping(), {"x": torch.randn(48, WIDTH)})
    where = Cluster((device("d0"), device("d1")), Link(1e-5, 1e9))
    options = Options(partitioner="naive", micro_batches=4, tensor=2)
    plan = make_plan(found.graph, where, Source("model.py"), options)
    (choice,) = axis_choices(plan)
    assert choice.sent_bytes == sum(p.nbytes for p in part_channels(plan) if p.sender == "d0")


def test_axes_that_could_be_divided_are_listed_with_the_names_that_the_option_takes() -> None:
    found = divisible_axes(graph())
    shares = [axis.flops_share for axis in found]
    assert shares == sorted(shares, reverse=True)
    chosen = wanted_axes(graph(), Options(tensor=2))
    assert sum(row.chosen for row in found) == len(chosen)
    total = sum(p.spec.nbytes for p in graph().params)
    for row in (row for row in found if row.chosen):
        named = named_axes(graph(), Options(tensor_axes=(row.name,)))
        same = [axis for axis in named if axis.size == row.size]
        assert (row.kind, row.count) == (same[0].kind, len(same))
        assert row.weight_share == sum(axis.nbytes for axis in same) / total
        assert row.forward_bytes == sum(axis.sent_bytes(backward=False) for axis in same)

"""Which gradients of weights may wait, what is asked for, and ZB-H1's step and order."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.pipelining import schedules
from torch.nn.utils.parametrizations import weight_norm

from bigbrain_fx.core import Graph, OpCost, Stage, Stages
from bigbrain_fx.errors import InputError
from bigbrain_fx.frontend import capture
from bigbrain_fx.plan import Options, Plan, Source, explain, make_plan, replan, with_placement
from bigbrain_fx.plan.recompute import defer_of, deferring, read_defer
from bigbrain_fx.plan.schedule import StageCosts, build, check, held, stage_costs
from bigbrain_fx.plan.schedule.faults import cell
from bigbrain_fx.plan.simulate import simulate
from tests.support import samples
from tests.support.pipelines import all_of, chain, even_costs

# --------------------------------------------------------------------------- which may wait


class Own(nn.Linear):
    """A layer of the user's own, by its type."""


class Net(nn.Module):
    """Layers that may wait, and every way in which one may not."""

    def __init__(self) -> None:
        super().__init__()
        self.table, self.plain = nn.Embedding(8, 4), nn.Linear(4, 4)
        self.thrice, self.bare = nn.Linear(4, 4), nn.Linear(4, 4, bias=False)
        self.normed, self.own = weight_norm(nn.Linear(4, 4)), Own(4, 4)
        self.viewed, self.frozen = nn.Linear(4, 4), nn.Linear(4, 4).requires_grad_(False)
        self.biased, self.read = nn.Linear(4, 4), nn.Linear(4, 4)
        self.biased.bias.requires_grad_(False)
        self.norm, self.conv = nn.LayerNorm(4), nn.Conv1d(3, 3, 3, padding="same")
        self.circular = nn.Conv1d(3, 3, 3, padding=1, padding_mode="circular")
        self.padded, self.back = nn.Conv1d(3, 3, 3, padding=1), nn.ConvTranspose1d(3, 3, 1)
        self.sparse = nn.Embedding(8, 4, scale_grad_by_freq=True)
        self.head = nn.Linear(4, 8, bias=False)
        self.head.weight = self.table.weight

    def forward(self, words: Tensor) -> Tensor:
        """Return one number."""
        x = self.norm(self.plain(self.table(words) + self.sparse(words)))
        for _ in range(3):
            x = torch.tanh(self.thrice(x))
        x = self.bare(self.own(self.normed(x))) + F.linear(x, self.viewed.weight.t())
        x = self.viewed(self.biased(self.frozen(x)))
        x = self.back(self.padded(self.circular(self.conv(x))))
        return (self.head(self.read(x)).square().mean() + self.read.weight.mean()).square()


@pytest.fixture(scope="module")
def graph() -> Graph:
    return capture(Net(), (torch.randint(0, 8, (2, 3)),)).graph


def whole(graph: Graph, device: str = "d0") -> Stages:
    params = tuple(dict.fromkeys(name for op in graph.ops for name in op.params))
    return Stages((Stage(0, device, tuple(op.name for op in graph.ops), params=params),), ())


def test_gradients_that_may_wait(graph: Graph) -> None:
    (stage,) = deferring(graph, whole(graph), [0], "all").stages
    assert set(stage.deferred) == {
        *("table.weight", "plain.weight", "plain.bias", "thrice.weight", "thrice.bias"),
        *("bare.weight", "padded.weight", "padded.bias", "back.weight", "back.bias"),
        "sparse.weight",
    }


def test_a_table_tied_to_what_may_not_wait_does_not(graph: Graph) -> None:
    """The head's op stands for another use of the table's weight: now it is written in place."""
    ops = tuple(
        replace(op, mutates=("head.weight",)) if "head.weight" in op.params else op
        for op in graph.ops
    )
    found = deferring(replace(graph, ops=ops), whole(graph), [0], "all")
    assert "table.weight" not in found.stages[0].deferred


class Holding(nn.Module):
    """A layer with one tensor more, which shares another's, and a complex one."""

    def __init__(self) -> None:
        super().__init__()
        self.q, self.k, self.last = nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 4)
        self.k.weight, self.k.bias = self.q.weight, self.q.bias
        self.k.gain = nn.Parameter(torch.ones(4))
        self.wave = nn.Linear(4, 4, dtype=torch.complex64)

    def forward(self, x: Tensor) -> Tensor:
        """Return one number."""
        x = self.q(x) * (self.k(x) * self.k.gain)
        return self.last(self.wave(x.to(torch.complex64)).abs()).square().mean()


def test_gradients_of_functional_calls_do_not_wait() -> None:
    found = capture(Holding(), {"x": torch.randn(2, 4)}, None).graph
    made = deferring(found, whole(found), (0,), "all")
    assert made.stages[0].deferred == ("last.weight", "last.bias")


def test_a_stage_in_which_nothing_may_wait_defers_nothing(graph: Graph) -> None:
    norm = tuple(op.name for op in graph.ops if op.target == "aten.layer_norm.default")
    stages = Stages((Stage(0, "d0", norm, params=("norm.weight", "norm.bias")),), ())
    assert deferring(graph, stages, [0], "all").deferring == ()


@pytest.mark.parametrize(
    ("text", "wanted"),
    [(None, None), ("none", ()), ("all", "all"), ("0, 2", (0, 2)), ("1,1", (1,))],
)
def test_requests_for_delayed_gradients(text: str | None, wanted: object) -> None:
    assert read_defer(text) == wanted


@pytest.mark.parametrize("text", ["some", "0;1", "-1", "", "²"])
def test_an_unreadable_value_says_what_to_write(text: str) -> None:
    with pytest.raises(InputError, match="expected all, none or numbers of stages") as caught:
        read_defer(text)
    assert (
        caught.value.help == "write --delay-weight-gradients all, or --delay-weight-gradients 0,2"
    )


def test_stages_that_are_not_there_are_refused(graph: Graph) -> None:
    with pytest.raises(InputError, match="there is no stage 3") as caught:
        deferring(graph, whole(graph), [0], (0, 3))
    assert caught.value.help == "choose from 0, or write all"
    assert deferring(graph, whole(graph), [0], (3,), lenient=True).deferring == ()
    with pytest.raises(InputError, match="stage 0 has no backward to split"):
        deferring(graph, whole(graph), [], (0,))


# --------------------------------------------------------------------------- plans


@pytest.fixture(scope="module")
def split() -> Plan:
    return samples.plan("gpt", "naive", 3, "zb-h1", 4)


def test_a_plan_for_zb_h1_defers_everywhere_unless_told(split: Plan) -> None:
    assert split.stages.deferring == (0, 1, 2)
    assert "split backward: gradients of weights of stages 0, 1, 2 wait" in str(split)
    assert explain(split).split == "split backward: gradients of weights of stages 0, 1, 2 wait"
    found, cluster = samples.sample("gpt"), samples.cluster(2)

    def made(**choices: Any) -> Plan:
        options = Options("naive", micro_batches=4, **choices)
        return make_plan(found.graph, cluster, found.source, options)

    assert made(schedule="zb-h1", defer=()).stages.deferring == ()
    assert made(schedule="zb-h1", defer=(1,)).stages.deferring == (1,)
    assert made(schedule="1f1b").stages.deferring == ()
    early = made(schedule="1f1b", defer="all")
    assert early.forecast.step_s < made(schedule="1f1b").forecast.step_s
    assert [cell(i) for i in early.programs[1].instructions if cell(i)[0] in "FBW"][:4] == [
        *("F1.0", "B1.0", "W1.0", "F1.1")
    ]


def test_a_split_plan_moves_to_other_devices(split: Plan) -> None:
    other = replan(split, samples.cluster(2))
    assert (other.schedule, other.stages.deferring) == ("zb-h1", (0, 1))
    again = with_placement(split, split.placement)
    assert (again.schedule, again.programs) == (split.schedule, split.programs)


def test_seconds_and_bytes_of_a_split_backward_are_those_of_a_whole_one(split: Plan) -> None:
    graph = split.graph.at(split.rows)
    costs = samples_costs(split)
    apart = stage_costs(graph, split.stages, costs)
    plain = replace(
        split.stages, stages=tuple(replace(s, deferred=()) for s in split.stages.stages)
    )
    together = stage_costs(graph, plain, costs)
    assert apart.whole.backward_s == pytest.approx(together.backward_s)
    assert all(0 < w < b for w, b in zip(apart.weight_s, together.backward_s, strict=True))
    assert apart.gradient_bytes == together.gradient_bytes
    for kept, working in zip(apart.deferred_bytes, apart.working, strict=True):
        assert kept > 0
        assert 0 < working.waiting_bytes < 1.02 * working.saved_bytes


def samples_costs(plan: Plan) -> Any:
    from bigbrain_fx.plan import costs_of

    return costs_of(plan)


# --------------------------------------------------------------------------- ZB-H1


def deferred(stages: Stages) -> Stages:
    return replace(stages, stages=tuple(replace(s, deferred=("w",)) for s in stages.stages))


def units(count: int) -> StageCosts:
    return replace(even_costs(count), backward_s=(1.0,) * count, weight_s=(1.0,) * count)


@pytest.mark.parametrize(("micro_batches", "step_s"), [(1, 9), (4, 15), (8, 27), (16, 51)])
def test_equal_stages_take_what_the_paper_says(micro_batches: int, step_s: float) -> None:
    """p = 4, f = b = w = 1: M (f + b + w) + (p - 1) f, as soon as M reaches p."""
    stages, costs = deferred(chain(4)), units(4)
    programs = build("zb-h1", stages, micro_batches, costs, all_of(stages))
    assert check(programs, stages, trained=all_of(stages)) == []
    assert simulate(programs, stages, costs).step_s == step_s


def test_1f1b_takes_33_units_and_30_where_weights_follow_their_backward() -> None:
    plain, apart = chain(4), deferred(chain(4))
    one = build("1f1b", plain, 8, even_costs(4), all_of(plain))
    two = build("1f1b", apart, 8, units(4), all_of(apart))
    assert simulate(one, plain, even_costs(4)).step_s == 33
    assert simulate(two, apart, units(4)).step_s == 30


@pytest.mark.parametrize("count", [2, 3, 4])
@pytest.mark.parametrize("rounds", [1, 2, 4])
def test_the_order_is_torchs(count: int, rounds: int) -> None:
    stages = deferred(chain(count))
    programs = build("zb-h1", stages, count * rounds, units(count), all_of(stages))
    for rank, program in enumerate(programs):
        ours = [cell(i) for i in program.instructions if cell(i)[0] in "FBW"]
        assert ours == torchs(rank, count, count * rounds)


def torchs(rank: int, count: int, micro_batches: int) -> list[str]:
    """Ask torch's schedule what a rank computes, without its processes."""
    cls = schedules.ScheduleInterleavedZeroBubble
    about = SimpleNamespace(
        n_local_stages=1,
        microbatches_per_round=count,
        pp_group_size=count,
        _n_microbatches=micro_batches,
    )
    found = cls._calculate_single_rank_operations(cast(Any, about), rank)
    letters = {"FORWARD": "F", "BACKWARD_INPUT": "B", "BACKWARD_WEIGHT": "W"}
    return [
        f"{letters[op.computation_type.name]}{op.stage_index}.{op.microbatch_index}"
        for op in found
        if op is not None
    ]


def test_delayed_inputs_are_held_until_their_weight_gradients() -> None:
    stages = deferred(chain(1))
    working = replace(units(1).working_of(0), saved_bytes=100, forward_bytes=100)
    working = replace(working, backward_bytes=(0, 0), waiting_bytes=90)
    costs = replace(units(1), working=(working,), gradient_bytes=(50,), deferred_bytes=(30,))
    programs = build("gpipe", stages, 2, costs, all_of(stages))
    found = [entry.activations_bytes for entry in held(programs[0], stages, costs)]
    assert [cell(i) for i in programs[0].instructions] == [
        *("F0.0", "F0.1", "B0.0", "W0.0", "B0.1", "W0.1", "step")
    ]
    assert found == [100, 200, 200, 190, 100, 90, 0]
    sums = [entry.gradients_bytes for entry in held(programs[0], stages, costs)]
    assert sums == [0, 0, 20, 50, 50, 50, 50]


def test_every_stage_holds_as_many_micro_batches_as_there_are_stages() -> None:
    """What is between a forward and its W: the most that 1F1B holds anywhere."""
    stages = deferred(chain(4))
    for program in build("zb-h1", stages, 12, units(4), all_of(stages)):
        live, most = 0, 0
        for name in (cell(i)[0] for i in program.instructions):
            live += (name == "F") - (name == "W")
            most = max(most, live)
        assert most == 4


def test_a_frozen_stage_has_nothing_to_wait_for() -> None:
    stages = chain(2)
    stages = replace(stages, stages=(stages.stages[0], replace(stages.stages[1], deferred=("w",))))
    programs = build("zb-h1", stages, 3, units(2), all_of(stages))
    assert check(programs, stages, trained=all_of(stages)) == []
    assert not any(cell(i)[0] == "W" for i in programs[0].instructions)


def test_an_op_delays_all_but_its_inputs_gradient() -> None:
    assert defer_of(deferred(chain(2)), [0, 1]) == "all"
    assert defer_of(chain(2), [0, 1]) == ()
    assert OpCost(1.0, 3.0, 2.0).backward_input_s == 2.0


# --------------------------------------------------------------------------- inference


def test_inference_may_ask_for_no_split_backward() -> None:
    graph = capture(nn.Linear(4, 4), {"input": torch.ones(2, 4)}, training=False).graph
    make_plan(graph, samples.cluster(2), Source("m.py"), Options("naive", defer=()))

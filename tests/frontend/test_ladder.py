"""The capture ladder: answers from plain runs, numbers read in Python, dice."""

from __future__ import annotations

import random
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from bigbrain_fx.core import Graph, Op
from bigbrain_fx.errors import CaptureError, InputError
from bigbrain_fx.frontend import capture, run_graph
from bigbrain_fx.frontend.answers import read_answers
from bigbrain_fx.frontend.tracing import capture_job
from bigbrain_fx.frontend.translation.oracle import WrongAnswerError, answers_in, is_negated
from bigbrain_fx.frontend.translation.params import Store
from bigbrain_fx.frontend.translation.refusals import explain, number_read
from bigbrain_fx.frontend.translation.trace_refusals import instead_of_branch
from bigbrain_fx.frontend.translation.translate import translate
from bigbrain_fx.plan.cut import live_ops
from bigbrain_fx.planning.units import is_size, units
from tests.support.captured import assert_same, run
from tests.support.messages import refused


def assumed(graph: Graph) -> list[str]:
    return [op.target for op in graph.ops if op.target.startswith("assume.")]


def line_of(text: str) -> int:
    """Return the number of the one line of this file that ends with a marker."""
    with open(__file__) as file:
        found = [i for i, line in enumerate(file, 1) if line.rstrip().endswith(f"# {text}")]
    assert len(found) == 1, text
    return found[0]


# --------------------------------------------------------------------------- yes and no


class Guarded(nn.Module):
    """Asks tensors for yes and no in the ways that people do."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.drop = nn.Dropout(0.1)

    def forward(self, x: Tensor) -> Tensor:
        h = self.drop(self.linear(x))
        if not torch.isfinite(h).all():  # finite
            h = h.clamp(-1, 1)
        if (h > 1e6).any().item() or (h < -1e6).any():
            h = h * 0
        with torch.no_grad():
            if torch.isnan(h).any():
                h = h.nan_to_num()
        assert torch.equal(x, x)
        return h.square().mean()


@pytest.mark.nightly
def test_one_sided_branches_are_kept_as_assumptions() -> None:
    model = Guarded()
    found = capture(model, (torch.randn(4, 4),))
    assert found.graph.static_batch is None
    assert_same(model, found, model)
    line = line_of("finite")
    assert f"assumed False at test_ladder.py:{line}: " in found.warnings[0]
    assert assumed(found.graph) == ["assume.true", "assume.false", "assume.false", "assume.true"]
    region = next(op for op in found.graph.ops if op.body is not None)
    assert region.checks
    assert [op.target for op in region.body.ops if op.checks] == ["assume.false"]  # type: ignore[union-attr]


def test_assumptions_stay_beside_what_they_check() -> None:
    graph = capture(Guarded(), (torch.randn(4, 4),)).graph.at(4)
    checks = [op for op in graph.ops if op.checks]
    assert {op.name for op in checks} <= live_ops(graph)
    assert not any(is_size(op) for op in checks)
    groups = {name: group for group in units(graph).groups for name in group}
    for op in checks:
        assert op.name in groups
        assert all(groups[ref] is groups[op.name] for ref in op.refs if ref in groups)


def test_the_graph_checks_its_assumptions() -> None:
    found = capture(Guarded(), (torch.randn(4, 4),))
    with pytest.raises(WrongAnswerError, match="assumed to be False, and is True here: if not"):
        run(found, {"x": torch.full((4, 4), float("inf"))})


class Asserting(nn.Module):
    """Checks its input as libraries do: in other words while it is traced."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        if torch.compiler.is_exporting():
            torch._check_tensor_all(x < 100)
        elif not (x < 100).all():
            raise ValueError("too large")
        return self.linear(x).square().mean()


def test_an_assertion_of_torch_is_an_assumption() -> None:
    graph = capture(Asserting(), (torch.rand(8, 4),)).graph
    assert assumed(graph) == ["assume.true"]
    with pytest.raises(WrongAnswerError, match=r"test_ladder\.py:"):
        run_graph(graph, dict(Asserting().named_parameters()), {"x": torch.full((8, 4), 200.0)})


class TwoWays(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        if x.sum() > 0:  # two ways
            return x.sum()
        return x.mean()


class Loop(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        for column in x.sum(0):
            if column > 0:
                x = x + 1
        return x.sum()


@pytest.mark.parametrize("kind", [TwoWays, Loop])
def test_a_branch_that_goes_both_ways_is_refused(kind: type[nn.Module]) -> None:
    torch.manual_seed(0)
    with refused("BX0101b", CaptureError) as caught:
        capture(kind(), (torch.randn(4, 4),), strict=True)
    assert caught.value.at is not None
    assert caught.value.at.startswith("test_ladder.py:")
    assert f"--assume {caught.value.at}=false" in (caught.value.help or "")


def test_a_loop_that_may_leave_its_value_alone_is_opaque() -> None:
    found = capture(Loop(), (torch.randn(4, 4),))
    for x in (torch.rand(4, 4), -torch.rand(4, 4)):  # added to, and given back
        assert run(found, {"x": x})[found.graph.loss or ""] == Loop()(x)


def test_answers_by_hand() -> None:
    at = f"test_ladder.py:{line_of('two ways')}"
    x = torch.arange(1.0, 9.0).view(4, 2)
    yes = capture(TwoWays(), (x,), assume={at: True})
    assert assumed(yes.graph) == ["assume.true"]
    assert answers_in(yes.graph) == {at: True}
    assert run(yes, {"x": x})[yes.graph.loss or ""] == 36
    with pytest.raises(CaptureError, match="assumed to be False, and is True here"):
        capture(TwoWays(), (x,), assume={at: False})
    elsewhere = capture(TwoWays(), (x,), assume={at: True, "other.py:1": True})
    assert "--assume other.py:1: no tensor is asked for yes or no there" in elsewhere.warnings


@pytest.mark.nightly
def test_without_weights_only_answers_by_hand_help() -> None:
    with torch.device("meta"):
        model = Guarded()
    with refused("BX0101a", CaptureError) as caught:
        capture(model, (torch.randn(4, 4),))
    first = f"test_ladder.py:{line_of('finite')}"
    assert caught.value.at == first
    given = {first: False}
    for _ in range(3):  # each refusal names the next line: the remedy works when tried
        with refused("BX0101a", CaptureError) as caught:
            capture(model, (torch.randn(4, 4),), assume=given)
        given[caught.value.at or ""] = "assert" in caught.value.what
    assert len(assumed(capture(model, (torch.randn(4, 4),), assume=given).graph)) == 4


@pytest.mark.parametrize(
    ("code", "negated"),
    [
        ("if not x.all():", True),
        ("elif not x.all():", True),
        ("assert not x.any()", True),
        ("if x.any(): return not y", False),
        ("if not a.any() and b.all():", False),
        ("while x.any():", False),
        ("if (", False),
    ],
)
def test_options_against_the_ladder(code: str, negated: bool) -> None:
    assert is_negated(code) is negated


def test_reading_answers() -> None:
    assert read_answers(["a/b.py:3=true", "b.py:4=FALSE"]) == {"a/b.py:3": True, "b.py:4": False}
    for bad in ("b.py=true", "b.py:x=true", "b.py:3=maybe", "b.py:3"):
        with pytest.raises(InputError, match="FILE:LINE=true"):
            read_answers([bad])
    with pytest.raises(InputError, match="true and false"):
        read_answers(["a.py:3=true", "a.py:3=false"])


# --------------------------------------------------------------------------- dice


class TorchDrop(nn.Module):
    """Skips layers as Hugging Face's OPT does."""

    def __init__(self, rate: float) -> None:
        super().__init__()
        self.first = nn.Linear(4, 4)
        self.layers = nn.ModuleList(nn.Linear(4, 4) for _ in range(2))
        self.rate = rate

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        for layer in self.layers:
            if torch.rand([]) < self.rate:
                continue
            x = layer(x)
        return x.sum()


@pytest.mark.parametrize("rate", [0.5, 0.004])  # the latter is seen by a thousand draws alone
def test_layers_that_random_numbers_skip_are_opaque(rate: float) -> None:
    with refused("BX0120a", CaptureError):
        capture(TorchDrop(rate), (torch.randn(4, 4),), strict=True)
    drawn = capture(TorchDrop(rate), (torch.randn(4, 4),)).graph.ops[1]
    assert (drawn.target, drawn.random) == ("leaf.forward_2_2", True)


def test_layers_that_nothing_skips_are_traced() -> None:
    model = TorchDrop(0.0)
    found = capture(model, (torch.randn(4, 4),))
    assert_same(model, found, model)
    assert assumed(found.graph) == ["assume.false"] * 2


class PythonDrop(TorchDrop):
    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        for layer in self.layers:
            if random.random() < self.rate:  # rolls
                continue
            x = layer(x)
        return x.sum()


def test_lines_that_draw_with_python_are_opaque_where_it_counts() -> None:
    state = random.getstate()
    with refused("BX0120b", CaptureError) as caught:
        capture(PythonDrop(0.5), (torch.randn(4, 4),), strict=True)
    assert caught.value.at == f"test_ladder.py:{line_of('rolls')}"
    drawn = capture(PythonDrop(0.5), (torch.randn(4, 4),)).graph.ops[1]
    assert (drawn.target, drawn.random) == ("leaf.forward_2_2", True)
    found = capture(PythonDrop(0.0), (torch.randn(4, 4),))
    assert "changed nothing" in found.warnings[0]
    assert random.getstate() == state


# --------------------------------------------------------------------------- numbers


class Scaled(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        h = self.linear(x)
        return (h / h.abs().max().item()).square().sum()


class Counted(Scaled):
    def forward(self, x: Tensor) -> Tensor:
        h = self.linear(x)
        count = int((x > 0).sum())
        scaled = (h * count).sum() + (h / (2.0 * count + 1)).sum()
        return scaled + (float(x.abs().max()) * h.mean(0)).sum()


class Branched(Scaled):
    def forward(self, x: Tensor) -> Tensor:
        return self.linear(x)[: int((x > 0).sum())].sum()


class Alone(Scaled):
    def forward(self, x: Tensor) -> Tensor:
        return self.linear(x).sum() * x.max().item()  # no tensor with dimensions beside it


def test_numbers_read_in_python_are_no_constants() -> None:
    model = Scaled()
    found = capture(model, (torch.randn(4, 4),))
    assert_same(model, found, model)
    assert_same(model, found, model, 7)
    for seed in range(3):
        x = torch.randn(4, 4, generator=torch.Generator().manual_seed(seed))
        assert run(found, {"x": x})[found.graph.loss or ""] == model(x)


def test_lines_that_take_int_and_float_are_opaque() -> None:
    model = Scaled()
    model.__class__ = Counted
    found = capture(model, (torch.randn(4, 4),))
    assert any(op.target.startswith("leaf.forward_") for op in found.graph.ops)
    assert {call.call for op in found.graph.ops for call in op.modules} == {0}  # no address
    for seed in range(3):
        x = torch.randn(4, 4, generator=torch.Generator().manual_seed(seed))
        assert run(found, {"x": x})[found.graph.loss or ""] == model(x)


@pytest.mark.gate("Branched")
@pytest.mark.parametrize("kind", [Branched, Alone])
def test_numbers_that_no_tensor_can_be_stay_in_the_lines_of_forward(kind: type[nn.Module]) -> None:
    model = kind()
    found = capture(model, (torch.randn(4, 4),))
    assert [op.target for op in found.graph.ops][-1].startswith("leaf.forward_")
    for seed in range(3):
        x = torch.randn(4, 4, generator=torch.Generator().manual_seed(seed))
        assert run(found, {"x": x})[found.graph.loss or ""] == model(x)


class Between(Scaled):
    """The rows that go on are known between two calls of modules."""

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(self.linear(x)[: int((x > 0.9).sum())]).sum()


@pytest.mark.nightly
@pytest.mark.parametrize("leaves", [[], ["Between"]])
def test_numbers_that_a_module_is_called_by_stay_in_the_lines(leaves: list[str]) -> None:
    model = Whole(Between())
    found = capture(model, (torch.randn(4, 4),), leaves=leaves)
    assert any(op.target.startswith("leaf.inner") for op in found.graph.ops)
    for seed in range(3):
        x = torch.randn(4, 4, generator=torch.Generator().manual_seed(seed))
        assert run(found, {"x": x})[found.graph.loss or ""] == model(x)


@pytest.mark.parametrize(
    ("code", "text"),
    [
        ('self.stats["h"] = "%.3f" % h.std()', True),
        ('self.last = f"{h.std():.3f}"', True),
        ("text = str(round(float(h.std()), 3))", True),
        ('self.log.append("{}".format(h.std()))', True),
        ("n = int(h.sum()) % 3", False),
        ("if h.sum() > 0:", False),
    ],
)
def test_a_number_that_becomes_text_is_told_to_stay_a_tensor(code: str, text: bool) -> None:
    for help_ in (instead_of_branch("m.py:3", code), number_read("m.py:3", code).help or ""):
        assert help_.startswith("keep the tensor, and make text of it") == text


class Whole(nn.Module):
    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, x: Tensor) -> Tensor:
        return self.inner(x)


class Tied(Counted):
    def __init__(self) -> None:
        super().__init__()
        self.other = nn.Linear(4, 4)
        self.other.weight = self.linear.weight


def test_lines_that_read_tied_weights_are_opaque() -> None:
    model = Tied()
    found = capture(model, (torch.randn(4, 4),))
    assert_same(model, found, model)


# --------------------------------------------------------------------------- the check


class WrongBackward(torch.autograd.Function):
    """A backward that is no derivative: kept as the user wrote it."""

    @staticmethod
    def forward(ctx: object, x: Tensor) -> Tensor:
        return x.round()

    @staticmethod
    def backward(ctx: object, grad: Tensor) -> Tensor:
        return 3 * grad


class Rounded(Scaled):
    def forward(self, x: Tensor) -> Tensor:
        return WrongBackward.apply(self.linear(x)).square().mean()  # type: ignore[no-untyped-call]


def test_the_check_sees_gradients(monkeypatch: pytest.MonkeyPatch) -> None:
    def without_backward(*args: Any, **kwargs: Any) -> tuple[Graph, Store]:
        graph, store = translate(*args, **kwargs)
        ops = tuple(_plain(op) if op.target.startswith("opaque.") else op for op in graph.ops)
        return replace(graph, ops=ops), store

    monkeypatch.setattr(capture_job, "translate", without_backward)
    with refused("BX0201", CaptureError, vary=(r"\d\.\de[+-]\d+",)):
        capture(Rounded(), (torch.randn(4, 4),), strict=True)


def _plain(op: Op) -> Op:
    return replace(op, target="aten.round.default")


def test_any_other_error_names_the_line_and_a_way_out() -> None:
    found = explain(ValueError("what torch said"))
    assert isinstance(found, CaptureError)
    assert found.code == "BX0199d"
    assert "--opaque" in (found.help or "")


def test_run_graph_needs_the_leafs_module() -> None:
    found = capture(Whole(Scaled()), (torch.randn(4, 4),), leaves=["inner"])
    with pytest.raises(InputError, match=r"leaf\.inner"):
        run_graph(found.graph, found.tensors, found.inputs())

"""Text and reads of a trace: calls become plain ones, draws, rounding, and what Python reads."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from bigbrain_fx.core import ModuleCall, Op, Ref
from bigbrain_fx.frontend import capture
from bigbrain_fx.frontend.randomness import draw_places, place_name
from bigbrain_fx.frontend.tracing.executor.tolerance import (
    allowed,
    coarsest,
    differences,
    distance,
    exact_gradients,
)
from bigbrain_fx.frontend.tracing.opaque.tensor_access import TensorReads
from bigbrain_fx.runtime import modules
from bigbrain_fx.runtime.modules import Region
from tests.support.captured import assert_same
from tests.support.synthetic import graph_of, op

D = 8


def mean_square(output: Tensor, _: object) -> Tensor:
    return output.square().mean()


class Cached(nn.Module):
    """Joins its keys to an empty cache, as a first step of generation does."""

    def __init__(self) -> None:
        super().__init__()
        self.key = nn.Linear(D, D)

    def forward(self, x: Tensor) -> Tensor:
        keys = self.key(x).view(x.shape[0], 2, 4).transpose(1, 2)
        return torch.cat([torch.tensor([]), keys], dim=-2) * 2


def test_an_empty_cache_is_a_copy() -> None:
    model = Cached()
    found = capture(model, torch.randn(4, D), mean_square)
    targets = [op.target for op in found.graph.ops]
    assert "aten.cat.default" not in targets
    assert "aten.contiguous.default" in targets
    constants = {p.name for p in found.graph.params if p.kind == "constant"}
    assert not any(constants.intersection(op.params) for op in found.graph.ops)
    assert_same(model, found, lambda x: mean_square(model(x), None))


class Promoting(Cached):
    """An empty tensor of doubles makes the result one of doubles."""

    def forward(self, x: Tensor) -> Tensor:
        return torch.cat([torch.zeros(0, dtype=torch.float64), self.key(x)], dim=0)


def test_an_empty_part_that_changes_the_dtype_stays() -> None:
    model = Promoting()
    found = capture(model, torch.randn(4, D), mean_square)
    assert "aten.cat.default" in [op.target for op in found.graph.ops]
    assert_same(model, found, lambda x: mean_square(model(x), None))


class DroppingInPlace(nn.Module):
    """Dropout that writes into its argument: into a view, and into what nothing else shares."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(D, D)
        self.drop = nn.Dropout(0.5, inplace=True)

    def forward(self, x: Tensor) -> Tensor:
        y = self.drop(self.linear(x).flatten(1))
        return self.drop(self.linear(y))


def test_dropout_in_place_is_no_idle_call() -> None:
    model = DroppingInPlace()
    found = capture(model, torch.randn(4, D), mean_square)
    assert sum(op.random for op in found.graph.ops) == 2
    assert_same(model, found, lambda x: mean_square(model(x), None))


@torch.library.custom_op("bigbrain_tests::twice", mutates_args=())
def twice(x: Tensor) -> Tensor:
    """Double a tensor, as an op of a library."""
    return x * 2


@twice.register_fake
def _(x: Tensor) -> Tensor:
    return torch.empty_like(x)


twice.register_autograd(lambda _ctx, gradient: gradient * 2)


class WithLibraryOp(nn.Module):
    """Calls an op that a Python library made."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(D, D)

    def forward(self, x: Tensor) -> Tensor:
        return twice(self.linear(x))


def test_an_op_of_a_library_is_kept_by_name_with_its_module() -> None:
    model = WithLibraryOp()
    found = capture(model, torch.randn(4, D), mean_square)
    target = next(op.target for op in found.graph.ops if "twice" in op.target)
    assert target == f"library.bigbrain_tests.twice.default.{__name__}.twice"
    assert_same(model, found, lambda x: mean_square(model(x), None))


# --------------------------------------------------------------------------- draws


def dropout(name: str, path: str) -> Op:
    made = op(name, "aten.dropout.default", Ref("x"), 0.1, True, random=True)
    return replace(made, modules=(ModuleCall(path, "torch.nn.Dropout"),))


def test_draws_are_counted_per_module() -> None:
    still = op("r", "aten.relu.default", Ref("x"))
    ops = [
        dropout("a", "drop"),
        still,
        dropout("b", "drop"),
        dropout("c", "other"),
        dropout("d", "drop"),
    ]
    assert draw_places(graph_of(ops)) == {
        "a": ("drop", 0),
        "b": ("drop", 1),
        "c": ("other", 0),
        "d": ("drop", 2),
    }


@pytest.mark.parametrize(
    ("path", "name", "call", "index", "of", "expected"),
    [
        ("", "drop", 0, 0, 1, "drop"),
        ("blocks.3", "drop", 0, 0, 1, "blocks.3.drop"),
        ("blocks.3", "drop", 2, 0, 1, "blocks.3.drop#2"),
        ("blocks.3", "drop", 0, 1, 2, "blocks.3.drop#1"),
        ("blocks.3", "drop", 2, 1, 2, "blocks.3.drop#5"),
        ("blocks.3", "", 0, 0, 1, "blocks.3"),
    ],
)
def test_the_runtime_builds_the_same_text(
    monkeypatch: pytest.MonkeyPatch,
    path: str,
    name: str,
    call: int,
    index: int,
    of: int,
    expected: str,
) -> None:
    drawn: list[str] = []
    monkeypatch.setattr(modules, "reseed", lambda key, place, device: drawn.append(place))
    monkeypatch.setattr(modules.active, "key", (0, 0, 0))
    region = Region()
    region.path, region.call = path, call
    with region.seeded(name, index, of):
        pass
    full = ".".join(part for part in (path, name) if part)
    assert drawn == [expected] == [place_name(full, call * of + index)]


def test_with_no_key_the_generator_goes_on() -> None:
    torch.manual_seed(7)
    expected = torch.rand(3)
    torch.manual_seed(7)
    with Region().seeded("drop"):
        assert torch.equal(torch.rand(3), expected)


def test_a_key_gives_the_same_draw_wherever_it_is_used() -> None:
    draws = []
    for before in (1, 2):
        torch.manual_seed(before)
        modules.reseed((0, 3, 1), "blocks.3.drop", torch.device("cpu"))
        draws.append(torch.rand(3))
    assert torch.equal(*draws)
    modules.reseed((0, 3, 2), "blocks.3.drop", torch.device("cpu"))
    assert not torch.equal(torch.rand(3), draws[0])


# --------------------------------------------------------------------------- rounding


FLOAT32, BFLOAT16 = coarsest([torch.float32]), coarsest([torch.bfloat16, torch.float32])


def test_the_tolerance_follows_the_coarsest_type() -> None:
    assert allowed(FLOAT32) == 1e-6
    assert allowed(coarsest([torch.float64, torch.float32])) == 1e-6
    assert allowed(coarsest([])) == 1e-6
    assert allowed(BFLOAT16) == pytest.approx(8 * 2**-7)
    assert allowed(coarsest([torch.float16, torch.int64])) == pytest.approx(8 * 2**-10)


@pytest.mark.parametrize(("off", "differs"), [(5e-7, False), (2e-6, True)])
def test_without_an_exact_gradient_the_tolerance_decides(off: float, differs: bool) -> None:
    want = {"w": torch.tensor([1.0, -0.25])}
    have = {"w": torch.tensor([1.0 + off, -0.25])}
    assert bool(list(differences(want, have, FLOAT32))) is differs


def test_as_near_to_the_exact_gradient_as_the_modules_own() -> None:
    exact = {"w": torch.tensor([1.0, 2.0], dtype=torch.float64)}
    want = {"w": torch.tensor([1.00001, 2.0])}
    near, far = {"w": torch.tensor([0.99999, 2.0])}, {"w": torch.tensor([0.9999, 2.0])}
    assert not list(differences(want, near, FLOAT32, lambda: exact))
    (line,) = differences(want, far, FLOAT32, lambda: exact)
    assert line.startswith("gradient of w differs by 5.")
    assert "allowed 1e-06" in line


def test_an_exact_run_of_something_else_excuses_nothing() -> None:
    """Other random numbers in float64: its gradients are far from the module's own."""
    other = {"w": torch.tensor([-3.0, 7.0], dtype=torch.float64)}
    want, have = {"w": torch.tensor([1.0, 2.0])}, {"w": torch.tensor([1.1, 2.0])}
    assert list(differences(want, have, FLOAT32, lambda: other))


def test_a_missing_gradient_is_zero_and_nan_is_far() -> None:
    assert distance(None, None) == 0.0
    assert distance(torch.ones(2), None) == 1.0
    assert distance(torch.full((2,), torch.nan), torch.full((2,), torch.nan)) == 0.0
    assert distance(torch.full((2,), torch.nan), torch.ones(2)) == float("inf")
    assert list(differences({"w": torch.ones(2)}, {}, FLOAT32))


class Halved(nn.Module):
    """A step: it returns its loss."""

    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4, dtype=dtype)
        self.drop = nn.Dropout(0.5)

    def forward(self, x: Tensor) -> tuple[Tensor, ...]:
        return (self.drop(self.linear(x)).square().mean(),)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_exact_gradient_is_that_of_float64_under_the_same_dice(dtype: torch.dtype) -> None:
    step, x = Halved(dtype), torch.randn(8, 4, dtype=dtype)
    torch.default_generator.manual_seed(3)
    own = torch.autograd.grad(step(x)[0], list(step.parameters()))
    names = ["linear.weight", "linear.bias"]
    exact = exact_gradients(step, step, [x], names, 3)
    assert exact is not None
    for name, gradient in zip(names, own, strict=True):
        found = exact[name]
        assert found is not None
        assert found.dtype is torch.float64
        assert distance(gradient, found) < 20 * coarsest([dtype]) * float(gradient.abs().max())
    assert step.linear.weight.dtype is dtype


class Stubborn(Halved):
    def forward(self, x: Tensor) -> tuple[Tensor, ...]:
        return (self.linear(x.float()).mean(),)


def test_a_module_that_insists_on_its_type_has_no_exact_gradient() -> None:
    step = Stubborn(torch.float32)
    assert exact_gradients(step, step, [torch.ones(2, 4)], ["linear.weight"], 0) is None


# --------------------------------------------------------------------------- what Python reads


def after(lines: Callable[[Tensor], object]) -> TensorReads:
    reads = TensorReads()
    with reads:
        lines(torch.tensor([1.0, -1.0, 2.0]))
    return reads


ASKING: dict[str, Callable[[Tensor], object]] = {
    "bool": lambda x: 1 if (x > 0).any() else 2,
    "item": lambda x: x.max().item(),
    "numpy": lambda x: x.numpy(),
    "rows that a mask leaves": lambda x: len(x[x > 0]),
    "shape of what is picked": lambda x: x.masked_select(x > 0).exp().shape[0],
    "a loop over indices": lambda x: [*(x > 0).nonzero()],
}
PLAIN: dict[str, Callable[[Tensor], object]] = {
    "a mask": lambda x: x[x > 0].mean(),
    "its own shape": lambda x: x.shape[0] + len(x) + x.numel(),
    "a library's loss over what is picked": lambda x: F.mse_loss(x[x > 0], x[x > 0] + 1),
}


@pytest.mark.parametrize("what", ASKING)
def test_numbers_read_by_python_may_lead_elsewhere(what: str) -> None:
    assert after(ASKING[what]).asks


@pytest.mark.parametrize("what", PLAIN)
def test_values_that_stay_in_tensors_do_not(what: str) -> None:
    assert not after(PLAIN[what]).asks


def test_readers_are_listed_without_those_that_pass_on() -> None:
    a, b, c = torch.zeros(3, 2).unbind()
    reads = TensorReads()
    with reads:
        a + 1
    assert reads.numbers([a, b, c]) == {0}
    with reads:
        bool(a.any())
    assert reads.numbers([a, b, c]) == {0, 1, 2}
    assert reads.numbers([a, b, c], apart_from=[c]) == {0, 1}

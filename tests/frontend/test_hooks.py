"""Gradient hooks: refused on parameters, run with the opaque modules that have or set them."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.modules import module as torch_modules

from bigbrain_fx.errors import CaptureError
from bigbrain_fx.frontend import Captured, capture, leaf_paths
from tests.support.captured import gradients, run
from tests.support.messages import refused

THIS = Path(__file__).name


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.up = nn.Linear(6, 8)
        self.down = nn.Linear(8, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(torch.tanh(self.up(x))).square().mean()


def half(*given: Any) -> Any:
    """Halve what a hook of any kind is given."""
    grads = given[-1] if len(given) < 3 else given[1]
    if isinstance(grads, tuple):
        return tuple(g * 0.5 if g is not None else None for g in grads)
    return grads * 0.5


def in_place(parameter: Tensor) -> None:
    assert parameter.grad is not None
    parameter.grad.clamp_(-0.01, 0.01)


def on_parameter(net: Net) -> None:
    net.up.weight.register_hook(half)


def after_accumulating(net: Net) -> None:
    net.up.weight.register_post_accumulate_grad_hook(in_place)


def on_module(net: Net) -> None:
    net.down.register_full_backward_hook(half)


def before_module(net: Net) -> None:
    net.down.register_full_backward_pre_hook(half)


def batch() -> tuple[Tensor]:
    return (torch.randn(8, 6, generator=torch.Generator().manual_seed(1)),)


@pytest.mark.parametrize(
    ("hook", "owner"),
    [(on_parameter, "parameter up.weight"), (after_accumulating, "parameter up.weight")],
)
def test_a_hook_on_a_parameter_is_refused(hook: Callable[[Net], None], owner: str) -> None:
    net = Net()
    hook(net)
    with refused("BX0170d", CaptureError) as caught:
        capture(net, batch())
    assert caught.value.what.startswith(owner)
    assert (caught.value.at or "").startswith(f"{THIS}:")
    assert caught.value.help
    assert capture(net, batch(), training=False).graph.ops  # without gradients it does not matter


@pytest.mark.parametrize("hook", [on_module, before_module])
def test_a_module_with_a_hook_is_opaque_and_no_other_of_its_class(
    hook: Callable[[Net], None],
) -> None:
    net = Net()
    hook(net)
    want = gradients(net(*batch()), net)
    found = capture(net, batch())
    assert leaf_paths(found.graph) == ("down",)
    assert same(net, found, want)
    with refused("BX0172a", CaptureError):
        capture(net, batch(), strict=True)


def test_backward_hooks_on_all_modules_are_refused() -> None:
    with global_hook("_global_backward_hooks"), refused("BX0170d", CaptureError):
        capture(Net(), batch())


@contextmanager
def global_hook(name: str) -> Iterator[None]:
    hooks = getattr(torch_modules, name)
    hooks[-1] = half
    try:
        yield
    finally:
        del hooks[-1]


class OnNode(Net):
    def forward(self, x: Tensor) -> Tensor:
        h = torch.tanh(self.up(x))
        if h.grad_fn is not None:
            h.grad_fn.register_hook(half)
        return self.down(h).square().mean()


def test_a_hook_on_a_node_of_autograd_is_seen_by_its_effect() -> None:
    with pytest.raises(CaptureError, match=r"gradient") as caught:
        capture(OnNode(), batch(), strict=True)
    assert caught.value.code == "BX0201"


def test_an_accumulators_hook_is_seen_by_its_effect() -> None:
    net = Net()
    weight = net.up.weight
    view: Any = weight.view_as(weight).grad_fn
    node = view.next_functions[0][0]  # kept alive: its hooks go with it
    node.register_prehook(half)
    with pytest.raises(CaptureError, match=r"gradient of up\.weight differs"):
        capture(net, batch())


class Outer(nn.Module):
    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.first = nn.Linear(6, 6)
        self.inner = inner

    def forward(self, x: Tensor) -> Tensor:
        return self.inner(self.first(x))


def test_hooks_on_a_leafs_parameters_do_not() -> None:
    model = Outer(Net())
    next(model.inner.parameters()).register_hook(half)
    with pytest.raises(CaptureError, match=r"parameter inner\.up\.weight"):
        capture(model, batch(), leaves=["inner"])


def same(model: nn.Module, found: Captured, want: dict[str, Tensor | None]) -> bool:
    have = gradients(run(found, found.inputs())[found.graph.loss or ""], model)
    return all(torch.equal(g, want[n]) for n, g in have.items() if g is not None)  # type: ignore[arg-type]


class OnOutput(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(6, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.up(x)


def hooked_loss(output: Tensor, batch: tuple[Tensor, ...]) -> Tensor:
    output.register_hook(half)
    return (output - batch[1]).square().mean()


def test_a_loss_that_sets_a_hook_is_kept_whole() -> None:
    model, x, y = OnOutput(), torch.randn(8, 6), torch.randn(8, 4)
    want = gradients(hooked_loss(model(x), (x, y)), model)
    found = capture(model, (x, y), hooked_loss)
    assert found.graph.op[found.graph.loss or ""].target == "user.loss"
    assert same(model, found, want)

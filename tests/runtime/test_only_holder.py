"""Whether a tensor is held once: only then is the next gradient added in place."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from bigbrain_fx.runtime import device_sums
from bigbrain_fx.runtime.device_sums import DeviceSums, is_alone
from bigbrain_fx.runtime.held_weights import HeldWeights

LAYERS: dict[str, tuple[nn.Module, Tensor]] = {
    "linear": (nn.Linear(4, 3), torch.randn(2, 5, 4)),
    "convolution": (nn.Conv2d(3, 4, 3), torch.randn(1, 3, 8, 8)),
    "embedding": (nn.Embedding(6, 4), torch.arange(5)),
    "norm": (nn.LayerNorm(4), torch.randn(2, 4)),
}


def handed_out(module: nn.Module, x: Tensor) -> dict[str, Tensor]:
    """Return the gradients of a module's parameters as hooks see them: nobody else has them."""
    found: dict[str, Tensor] = {}
    named = dict(module.named_parameters())
    handles = [
        parameter.register_hook(lambda g, name=name: found.__setitem__(name, g))
        for name, parameter in named.items()
    ]
    torch.autograd.grad([module(x).square().sum()], [*named.values()])
    for handle in handles:
        handle.remove()
    return found


@pytest.mark.parametrize("name", LAYERS)
def test_gradients_of_layers_are_alone(name: str) -> None:
    found = handed_out(*LAYERS[name])
    assert {key: is_alone(found, key) for key in found} == dict.fromkeys(found, True)


def by_a_name(tensor: Tensor) -> object:
    return [tensor]


def by_a_view(tensor: Tensor) -> object:
    return tensor.view(-1)


def by_what_it_is_a_view_of(tensor: Tensor) -> object:
    return tensor if tensor._base is None else tensor._base


def by_its_memory(tensor: Tensor) -> object:
    return tensor.untyped_storage()


def by_numpy(tensor: Tensor) -> object:
    return tensor.numpy()


def by_autograd(tensor: Tensor) -> object:
    return torch.ones_like(tensor).requires_grad_() * tensor


WAYS = (by_a_name, by_a_view, by_what_it_is_a_view_of, by_its_memory, by_numpy, by_autograd)


@pytest.mark.parametrize("hold", WAYS)
@pytest.mark.parametrize("name", LAYERS)
def test_what_something_else_holds_is_not_alone(
    name: str, hold: Callable[[Tensor], object]
) -> None:
    found = handed_out(*LAYERS[name])
    other = hold(found["weight"])
    assert not is_alone(found, "weight")
    del other
    assert is_alone(found, "weight")


class Sum(nn.Module):
    """Two parameters of one sum: autograd hands out one gradient for both."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = (nn.Parameter(torch.ones(2, 4)) for _ in "ab")

    def forward(self, x: Tensor) -> Tensor:
        return x * (self.a + self.b)


def test_one_gradient_of_two_parameters_is_not_alone() -> None:
    found = handed_out(Sum(), torch.randn(2, 4))
    assert not is_alone(found, "a")
    assert not is_alone(found, "b")


def test_what_is_repeated_or_sparse_is_not_alone() -> None:
    held = {0: torch.ones(1).expand(4), 1: torch.ones(2, 2).to_sparse()}
    assert not is_alone(held, 0)
    assert not is_alone(held, 1)


def test_a_part_of_something_larger_is_not_alone() -> None:
    whole = torch.ones(4, 4)
    held = {0: whole[:2]}
    assert not is_alone(held, 0)
    assert torch.equal(whole, torch.ones(4, 4))


def test_no_counts_no_trust(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where torch lacks the counts, or they show too little, sums are new tensors."""

    def lacking(held: object, key: object) -> tuple[int, ...]:
        raise AttributeError(key)

    def blind(held: object, key: object) -> tuple[int, ...]:
        return (1,)

    for counts in (lacking, blind):
        monkeypatch.setattr(device_sums, "_counts", counts)
        device_sums._alone.cache_clear()
        assert not is_alone({0: torch.ones(2)}, 0)
    device_sums._alone.cache_clear()


def test_sums_leave_what_somebody_has_kept() -> None:
    """As a hook of the user's does that looks at gradients after the step."""
    linear, inputs, kept = nn.Linear(4, 3), torch.randn(3, 2, 4), list[Tensor]()
    sums, alone = (DeviceSums(HeldWeights("d0", {}, {})) for _ in range(2))
    for x in inputs:
        gradient = handed_out(linear, x).pop("weight")
        kept.append(gradient)
        sums.add("weight", 0, gradient)
        alone.add("weight", 0, handed_out(linear, x).pop("weight"))
    again = [handed_out(linear, x)["weight"] for x in inputs]
    assert all(torch.equal(now, then) for now, then in zip(kept, again, strict=True))
    expected = again[0] + again[1] + again[2]
    assert torch.equal(sums.gradients["weight", 0], expected)
    assert torch.equal(alone.gradients["weight", 0], expected)


def test_the_second_sum_is_made_in_place() -> None:
    sums = DeviceSums(HeldWeights("d0", {}, {}))
    linear = nn.Linear(4, 3)
    sums.add("weight", 0, handed_out(linear, torch.randn(2, 4)).pop("weight"))
    place = sums.gradients["weight", 0].data_ptr()
    sums.add("weight", 0, handed_out(linear, torch.randn(2, 4)).pop("weight"))
    assert sums.gradients["weight", 0].data_ptr() == place


@pytest.fixture(autouse=True)
def _forget_counts() -> Iterator[None]:
    yield
    device_sums._alone.cache_clear()


def test_asking_draws_nothing_and_works_without_gradients() -> None:
    state = torch.get_rng_state()
    with torch.inference_mode():
        assert device_sums._alone()
    assert torch.equal(state, torch.get_rng_state())


# --------------------------------------------------------------------------- what an optimizer gets


def held(**parameters: Any) -> HeldWeights:
    found = HeldWeights("d0", {}, {})
    found.parameters, found.of_stage = dict(parameters), {0: [*parameters]}
    return found


def test_a_gradient_of_two_parameters_becomes_one_of_each() -> None:
    """Of one micro-batch nothing is added up; an optimizer may write into what it is given."""
    module = Sum()
    sums = DeviceSums(held(a=module.a, b=module.b))
    made = handed_out(module, torch.randn(2, 4))
    for name in ("a", "b"):
        sums.add(name, 0, made.pop(name))
    found = sums.summed()
    assert torch.equal(found["a"], found["b"])
    found["a"].zero_()
    assert found["b"].count_nonzero() == found["b"].numel()


def test_a_gradient_of_its_own_is_handed_on_as_it_is() -> None:
    linear = nn.Linear(4, 3)
    sums = DeviceSums(held(weight=linear.weight))
    sums.add("weight", 0, handed_out(linear, torch.randn(2, 4)).pop("weight"))
    place = sums.gradients["weight", 0].data_ptr()
    assert sums.summed()["weight"].data_ptr() == place


@pytest.mark.parametrize("micros", [1, 3])
def test_gradients_lie_as_those_of_backward_do(micros: int) -> None:
    """A norm adds in the order of memory: of a transposed gradient it would have other bits."""
    stacked = nn.Parameter(torch.randn(3, 8, 8))
    repeated, turned = nn.Parameter(torch.ones(8)), nn.Parameter(torch.randn(8, 8).t())
    named = {"stacked": stacked, "repeated": repeated, "turned": turned}
    sums = DeviceSums(held(**named))
    for _ in range(micros):
        y = torch.einsum("bd,ekd->bk", torch.randn(4, 8), stacked) @ turned + repeated.sum()
        made = torch.autograd.grad(y.square().sum(), [*named.values()], retain_graph=True)
        y.square().sum().backward()
        for name, gradient in zip(named, made, strict=True):
            sums.add(name, 0, gradient)
    found = sums.summed()
    for name, parameter in named.items():
        assert parameter.grad is not None
        assert torch.equal(found[name], parameter.grad)
        assert found[name].stride() == parameter.grad.stride()

"""Results that a backward makes again: the same bits, less kept, and what cannot be made so."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from bigbrain_fx.frontend.tracing.executor.allocations import LiveBytes
from bigbrain_fx.runtime import again
from bigbrain_fx.runtime.coded import MisuseError
from bigbrain_fx.runtime.promises import making_again

ROWS, DIM = 32, 64
Run = Callable[..., Any]


def plainly(function: Run, *args: Any) -> Any:  # as the function's
    return function(*args)


class Block(nn.Module):
    """A norm read twice, a gate in a chain, an op that saves its own result, a view of one."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(DIM)
        self.left, self.right, self.down = (nn.Linear(DIM, DIM) for _ in range(3))
        self.relu = nn.ReLU()

    def forward(self, x: Tensor, run: Run = plainly) -> Tensor:
        h = run(self.norm, x)
        gate = run(F.silu, self.left(h))
        y = run(lambda gate, a: gate * a, gate, self.right(h))
        y = run(self.relu, run(F.layer_norm, y, (DIM,), self.norm.weight, self.norm.bias))
        return x + self.down(y.view(-1, DIM)).view(x.shape)


def gradients(run: Run, cast: bool) -> list[Tensor]:
    torch.manual_seed(0)
    block, x = Block(), torch.randn(2, ROWS, DIM, requires_grad=True)
    with making_again(), torch.autocast("cpu", torch.bfloat16, enabled=cast):
        loss = block(block(x, run), run).float().square().mean()
    return [loss, *torch.autograd.grad(loss, [x, *block.parameters()])]


@pytest.mark.parametrize("cast", [False, True])
def test_gradients_are_bitwise_those_of_what_is_kept(cast: bool) -> None:
    kept, made = gradients(plainly, cast), gradients(again, cast)
    assert all(torch.equal(a, b) for a, b in zip(kept, made, strict=True))


def test_only_what_results_are_made_of_is_kept() -> None:
    x = torch.randn(ROWS, DIM, requires_grad=True)
    down = nn.Linear(DIM, DIM)
    sizes = []
    for run in (plainly, again):
        with LiveBytes() as live, making_again():
            live.ignore((x, *down.parameters()))
            y = down(run(torch.exp, run(F.gelu, x)))
            sizes.append(live.now)
            y.sum().backward()
        del y
    assert sizes == [2 * ROWS * DIM * 4, ROWS * DIM * 4]


def test_one_more_run_serves_all_that_ask_and_leaves_nothing() -> None:
    runs = []

    def counted(x: Tensor) -> Tensor:
        runs.append(torch.is_grad_enabled())
        return torch.tanh(x)

    x = torch.randn(ROWS, DIM, requires_grad=True)
    layers = [nn.Linear(DIM, DIM) for _ in range(3)]
    with making_again():
        h = again(counted, x)
        loss = sum(layer(h).sum() for layer in layers)
    loss.backward()
    assert runs == [True, True]


SAVING_RESULTS: dict[str, Run] = {
    "group_norm": nn.GroupNorm(2, ROWS),
    "layer_norm": nn.LayerNorm(DIM),
    "rms_norm": nn.RMSNorm(DIM),
    "instance_norm": nn.InstanceNorm1d(ROWS, affine=True),
    "tanh": torch.tanh,
    "exp": torch.exp,
    "sqrt": lambda x: (x * x + 1).sqrt(),
    "softmax": partial(torch.softmax, dim=-1),
    "cumprod": partial(torch.cumprod, dim=-1),
    "norm": partial(torch.linalg.norm, dim=-1, keepdim=True),
    "attention": lambda x: F.scaled_dot_product_attention(x, x, x),
    "max": lambda x: x.max(-1, keepdim=True).values,
}


@pytest.mark.parametrize("name", SAVING_RESULTS)
def test_nothing_is_left_of_what_saves_its_own_results(name: str) -> None:
    """A node holds its hooks: what they hold must not hold the node, or nothing frees either."""
    x, weight = torch.randn(2, ROWS, DIM), torch.ones(1, requires_grad=True)
    left = []
    with LiveBytes() as live:
        for _ in range(3):
            with making_again():
                y = torch.sin(again(SAVING_RESULTS[name], x * weight))
            y.sum().backward()
            del y
            left.append(live.now)
    assert left == left[:1] * 3


def test_outside_of_a_device_it_is_the_function_itself() -> None:
    x = torch.randn(4, requires_grad=True)
    y = again(torch.exp, x)
    assert torch.equal(torch.autograd.grad(y.sum(), x)[0], y)


def test_a_result_that_is_an_argument_is_kept() -> None:
    x = torch.randn(4, requires_grad=True)
    with making_again():
        y = again(lambda x: x.view(2, 2), x * 1.0)
        loss = (y * y).sum()
    assert torch.equal(torch.autograd.grad(loss, x)[0], 2 * x)


def test_values_written_in_place_are_no_wrong_numbers() -> None:
    x = torch.randn(4, requires_grad=True)
    with making_again():
        h = x * 2.0
        y = again(torch.exp, h)
        h.add_(1.0)
        loss = (y * y).sum()
    with pytest.raises(MisuseError, match="written in place after it was read"):
        loss.backward()
    with making_again():
        y = again(torch.exp, x * 2.0)
        y.add_(1.0)
        loss = (y * y).sum()
    expected = torch.autograd.grad((torch.exp(x * 2.0) + 1.0).square().sum(), x)[0]
    assert torch.equal(torch.autograd.grad(loss, x)[0], expected)


def test_a_function_that_saves_another_number_of_tensors_is_refused() -> None:
    first = iter([True, False])
    x = torch.randn(4, requires_grad=True)
    with making_again():
        y = again(lambda x: torch.exp(torch.exp(x)) if next(first) else torch.exp(x), x)
    with pytest.raises(MisuseError, match="saved 2 tensors when it first ran and 1"):
        y.sum().backward()


def test_a_list_of_tensors_is_refused() -> None:
    x = torch.randn(4, requires_grad=True)
    with making_again(), pytest.raises(MisuseError, match="give each by itself"):
        again(torch.cat, (x, x))

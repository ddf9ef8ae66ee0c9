"""Gradients of weights that wait: the same bits as autograd's, for every layer, type and layout."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from bigbrain_fx.runtime import deferred_layers
from bigbrain_fx.runtime.coded import MisuseError
from bigbrain_fx.runtime.deferred_layers import made, tapping, waiting_tap

TYPES = (torch.float32, torch.float64, torch.bfloat16)
Found = Sequence[Tensor | None]
Graded = tuple[Tensor, Found, Mapping[str, Tensor]]


def both(
    make: Callable[[Any], nn.Module], dtype: torch.dtype = torch.float32
) -> tuple[nn.Module, nn.Module]:
    """Return a module of torch's layers and one of layers that tap, with the same numbers."""
    torch.manual_seed(0)
    plain, tapped = make(nn).to(dtype), make(deferred_layers).to(dtype)
    tapped.load_state_dict(plain.state_dict())
    return plain, tapped


def undivided(module: nn.Module, x: Tensor, g: Tensor, autocast: bool = False) -> Graded:
    x = x.detach().requires_grad_(x.is_floating_point() and x.requires_grad)
    with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
        y = module(x)
    names, parameters = zip(*module.named_parameters(), strict=True)
    leaves = [x] if x.requires_grad else []
    found: Found = torch.autograd.grad(y, [*leaves, *parameters], g.to(y.dtype), allow_unused=True)
    kept = {n: t for n, t in zip(names, found[len(leaves) :], strict=True) if t is not None}
    return y.detach(), found[: len(leaves)], kept


def divided(module: nn.Module, x: Tensor, g: Tensor, autocast: bool = False) -> Graded:
    """Make the gradients of inputs first, and those of weights when autograd's graph is gone."""
    x = x.detach().requires_grad_(x.is_floating_point() and x.requires_grad)
    with tapping() as taps, torch.autocast("cpu", torch.bfloat16, enabled=autocast):
        y = module(x)
    names = {id(p): name for name, p in module.named_parameters()}
    others = [p for p in module.parameters() if all(p is not t.weight for t in taps)]
    leaves = [x] if x.requires_grad else []
    inputs: list[Any] = [*leaves, *others, *(tap.edge for tap in taps)]
    found: Found = torch.autograd.grad(y, inputs, g.to(y.dtype), allow_unused=True)
    at = len(leaves) + len(others)
    whole = zip(others, found[len(leaves) : at], strict=True)
    kept = {names[id(p)]: t for p, t in whole if t is not None}
    waiting = [*map(waiting_tap, taps, found[at:])]
    with torch.no_grad():
        kept.update((names[id(p)], t) for p, t in made(waiting))
    return y.detach(), found[: len(leaves)], kept


def assert_same(a: Graded, b: Graded) -> None:
    assert torch.equal(a[0], b[0])
    assert all(map(_equal, a[1], b[1]))
    assert a[2].keys() == b[2].keys()
    for name, gradient in a[2].items():
        assert gradient.dtype == b[2][name].dtype
        assert torch.equal(gradient, b[2][name]), name


def _equal(a: Tensor | None, b: Tensor | None) -> bool:
    return torch.equal(a, b) if a is not None and b is not None else a is b


def strided(x: Tensor) -> Tensor:
    """Return the same numbers in another order in memory."""
    return x.transpose(0, -2).contiguous().transpose(0, -2)


LINEAR = [
    (shape, bias, x_strided, g_strided)
    for shape in ((7, 32), (2, 20, 32), (2, 3, 20, 32), (32,), (1, 32), (0, 32))
    for bias in (True, False)
    for x_strided, g_strided in itertools.product((False, True), repeat=2)
    if len(shape) > 1 or not (x_strided or g_strided)
]


@pytest.mark.parametrize("dtype", TYPES)
def test_a_linear_of_any_shape_and_layout(dtype: torch.dtype) -> None:
    for shape, bias, x_strided, g_strided in LINEAR:
        plain, tapped = both(lambda of: of.Linear(32, 24, bias=bias), dtype)  # noqa: B023
        x = torch.randn(shape).to(dtype)
        g = torch.randn(*shape[:-1], 24).to(dtype)
        x = (strided(x) if x_strided else x).requires_grad_()
        g = strided(g) if g_strided else g
        assert_same(undivided(plain, x, g), divided(tapped, x, g))


CONVOLUTIONS: list[tuple[str, tuple[int, ...], dict[str, Any]]] = [
    ("Conv1d", (4, 8, 20), {"padding": 1}),
    ("Conv1d", (8, 20), {"bias": False}),
    ("Conv2d", (4, 8, 14, 14), {"padding": 1}),
    ("Conv2d", (4, 8, 14, 14), {"stride": 2, "bias": False}),
    ("Conv2d", (4, 8, 14, 14), {"groups": 4}),
    ("Conv2d", (4, 8, 14, 14), {"padding": 2, "dilation": 2}),
    ("Conv2d", (8, 14, 14), {}),
    ("Conv3d", (2, 8, 5, 6, 7), {"padding": (1, 0, 1)}),
    ("ConvTranspose1d", (4, 8, 9), {"stride": 2, "output_padding": 1}),
    ("ConvTranspose2d", (4, 8, 7, 7), {"stride": 2, "groups": 2}),
    ("ConvTranspose3d", (2, 8, 4, 4, 4), {"bias": False, "dilation": 2}),
]


@pytest.mark.parametrize("dtype", TYPES)
@pytest.mark.parametrize(("kind", "shape", "options"), CONVOLUTIONS)
def test_a_convolution(
    kind: str, shape: tuple[int, ...], options: dict[str, Any], dtype: torch.dtype
) -> None:
    plain, tapped = both(lambda of: getattr(of, kind)(8, 16, 3, **options), dtype)
    x = torch.randn(shape).to(dtype).requires_grad_()
    g = torch.randn_like(plain(x))
    assert_same(undivided(plain, x, g), divided(tapped, x, g))
    assert_same(undivided(plain, x.detach(), g), divided(tapped, x.detach(), g))


def test_channels_last_images() -> None:
    plain, tapped = both(lambda of: of.Conv2d(8, 16, 3, padding=1))
    x = torch.randn(4, 8, 14, 14).to(memory_format=torch.channels_last).requires_grad_()
    g = torch.randn(4, 16, 14, 14).to(memory_format=torch.channels_last)
    assert_same(undivided(plain, x, g), divided(tapped, x, g))


@pytest.mark.parametrize("dtype", TYPES)
@pytest.mark.parametrize("options", [{}, {"padding_idx": 3}, {"scale_grad_by_freq": True}])
def test_an_embedding(options: dict[str, Any], dtype: torch.dtype) -> None:
    plain, tapped = both(lambda of: of.Embedding(50, 16, **options), dtype)
    x = torch.randint(0, 50, (4, 30))
    g = torch.randn(4, 30, 16).to(dtype)
    assert_same(undivided(plain, x, g), divided(tapped, x, g))


class Tied(nn.Module):
    """One weight five times: as a table, and as the weight of four layers around a norm."""

    def __init__(self, of: Any, width: int = 32) -> None:
        super().__init__()
        self.table = of.Embedding(width, width)
        self.layers = nn.ModuleList(of.Linear(width, width) for _ in range(4))
        self.norm = nn.LayerNorm(width)
        for layer in self.layers:
            layer.weight = self.table.weight

    def forward(self, x: Tensor) -> Tensor:
        first = self.layers[0](torch.ones(x.shape[0], x.shape[1], 32, dtype=self.norm.weight.dtype))
        y = self.table(x) + first
        y = self.layers[1](torch.tanh(y)).relu_()
        return self.layers[2](self.norm(y)) * self.layers[3](y)


@pytest.mark.parametrize("dtype", TYPES)
def test_one_weight_used_five_times(dtype: torch.dtype) -> None:
    plain, tapped = both(Tied, dtype)
    x, g = torch.randint(0, 32, (3, 20)), torch.randn(3, 20, 32).to(dtype)
    assert_same(undivided(plain, x, g), divided(tapped, x, g))


def test_one_weight_used_five_times_under_autocast() -> None:
    """Its uses are added in bfloat16 and cast back once, in place of the first; the table's not."""
    plain, tapped = both(Tied)
    x, g = torch.randint(0, 32, (3, 20)), torch.randn(3, 20, 32)
    assert_same(undivided(plain, x, g, True), divided(tapped, x, g, True))


def test_one_weight_used_five_times_where_autocast_keeps_no_casts() -> None:
    """As in members of a tensor group: each use is cast back by itself, then they are added."""
    kept = torch.is_autocast_cache_enabled()
    torch.set_autocast_cache_enabled(False)
    try:
        test_one_weight_used_five_times_under_autocast()
    finally:
        torch.set_autocast_cache_enabled(kept)


class Mixed(nn.Module):
    """Linear and convolution that read one leaf twice, and each other."""

    def __init__(self, of: Any) -> None:
        super().__init__()
        self.a, self.b = of.Linear(16, 16), of.Linear(16, 16, bias=False)
        self.c, self.norm = of.Conv1d(4, 4, 3, padding=1), nn.BatchNorm1d(4)

    def forward(self, x: Tensor) -> Tensor:
        return self.a(self.norm(self.c(x * 2))) + torch.tanh(self.a(x) * self.b(x))


@pytest.mark.parametrize("autocast", [False, True])
@pytest.mark.parametrize("wants", [False, True])
def test_a_leaf_read_by_several_layers(autocast: bool, wants: bool) -> None:
    plain, tapped = both(Mixed)
    x, g = torch.randn(5, 4, 16).requires_grad_(wants), torch.randn(5, 4, 16)
    assert_same(undivided(plain, x, g, autocast), divided(tapped, x, g, autocast))


class Written(nn.Module):
    """What layers give is written in place: whole, in part, and as the view that it may be."""

    def __init__(self, of: Any) -> None:
        super().__init__()
        self.a, self.b = of.Linear(8, 8), of.Linear(8, 8, bias=False)
        self.c, self.e = of.Conv1d(4, 4, 3, padding=1), of.Embedding(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        y = self.a(self.c(x)).mul_(3)
        y[0].mul_(2)
        z = self.b(y)
        z.transpose(0, 1)[1].add_(1)
        w = self.e(torch.arange(8)).mul_(3)
        return self.a(z.sigmoid_()).tanh_() + w.sum(0)


@pytest.mark.parametrize("shape", [(5, 4, 8), (4, 8)])
@pytest.mark.parametrize("autocast", [False, True])
def test_outputs_of_layers_may_be_written_in_place(shape: tuple[int, ...], autocast: bool) -> None:
    plain, tapped = both(Written)
    x, g = torch.randn(shape).requires_grad_(), torch.randn(shape)
    assert_same(undivided(plain, x, g, autocast), divided(tapped, x, g, autocast))


def test_a_layer_that_the_loss_does_not_depend_on_has_no_gradient() -> None:
    class Unused(nn.Module):
        def __init__(self, of: Any) -> None:
            super().__init__()
            self.used, self.unused = of.Linear(4, 4), of.Linear(4, 4)

        def forward(self, x: Tensor) -> Tensor:
            self.unused(x)
            return self.used(x)

    plain, tapped = both(Unused)
    x = torch.randn(3, 4)
    assert_same(undivided(plain, x, x), divided(tapped, x, x))


def test_without_a_request_layers_are_torchs_own() -> None:
    plain, tapped = both(Mixed)
    x, g = torch.randn(5, 4, 16), torch.randn(5, 4, 16)
    assert_same(undivided(plain, x, g), undivided(tapped, x, g))
    with tapping() as taps, torch.no_grad():
        tapped(x)
    assert taps == []


@pytest.mark.parametrize(
    "make",
    [
        lambda of: of.Conv1d(4, 4, 3, padding=1, padding_mode="circular"),
        lambda of: of.Conv1d(4, 4, 3, padding="same"),
    ],
)
def test_layers_that_are_more_than_one_call_do_not_wait(make: Callable[[Any], nn.Module]) -> None:
    plain, tapped = both(make)
    x, g = torch.randn(2, 4, 9).requires_grad_(), torch.randn(2, 4, 9)
    assert_same(undivided(plain, x, g), divided(tapped, x, g))


def test_a_table_that_is_written_or_sparse_does_not_wait() -> None:
    for options in ({"max_norm": 1.0}, {"sparse": True}):
        layer: Any = deferred_layers.Embedding(8, 4, **options)
        with tapping() as taps:
            layer(torch.arange(8))
        assert taps == []


def test_frozen_layers_do_not_wait() -> None:
    layer = deferred_layers.Linear(4, 4).requires_grad_(False)
    with tapping() as taps:
        layer(torch.randn(2, 4, requires_grad=True))
    assert taps == []


def test_a_write_into_a_layers_input_is_found() -> None:
    layer, x = deferred_layers.Linear(4, 4), torch.randn(2, 4, requires_grad=True)
    h = x * 2
    with tapping() as taps:
        y = layer(h)
    (g,) = torch.autograd.grad(y.sum(), [taps[0].edge])
    waiting = [waiting_tap(taps[0], g)]
    with torch.no_grad():
        h.mul_(2)
    with pytest.raises(MisuseError, match="written in place after the layer read it"):
        list(made(waiting))


def test_a_gradient_that_was_written_since_is_found() -> None:
    layer = deferred_layers.Linear(4, 4)
    with tapping() as taps:
        y = layer(torch.randn(2, 4))
    (g,) = torch.autograd.grad(y.square().sum(), [taps[0].edge])
    waiting = [waiting_tap(taps[0], g)]
    g.add_(1)
    with pytest.raises(MisuseError, match="written in place"):
        list(made(waiting))

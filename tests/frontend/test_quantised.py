"""Frozen layers in int8, and optimizers that keep their state in sixteen bits."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from bigbrain_fx.bundles import Recipe, split
from bigbrain_fx.core import quantised_weights
from bigbrain_fx.errors import InputError
from bigbrain_fx.frontend import capture, optimizer_facts
from bigbrain_fx.frontend.quantised import (
    Int8Embedding,
    Int8Linear,
    quantise,
    require_read_by_layers,
    rounded_to_int8,
)
from bigbrain_fx.plan import Options
from tests.support import samples


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(11, 8).requires_grad_(False)
        self.base = nn.Linear(8, 8).requires_grad_(False)
        self.adapter = nn.Linear(8, 8)
        self.head = nn.Linear(8, 11, bias=False).requires_grad_(False)

    def forward(self, words: Tensor) -> Tensor:
        x = self.embed(words)
        return F.cross_entropy(self.head(self.base(x) + self.adapter(x)).flatten(0, 1), words[0])


def seeded(kind: type[nn.Module] = Net) -> nn.Module:
    torch.manual_seed(0)
    return kind()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_row_is_rounded_to_a_255th_of_its_range(dtype: torch.dtype) -> None:
    weight = torch.randn(5, 64, generator=torch.Generator().manual_seed(1)).to(dtype)
    weight[2] = 0
    steps, scale = rounded_to_int8(weight)
    assert (steps.dtype, scale.dtype, scale.shape) == (torch.int8, dtype, (5, 1))
    assert steps.abs().max() == 127
    assert not steps[2].any()
    off = (steps.float() * scale.float() - weight.float()).abs()
    most = weight.float().abs().amax(1, keepdim=True)
    assert (off <= 0.51 / 127 * most + (0 if dtype == torch.float32 else 2e-3 * most)).all()


def test_frozen_layers_are_int8_and_what_trains_is_not() -> None:
    model = seeded()
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    done = quantise(model)
    kinds = [type(model.get_submodule(name)) for name in ("embed", "base", "adapter", "head")]
    assert kinds == [Int8Embedding, Int8Linear, nn.Linear, Int8Linear]
    assert (done.weights, done.left, done.note) == (3, (), "")
    state = model.state_dict()
    worst = 0.0
    for name in ("embed", "base", "head"):
        float_weight = state[f"{name}.weight"] * state[f"{name}.weight_scale"]
        worst = max(worst, float((float_weight - before[f"{name}.weight"]).abs().max()))
    assert done.error == pytest.approx(worst)
    assert torch.equal(state["base.bias"], before["base.bias"])


@pytest.mark.nightly
def test_the_graph_reads_int8_in_its_layers_alone() -> None:
    model = seeded()
    quantise(model)
    captured = capture(model, {"words": torch.randint(11, (1, 6))}, None)
    names = ("embed.weight", "base.weight", "head.weight")
    assert set(quantised_weights(captured.graph)) == set(names)
    require_read_by_layers(captured.graph)


class Reading(Net):
    def forward(self, words: Tensor) -> Tensor:
        return (self.embed(words) @ self.base.weight.float()).square().mean() + self.adapter.bias[0]


def test_a_weight_that_is_read_outside_its_layer_is_refused() -> None:
    model = seeded(Reading)
    quantise(model)
    captured = capture(model, {"words": torch.randint(11, (1, 6))}, None)
    with pytest.raises(InputError, match=r"base\.weight is quantised, and .* reads it outside"):
        require_read_by_layers(captured.graph)


def test_unquantised_layers_are_named() -> None:
    model = seeded()
    model.get_submodule("head").weight = model.get_submodule("embed").weight
    model.get_submodule("base").register_forward_hook(lambda *_: None)
    with pytest.raises(InputError, match=r"embed\.weight stays as it is: other layers have"):
        quantise(model)
    untied = seeded()
    untied.get_submodule("base").register_forward_hook(lambda *_: None)
    assert quantise(untied).note == "--quantize leaves base.weight as it is: its layer has hooks"


def test_nothing_frozen_is_refused() -> None:
    with pytest.raises(InputError, match=r"for frozen weights, and no nn\.Linear .* has one"):
        quantise(seeded().requires_grad_(True))


# --------------------------------------------------------------------------- sixteen bits


Named = Iterable[tuple[str, nn.Parameter]]


class InFloat32(torch.optim.Optimizer):
    """Keeps a moment in float32, whatever the weights are."""

    def __init__(self, params: Any) -> None:
        super().__init__(params, {})

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    self.state[p]["moment"] = torch.zeros_like(p, dtype=torch.float32)


def sgd(momentum: float) -> Callable[[Named], torch.optim.Optimizer]:
    return lambda named: torch.optim.SGD([p for _, p in named], lr=0.1, momentum=momentum)


@pytest.mark.parametrize(
    ("dtype", "optimizer", "expected"),
    [
        (torch.bfloat16, None, ("bfloat16",)),
        (torch.float16, None, ("float16",)),
        (torch.float32, None, ()),
        (torch.bfloat16, sgd(0.9), ("bfloat16",)),
        (torch.bfloat16, sgd(0.0), ()),
        (torch.bfloat16, lambda named: InFloat32([p for _, p in named]), ()),
    ],
)
def test_the_type_of_state_is_measured(
    dtype: torch.dtype, optimizer: Any, expected: tuple[str, ...]
) -> None:
    facts = optimizer_facts(nn.Linear(4, 4).to(dtype), optimizer)
    assert facts.measured
    assert facts.narrow == expected
    assert (facts.note is None) == (not expected)


def test_frozen_weights_have_no_state() -> None:
    model = nn.Sequential(nn.Linear(4, 4).to(torch.bfloat16).requires_grad_(False), nn.Linear(4, 4))
    assert optimizer_facts(model, None).narrow == ()


class Halved(nn.Module):
    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(4, 8, dtype=dtype), nn.Linear(8, 1, dtype=dtype)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down(self.up(x.to(self.up.weight.dtype))).float().square().mean()


@pytest.mark.parametrize(
    ("dtype", "autocast", "noted"),
    [(torch.bfloat16, None, True), (torch.float32, "bfloat16", False)],
)
def test_split_notes_it_and_its_remedy_is_quiet(
    tmp_path: Path, dtype: torch.dtype, autocast: str | None, noted: bool
) -> None:
    made = split(
        Halved(dtype),
        samples.cluster(2),
        tmp_path / "bundle",
        Options("naive", micro_batches=1),
        example_batch=(torch.randn(4, 4),),
        recipe=Recipe(autocast=autocast),
    )
    assert any('autocast = "bfloat16"' in note for note in made.warnings) == noted

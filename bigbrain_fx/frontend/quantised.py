"""Quantisation of frozen linear layers and embeddings to int8, before capture.

    weight = int8 * weight_scale        one scale for each output (each word of an embedding)

A weight is symmetric about zero and rounded to the nearest of 255 numbers. The result is a module
like any other, which is captured as it is. This file knows no graphs, devices or bundles.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from bigbrain_fx.core import INT8_MOST, Graph, quantised_weights
from bigbrain_fx.errors import InputError
from bigbrain_fx.frontend.tracing.blank import is_blank

_HELP = "freeze it in the model file with requires_grad_(False), or leave --quantize out"


@dataclass(frozen=True)
class QuantisedModel:
    """Result of quantisation.

    Attributes:
        weights: number of weights.
        error: the largest change of a weight; None: the weights have no numbers.
        left: names of other frozen weights of the same layers, and why each stays as it is.
    """

    weights: int
    error: float | None
    left: tuple[tuple[str, str], ...]

    @property
    def note(self) -> str:
        """Return the remark on layers that are not quantised; empty where all are."""
        if not self.left:
            return ""
        name, why = self.left[0]
        more = f" and {len(self.left) - 1} others" if len(self.left) > 1 else ""
        return f"--quantize leaves {name}{more} as it is: {why}"


class Int8Linear(nn.Module):
    """A linear layer whose weight is int8, with a scale for each output."""

    weight: Tensor
    weight_scale: Tensor
    bias: nn.Parameter | None

    def __init__(self, layer: nn.Linear) -> None:
        super().__init__()
        _hold(self, layer.weight)
        self.register_parameter("bias", layer.bias)
        self.in_features, self.out_features = layer.in_features, layer.out_features

    def forward(self, x: Tensor) -> Tensor:
        """Compute as the layer does, with the rounded weight."""
        return F.linear(x, self.weight * self.weight_scale, self.bias)


class Int8Embedding(nn.Module):
    """An embedding whose weight is int8, with a scale for each word."""

    weight: Tensor
    weight_scale: Tensor

    def __init__(self, layer: nn.Embedding) -> None:
        super().__init__()
        _hold(self, layer.weight)
        self.num_embeddings, self.embedding_dim = layer.num_embeddings, layer.embedding_dim

    def forward(self, words: Tensor) -> Tensor:
        """Look up as the layer does, in the rounded weight."""
        return F.embedding(words, self.weight) * F.embedding(words, self.weight_scale)


_MADE = {nn.Linear: Int8Linear, nn.Embedding: Int8Embedding}


def quantise(model: nn.Module) -> QuantisedModel:
    """Put a quantised layer in the place of each frozen one.

    Raises:
        InputError: there is none.
    """
    shared = Counter(id(p) for _, p in model.named_parameters(remove_duplicate=False))
    left, errors = [], []
    for owner, key, name, layer in list(_frozen(model)):
        why = _why_not(layer, shared)
        if why:
            left.append((f"{name}.weight", why))
            continue
        made = _MADE[type(layer)](layer)
        made.train(layer.training)
        errors.append(_error(layer.weight, made))  # type: ignore[arg-type]  # a Linear's, say
        owner._modules[key] = made
    if not errors:
        raise InputError(
            "--quantize int8 is for frozen weights, and "
            + (f"{left[0][0]} stays as it is: {left[0][1]}" if left else _no_layer(model)),
            code="BX2099",
            at="--quantize",
            help=_HELP,
        )
    known = [error for error in errors if error is not None]
    return QuantisedModel(len(errors), max(known, default=None), tuple(left))


def _no_layer(model: nn.Module) -> str:
    trained = sum(p.requires_grad for p in model.parameters())
    return (
        f"no nn.Linear or nn.Embedding of this model has one ({trained} parameters are trained; "
        "the model itself, and classes made from these, are left alone)"
    )


def _frozen(model: nn.Module) -> Iterator[tuple[nn.Module, str, str, nn.Module]]:
    """Yield frozen layers with their owner, their name there and their name in the model."""
    for path, owner in model.named_modules():
        for key, layer in owner._modules.items():
            if type(layer) in _MADE and not layer.weight.requires_grad:
                assert layer is not None
                yield owner, key, f"{path}.{key}".removeprefix("."), layer


def _why_not(layer: nn.Module, shared: Counter[int]) -> str:
    """Say why a layer's weight cannot be quantised; empty where it can."""
    weight = layer.weight
    assert isinstance(weight, Tensor)
    if shared[id(weight)] > 1:
        return "other layers have the same weight"
    if not weight.is_floating_point():
        return f"it is of {weight.dtype}"
    if layer._forward_hooks or layer._forward_pre_hooks or layer._backward_hooks:
        return "its layer has hooks"
    if getattr(layer, "max_norm", None) is not None:
        return "its embedding has a max_norm, which writes into it"
    return ""


def _hold(module: nn.Module, weight: Tensor) -> None:
    rounded, scale = rounded_to_int8(weight.detach())
    module.register_buffer("weight", rounded)
    module.register_buffer("weight_scale", scale)


def rounded_to_int8(weight: Tensor) -> tuple[Tensor, Tensor]:
    """Return a weight as int8, and the scale of each row, in the weight's own type.

    Of a weight without numbers shapes alone.
    """
    if weight.is_meta or is_blank(weight):
        return torch.empty_like(weight, dtype=torch.int8), weight.new_empty(len(weight), 1)
    scale = (weight.float().abs().amax(1, keepdim=True) / INT8_MOST).to(weight.dtype)
    scale = torch.where(scale > 0, scale, torch.ones_like(scale))
    steps = torch.round(weight.float() / scale.float())
    return steps.clamp(-INT8_MOST, INT8_MOST).to(torch.int8), scale


def _error(weight: Tensor, made: Int8Linear | Int8Embedding) -> float | None:
    if weight.is_meta or is_blank(weight):
        return None
    rounded = made.weight * made.weight_scale
    return float((rounded.double() - weight.detach().double()).abs().max())


def require_read_by_layers(graph: Graph) -> None:
    """Refuse a model that reads a quantised weight elsewhere than in its layer.

    Raises:
        InputError: names the weight and the line.
    """
    names = {name for weight in quantised_weights(graph) for name in (weight, f"{weight}_scale")}
    for op in graph.ops:
        for name in names.intersection(op.params):
            path = name.rpartition(".")[0]
            if not op.modules or op.modules[-1].path != path:
                where = f" at {op.source}" if op.source else ""
                raise InputError(
                    f"{name.removesuffix('_scale')} is quantised, and {op.name}{where} reads it "
                    "outside its layer",
                    code="BX2100",
                    at="--quantize",
                    help="call the layer there, or leave --quantize out",
                )

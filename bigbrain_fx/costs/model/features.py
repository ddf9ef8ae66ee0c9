"""An op's signature and a device -> the numbers that a regression sees.

All sizes and rates are logarithms to base 2. This file knows signatures as data and no regression.

Features: log(flops, bytes in and out, arithmetic intensity, dimensions, dtype, seconds at the
device's rates); the family of the op stands beside them.
"""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, Protocol, TypeAlias, get_args

import numpy as np
from numpy.typing import NDArray

from bigbrain_fx.core import DTYPE_BYTES, words
from bigbrain_fx.costs.profiles import Signature, TensorArg

Floats = NDArray[np.float64]

Phase: TypeAlias = Literal["forward", "backward_input", "backward_weight"]
PHASES: tuple[Phase, ...] = get_args(Phase)

_FRACTION = re.compile(r"(?<![\w.])0\.\d*[1-9]")
_LEAST_CHANCE = 1e-3  # a literal below it is an epsilon, above it a chance


class ComputePlace(Protocol):
    """Fields that a `core.Device` and a `profiles.Machine` have in common."""

    @property
    def kind(self) -> str:
        """Return "cpu" or "cuda"."""
        ...

    @property
    def threads(self) -> int:
        """Return how many CPU threads compute."""
        ...

    @property
    def flops_per_s(self) -> float:
        """Return the sustained rate of matrix products."""
        ...

    @property
    def memory_bytes_per_s(self) -> float:
        """Return the sustained rate of copies."""
        ...

    @property
    def launch_s(self) -> float:
        """Return what starting one op costs."""
        ...


@dataclass(frozen=True, slots=True)
class PlaceRates:
    """The figures of a place, without its name."""

    kind: str
    threads: int
    flops_per_s: float
    memory_bytes_per_s: float
    launch_s: float

    @classmethod
    def of(cls, place: ComputePlace) -> PlaceRates:
        """Return the rates of a device or of a machine that was profiled."""
        return cls(
            place.kind, place.threads, place.flops_per_s, place.memory_bytes_per_s, place.launch_s
        )

    def within(self, known: Sequence[PlaceRates]) -> PlaceRates:
        """Return the nearest rates within the range of what is known of this kind."""
        alike = [rates for rates in known if rates.kind == self.kind]

        def inside(name: str) -> float:
            values = [float(getattr(rates, name)) for rates in alike]
            return min(max(float(getattr(self, name)), min(values)), max(values))

        return PlaceRates(
            self.kind,
            int(inside("threads")),
            inside("flops_per_s"),
            inside("memory_bytes_per_s"),
            inside("launch_s"),
        )


@dataclass(frozen=True, slots=True)
class OpWork:
    """One op to be priced: its signature, and what its forward computes and moves."""

    signature: Signature
    flops: int
    reads_bytes: int
    writes_bytes: int

    @property
    def family(self) -> str:
        """The op's plain name: "aten.relu_.default" -> "relu"."""
        return family(self.signature.target)

    def roofline_s(self, rates: PlaceRates) -> float:
        """Return the seconds of its forward if it reached the device's rates, and one launch."""
        moved = self.reads_bytes + self.writes_bytes
        ideal_s = max(self.flops / rates.flops_per_s, moved / rates.memory_bytes_per_s)
        return ideal_s + rates.launch_s


def family(target: str) -> str:
    """Return an op's plain name: "aten.relu_.default" -> "relu"."""
    parts = target.split(".")
    return parts[1].rstrip("_") if len(parts) > 1 else target


SHAPES = words(
    """
    flops reads_bytes writes_bytes intensity rows last second_first second_last window
    largest parameters tensors dimensions dtype_bytes is_integer permuted expanded strided
    graded_values graded_parameters is_view in_place autocast approximate random
    """
)
"""Features of the op alone; the families follow them, one column each, and then `DEVICE`."""

DEVICE = words(
    """
    peak bandwidth launch threads is_cuda compute_s memory_s roofline_s
    """
)
"""Features of the op on a device."""

_RATES = 4
"""The first of `DEVICE` are 0.0: a regression that sees them takes a new device's for
what it is not. Of the eight cards of tools/studies/few_ops, each left out, boosting over
`analytical` was 25.8 % off in the mean with them, 22.7 without; `analytical` itself 24.6."""


def names(families: Sequence[str]) -> tuple[str, ...]:
    """Return the name of each column of `matrix`."""
    return (*SHAPES, *(f"is {name}" for name in families), *DEVICE)


def matrix(works: Sequence[OpWork], rates: Sequence[PlaceRates], families: Sequence[str]) -> Floats:
    """Return the features of every op on its device, shape (ops, columns)."""
    rows = [
        [
            *_of_shape(work),
            *(float(work.family == name) for name in families),
            *_of_device(work, at),
        ]
        for work, at in zip(works, rates, strict=True)
    ]
    return np.array(rows, np.float64).reshape(len(rows), len(names(families)))


def _of_shape(work: OpWork) -> list[float]:
    signature, tensors = work.signature, work.signature.tensors
    first = tensors[0] if tensors else None
    second = tensors[1].shape if len(tensors) > 1 else ()
    window = max((math.prod(t.shape[2:]) for t in tensors if t.is_parameter), default=1)
    moved = work.reads_bytes + work.writes_bytes
    params = sum(t.numel * DTYPE_BYTES.get(t.dtype, 4) for t in tensors if t.is_parameter)
    return [
        _log(work.flops),
        _log(work.reads_bytes),
        _log(work.writes_bytes),
        _log(work.flops) - _log(moved),
        *_rows_and_last(first),
        _log(second[0] if second else 0),
        _log(second[-1] if second else 0),
        _log(window),
        _log(max((t.numel for t in tensors), default=0)),
        _log(params),
        float(len(tensors)),
        float(len(first.shape) if first else 0),
        math.log2(DTYPE_BYTES.get(first.dtype, 4)) if first else 2.0,
        float(first is not None and not first.dtype.startswith(("float", "bfloat", "complex"))),
        *(_layouts(tensors, layout) for layout in ("permuted", "expanded", "strided")),
        float(sum(t.wants_grad and not t.is_parameter for t in tensors)),
        float(sum(t.wants_grad and t.is_parameter for t in tensors)),
        float(moved == 0),
        float(signature.target.rpartition(".")[0].endswith("_")),
        float(signature.mode.startswith("autocast")),
        float('"tanh"' in signature.literals),
        float(has_chance(signature)),
    ]


def has_chance(signature: Signature) -> bool:
    """Whether a literal looks like a chance, as dropout's is."""
    return any(float(text) >= _LEAST_CHANCE for text in _FRACTION.findall(signature.literals))


def _rows_and_last(first: TensorArg | None) -> tuple[float, float]:
    if first is None or not first.shape:
        return 0.0, 0.0
    last = first.shape[-1]
    return _log(first.numel // max(last, 1)), _log(last)


def _layouts(tensors: Sequence[TensorArg], layout: str) -> float:
    return float(sum(tensor.layout.startswith(layout) for tensor in tensors))


def _of_device(work: OpWork, rates: PlaceRates) -> list[float]:
    peak, bandwidth = math.log2(rates.flops_per_s), math.log2(rates.memory_bytes_per_s)
    return [
        *(0.0,) * _RATES,
        float(rates.kind == "cuda"),
        _log(work.flops) - peak,
        _log(work.reads_bytes + work.writes_bytes) - bandwidth,
        math.log2(max(work.roofline_s(rates), 1e-9)),
    ]


def _log(count: float) -> float:
    return math.log2(1.0 + count)

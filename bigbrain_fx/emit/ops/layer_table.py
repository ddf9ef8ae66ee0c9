"""Layers of torch.nn without tensors: the op that each runs, and its constructor's defaults.

This table is data; `layers` says how it is read.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TypeAlias

from bigbrain_fx.core import Arg

Values: TypeAlias = Mapping[str, Arg]

ACTIVATIONS: Mapping[str, tuple[str, Values, Values]] = {
    # layer: (op, constructor arguments with their defaults, arguments that must be so)
    "ReLU": ("relu.default", {}, {}),
    "GELU": ("gelu.default", {"approximate": "none"}, {}),
    "SiLU": ("silu.default", {}, {}),
    "Mish": ("mish.default", {}, {}),
    "Tanh": ("tanh.default", {}, {}),
    "Sigmoid": ("sigmoid.default", {}, {}),
    "Hardswish": ("hardswish.default", {}, {}),
    "Hardsigmoid": ("hardsigmoid.default", {}, {}),
    "LogSigmoid": ("log_sigmoid.default", {}, {}),
    "LeakyReLU": ("leaky_relu.default", {"negative_slope": 0.01}, {}),
    "ELU": ("elu.default", {"alpha": 1.0}, {"scale": 1, "input_scale": 1}),
    "Softplus": ("softplus.default", {"beta": 1.0, "threshold": 20.0}, {}),
    "GLU": ("glu.default", {"dim": -1}, {}),
}

_MAX: Values = {"stride": None, "padding": 0, "dilation": 1, "ceil_mode": False}
_AVG: Values = {"stride": None, "padding": 0, "ceil_mode": False, "count_include_pad": True}

POOLS: Mapping[str, tuple[str, Values]] = {
    # layer: (op, constructor arguments with their defaults); a stride like the kernel is left out
    **{f"MaxPool{n}d": (f"max_pool{n}d.default", _MAX) for n in (1, 2, 3)},
    "AvgPool1d": ("avg_pool1d.default", _AVG),
    **{
        f"AvgPool{n}d": (f"avg_pool{n}d.default", {**_AVG, "divisor_override": None})
        for n in (2, 3)
    },
}

"""What a bundle runs on: copied into it verbatim.

It imports torch and safetensors, and nothing of bigbrain-fx. Names are loaded when they are first
used: `runtime.commits` imports no torch, so that a supervisor without it can use it.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from .bundle import Bundle
    from .channel import Channel
    from .device import Device, Training, adamw
    from .hooks import Hooks
    from .infer import Inference, InferenceDevice, infer_in_process, infer_main
    from .kept import AssumptionError, assume, assume_not, flat, part_of
    from .modules import Region, Stage, Tensors, buffer, parameter
    from .train import example_batches, main, run_in_process

__all__ = [
    "AssumptionError",
    "Bundle",
    "Channel",
    "Device",
    "Hooks",
    "Inference",
    "InferenceDevice",
    "Region",
    "Stage",
    "Tensors",
    "Training",
    "adamw",
    "assume",
    "assume_not",
    "buffer",
    "example_batches",
    "flat",
    "infer_in_process",
    "infer_main",
    "main",
    "parameter",
    "part_of",
    "run_in_process",
]

_HOME = {
    "Bundle": "bundle",
    "Channel": "channel",
    "Device": "device",
    "Training": "device",
    "adamw": "device",
    "Hooks": "hooks",
    "Inference": "infer",
    "InferenceDevice": "infer",
    "infer_in_process": "infer",
    "infer_main": "infer",
    "AssumptionError": "kept",
    "assume": "kept",
    "assume_not": "kept",
    "flat": "kept",
    "part_of": "kept",
    "Region": "modules",
    "Stage": "modules",
    "Tensors": "modules",
    "buffer": "modules",
    "parameter": "modules",
    "example_batches": "train",
    "main": "train",
    "run_in_process": "train",
}


if not TYPE_CHECKING:  # a checker would take any name then

    def __getattr__(name: str) -> object:
        """Load a public name from its file."""
        if name not in _HOME:
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        return getattr(importlib.import_module(f"{__name__}.{_HOME[name]}"), name)

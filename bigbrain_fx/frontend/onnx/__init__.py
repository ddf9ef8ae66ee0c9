"""An ONNX file -> nn.Module made of torch calls, ready to be captured like any other module.

The noun is `OnnxModule`, the verb `load_onnx`. The room knows onnx and torch; it knows nothing of
our graph, of devices or of emitted code. Importing the door imports neither torch nor onnx.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from bigbrain_fx.onnx_in.example import example_inputs
    from bigbrain_fx.onnx_in.module import OnnxModule, load_onnx

__all__ = ["OnnxModule", "example_inputs", "load_onnx"]

_LAZY = {"OnnxModule": "module", "example_inputs": "example", "load_onnx": "module"}


def __getattr__(name: str) -> object:
    """Load a name that needs torch."""
    if name not in _LAZY:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"{__name__}.{_LAZY[name]}"), name)

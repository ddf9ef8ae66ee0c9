"""Model file or nn.Module -> Graph; the only room that knows torch.export and torch.fx.

It knows nothing of devices, placements or emitted code. Importing this door does not import torch:
`capture_file` works through a child process; names that need torch are loaded when first used.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING

from bigbrain_fx.capture.session import CaptureSession, ModelFacts, capture_file

if TYPE_CHECKING:
    from bigbrain_fx.capture.batch import graph_inputs
    from bigbrain_fx.capture.interpret import run_graph
    from bigbrain_fx.capture.modelfile import ModelFile, load_model_file
    from bigbrain_fx.capture.trace import Captured, capture

__all__ = [
    "CaptureSession",
    "Captured",
    "ModelFacts",
    "ModelFile",
    "capture",
    "capture_file",
    "graph_inputs",
    "load_model_file",
    "run_graph",
]

_LAZY = {
    "Captured": "trace",
    "ModelFile": "modelfile",
    "capture": "trace",
    "graph_inputs": "batch",
    "load_model_file": "modelfile",
    "run_graph": "interpret",
}


def __getattr__(name: str) -> object:
    """Load a name that needs torch."""
    if name not in _LAZY:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"{__name__}.{_LAZY[name]}"), name)

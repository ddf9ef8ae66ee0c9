"""An ONNX file -> nn.Module made of torch calls, ready to be captured like any other module.

The noun is `OnnxModule`, the verb `load_onnx`. The package knows onnx and torch; it knows nothing
of core.Graph, of devices or of emitted code. Importing the package imports neither torch nor onnx.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from bigbrain_fx.core import door

if TYPE_CHECKING:
    from bigbrain_fx.frontend.onnx.module import (
        example_inputs as example_inputs,
        load_onnx as load_onnx,
    )
else:
    __getattr__ = door(__name__)

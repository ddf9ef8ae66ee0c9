"""A module emitted as one stage: its text, and the stage itself with the module's numbers."""

from __future__ import annotations

from torch import Tensor, nn

from bigbrain_fx.core import Stage
from bigbrain_fx.emit.files.texts import bundle_texts
from bigbrain_fx.emit.modules.classes import Classes
from bigbrain_fx.frontend import capture
from tests.support import samples


def stage_text(module: nn.Module, x: Tensor, *, training: bool = True) -> str:
    """Return the class of a stage that runs all of a module."""
    graph = capture(module, {"x": x}, training=training).graph
    params = tuple(dict.fromkeys(name for op in graph.ops for name in op.params))
    ops = tuple(op.name for op in graph.ops)
    stage = Stage(0, "d0", ops, params=params, inputs=("x",))
    return "\n".join(Classes(graph, [stage], [graph.outputs]).stage_text(stage).lines)


def emitted_stage(module: nn.Module, x: Tensor) -> nn.Module:
    """Return the stage of a bundle for one device, whose loss is the mean of squares."""
    found = samples.of_module(module, {"x": x}, lambda y, _: y.square().mean())
    texts = bundle_texts(samples.planned(found, "naive", 1, "gpipe", 1))
    stage: nn.Module = samples.loaded(texts["device_d0.py"], "device_d0").Stage0()
    state = {**module.state_dict(), **found.tensors}
    stage.load_state_dict({name: state[name] for name in stage.state_dict()})
    return stage

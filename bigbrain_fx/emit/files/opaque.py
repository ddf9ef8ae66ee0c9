"""The device file of an opaque step: how the user's model and loss are called, and on what.

Channels, schedule and update are those of any device file; only a stage has no text of its own.
"""

from __future__ import annotations

import ast
import textwrap
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import cast

from bigbrain_fx.core import Arg, Graph, Op, Stage
from bigbrain_fx.emit.files.channels import DeviceFile
from bigbrain_fx.emit.modules import kept
from bigbrain_fx.emit.modules.classes import StageText
from bigbrain_fx.emit.modules.layout import wrapped
from bigbrain_fx.emit.modules.names import device_names

BASE = "OpaqueDevice"
OWN_LOSS = "own_loss"  # of the runtime: where the model file has no loss function


@dataclass(frozen=True)
class OpaqueStages:
    """Opaque stages in place of `Classes`: each is the user's model, and has no class here."""

    graph: Graph
    stages: Sequence[Stage]
    all_devices: Sequence[str]

    @property
    def users(self) -> kept.Users:
        """Return the names of the user's own code in device files."""
        op = self.graph.ops[0]
        return {("", name): name for name in kept.step_names(op)}

    @property
    def devices(self) -> Mapping[str, object]:
        """Return the names of files and classes of devices."""
        return device_names(self.all_devices)

    def taps(self, stages: Sequence[Stage]) -> None:
        """Know no layers."""

    def block_lines(self, key: object, taps: object) -> list[str]:
        """Know no blocks."""
        return []

    def stage_text(self, stage: Stage, taps: object = None) -> StageText:
        """Return a stage without text: the user's model reads the batch itself."""
        loss = {str(self.graph.loss): "loss"}
        return StageText(replace(stage, inputs=()), kept.MODEL_NAME, (), {}, loss, ())


def header_lines(op: Op) -> list[str]:
    """Say why nothing is split."""
    why = f"{op.source}: {op.code}" if op.source else op.code
    text = f"The whole step is opaque, since no trace can hold {why}"
    return [*textwrap.wrap(" ".join(text.split()), 98), ""]


def step_lines(file: DeviceFile) -> list[str]:
    """Write `step_loss`: forward and loss on a micro-batch."""
    op = file.graph.ops[0]
    call = ast.unparse(_call(op))
    lines = [f"output = {call}", f"return {kept.LOSS_NAME}(output, batch)"]
    lines = lines if op.args[1] else [f"return {OWN_LOSS}({call})"]
    head = "    def step_loss(self, batch: Any) -> Tensor:"
    if file.graph.autocast is None:
        return ["", head, *(line for text in lines for line in wrapped(text, 8))]
    cast = f"with torch.autocast(self.device.type, dtype=torch.{file.graph.autocast}):"
    return ["", head, f"        {cast}", *(line for text in lines for line in wrapped(text, 12))]


def _call(op: Op) -> ast.expr:
    """Return `self.model(x=batch["x"])`, or as else the batch reaches forward."""
    call = op.args[0]
    assert isinstance(call, tuple)
    way, *more = call
    model, batch = ast.parse("self.model", mode="eval").body, ast.Name("batch")
    if way == "whole":
        return ast.Call(model, [batch], [])
    if way == "first":
        first = ast.Subscript(batch, ast.Slice(upper=ast.Constant(cast("int", more[0]))))
        return ast.Call(model, [ast.Starred(first)], [])
    if way == "all":
        return ast.Call(model, [], [ast.keyword(value=batch)])
    return ast.Call(model, [], [ast.keyword(value=_named(more))])


def _named(names: Sequence[Arg]) -> ast.expr:
    """Return the entries of a batch that forward has parameters for."""
    listed = ", ".join(map(repr, names)) + ","
    text = f"{{name: batch[name] for name in ({listed}) if name in batch}}"
    return ast.parse(text, mode="eval").body

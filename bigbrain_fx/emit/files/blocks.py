"""The file of the block classes that several devices have."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from bigbrain_fx.emit.files.code import BLOCKS, DeviceCode
from bigbrain_fx.emit.files.imports import import_lines
from bigbrain_fx.emit.modules.layout import double_quoted, quiet

SEEDED = (
    '`with self.seeded("drop", 1, 2):` keys the draws inside by seed, step, micro-batch and\n'
    "place, here the second of two of `drop` in one call, so that no cut changes them.\n\n"
)
WRITTEN = "Written by bigbrain-fx; needs torch, safetensors and runtime/.\n"


def blocks_text(devices: Sequence[DeviceCode], shared: Mapping[str, str]) -> str:
    """Return the text of the file.

    Args:
        devices: all.
        shared: the classes: name -> text.
    """
    text = "\n".join(shared.values())
    tried = f"{BLOCKS} import {next(iter(shared))}"
    draws = SEEDED if "self.seeded(" in text else ""
    said = f"Blocks of {quiet(devices[0].file.title)} that several devices have."
    lines = [f'"""{said}\n\n{draws}{WRITTEN}"""', "", *import_lines(devices, text, [], tried), text]
    return double_quoted("\n".join(lines) + "\n")

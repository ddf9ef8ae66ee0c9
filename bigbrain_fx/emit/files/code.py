"""Contents of device files; block classes that several devices have get a file of their own.

device_d0.py   Attention  Block  Stage0            model_blocks.py   Attention  Block
device_d1.py   Attention  Block  Stage1     ─▶     device_d0.py      Stage0
device_d1.py      Stage1
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from bigbrain_fx.emit.files.channels import DeviceFile
from bigbrain_fx.emit.files.opaque import OpaqueStages
from bigbrain_fx.emit.modules import kept
from bigbrain_fx.emit.modules.classes import Classes, StageText

BLOCKS = "model_blocks"
"""The module of the classes that device files share."""


@dataclass(frozen=True)
class DeviceCode:
    """The classes of one device file.

    Attributes:
        stages: in their order.
        blocks: the block classes that these use, inner ones first: name -> text.
        users: what the text calls the user's own.
    """

    file: DeviceFile
    stages: tuple[StageText, ...]
    blocks: Mapping[str, str]
    users: kept.Users


def device_code(file: DeviceFile, classes: Classes | OpaqueStages) -> DeviceCode:
    """Write the classes of one device."""
    own = file.stages.of(file.program.device)
    taps = classes.taps(own)
    stages = tuple(classes.stage_text(stage, taps) for stage in own)
    blocks: dict[str, str] = {}
    if isinstance(classes, Classes):
        used = dict.fromkeys(key for stage in stages for key in stage.classes)
        for key in used:
            lines = classes.block_lines(key, taps)
            blocks[classes.class_names[key]] = "\n".join(("", "", *lines))
    return DeviceCode(file, stages, blocks, classes.users)


def shared_blocks(devices: Sequence[DeviceCode]) -> dict[str, str]:
    """Return the block classes that several devices have in the same words: name -> text.

    The classes that such a one is made of are shared, too, or it is not.
    """
    texts: dict[str, list[str]] = {}
    for device in devices:
        for name, text in device.blocks.items():
            texts.setdefault(name, []).append(text)
    alone = {name for name, found in texts.items() if len(found) == 1 or len({*found}) > 1}
    shared: dict[str, str] = {}
    for name, (text, *_) in texts.items():
        inner = {other for other in texts if other != name and has_name(text, other)}
        if name not in alone and inner <= shared.keys():
            shared[name] = text
    return shared


def has_name(text: str, name: str) -> bool:
    """Whether a text says a name, alone and not as a part of another."""
    return re.search(rf"(?<![\w.]){re.escape(name)}\b", text) is not None

"""The imports at the top of an emitted file: of what its text says, and nothing else."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from functools import partial

from bigbrain_fx.emit.files.code import BLOCKS, DeviceCode, has_name
from bigbrain_fx.emit.files.opaque import OWN_LOSS
from bigbrain_fx.emit.modules import kept
from bigbrain_fx.emit.modules.again import AGAIN, WIDENED
from bigbrain_fx.emit.modules.layout import WIDTH
from bigbrain_fx.emit.modules.taps import TAPPING

_CALLED = ("Region", "Tensors", "bucket_channels", "buffer", "parameter", *kept.RUNTIME)


def import_lines(
    devices: Sequence[DeviceCode],
    text: str,
    names: Sequence[str],
    tried: str,
    shared: Mapping[str, str] | None = None,
) -> list[str]:
    """Return the imports of a file.

    Args:
        devices: whose code it has.
        text: the file's classes.
        names: that it needs of the runtime in any case.
        tried: how somebody imports it from a bundle: "device_d0 import Stage0".
        shared: the block classes of a file of their own, name -> text; None in that file.
    """
    found = ["import math"] if "math." in text else []
    found += ["from typing import Any"] if has_name(text, "Any") else []
    found += [""] if found else []
    found += ["import torch"] if "torch." in text else []
    found += ["import torch.nn.functional as F"] if "F." in text else []
    taken = ["Tensor"] if has_name(text, "Tensor") else []
    taken += ["nn"] if "nn." in text.replace("torch.nn.", "") else []
    froms = [f"from torch import {', '.join(taken)}"] if taken else []
    ours, others = _functions(devices, partial(_is_needed, text=text, shared=shared))
    froms += [f"from {module} import {', '.join(classes)}" for module, classes in others]
    blocks = sorted(name for name in shared or () if has_name(text, name))
    ours += [(BLOCKS, blocks)] if blocks else []
    named = sorted([*names, *_called(devices, text)], key=lambda name: (name[0].islower(), name))
    ours += [("runtime", named)] if named else []
    return [*found, *sorted(froms), *(_of_bundle(ours, tried) if ours else [])]


def _of_bundle(ours: Sequence[tuple[str, Sequence[str]]], tried: str) -> list[str]:
    """Return imports of a bundle's own modules, as a package's and as those of its folder."""
    return [
        "",
        f"if __package__:  # as in `from bundle.{tried}`",
        *(line for module, what in ours for line in _import(f".{module}", what)),
        "else:",
        *(line for module, what in ours for line in _import(module, what)),
    ]


def _called(devices: Sequence[DeviceCode], text: str) -> list[str]:
    """Return what a text calls of the runtime."""
    stages, graph = devices[0].file.stages, devices[0].file.graph
    optional = [*_CALLED, *(sorted(TAPPING) if stages.deferring else ())]
    optional += [AGAIN] if stages.again else []
    optional += [OWN_LOSS] if graph.is_opaque_step else []
    found = [name for name in optional if re.search(rf"(?<![\w.]){name}[()]", text)]
    return found + ([WIDENED] if f"{AGAIN}({WIDENED}," in text else [])


def _is_needed(name: str, text: str, shared: Mapping[str, str] | None) -> bool:
    """Whether a file needs a function of the user's: a device file all that no other file has."""
    if has_name(text, name) or shared is None:
        return has_name(text, name)
    return not any(has_name(block, name) for block in shared.values())


def _functions(
    devices: Sequence[DeviceCode], is_needed: Callable[[str], bool]
) -> tuple[list[tuple[str, list[str]]], list[tuple[str, list[str]]]]:
    """Return what a text calls of the user's own, and of installed modules: module, names."""
    found: dict[str, list[str]] = {}
    own_module = devices[0].file.own_module
    for device in devices:
        ops = [name for stage in device.stages for name in stage.stage.ops]
        for module, name in kept.user_names(device.file.graph, ops):
            called = device.users[module, name]
            shown = name if called == name else f"{name} as {called}"
            names = found.setdefault(module or own_module, [])
            names += [shown] if shown not in names and is_needed(called) else []
    own = [("functions", names) for module, names in found.items() if module == own_module]
    others = sorted((m, names) for m, names in found.items() if m != own_module)
    return [e for e in own if e[1]], [e for e in others if e[1]]


def _import(module: str, names: Sequence[str]) -> list[str]:
    """Return an indented import, a name a line where it is long."""
    whole = f"    from {module} import {', '.join(names)}"
    if len(whole) <= WIDTH:
        return [whole]
    return [f"    from {module} import (", *(f"        {name}," for name in names), "    )"]

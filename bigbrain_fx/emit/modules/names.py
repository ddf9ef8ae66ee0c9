"""Names for emitted code: every identifier of a bundle comes from here, none is a surprise.

This module knows Python's own names; it knows nothing of graphs, so hints come from `hints.py`.
"""

from __future__ import annotations

import builtins
import keyword
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from bigbrain_fx.core import words

_OURS = words(
    """
    self torch nn F math m assume assume_not flat part_of all_seeded copy_to_group
    all_reduce all_gather own_part reduce_scatter gather_to_group
    """
)
RESERVED = frozenset((*_OURS, *dir(builtins), *keyword.kwlist, *keyword.softkwlist))


OWN = frozenset(
    {"call", "device", "empty", "group", "hold", "nth", "path", "place", "returns", "seeded", "tie"}
)
"""What the runtime's modules call their own methods and attributes."""


def identifier(text: str, default: str = "value") -> str:
    """Turn any text into a Python identifier that is no keyword and hides no builtin."""
    name = re.sub(r"\W", "_", text, flags=re.ASCII).strip("_") or default
    if name[0].isdigit():
        name = f"_{name}"
    return f"{name}_" if name in RESERVED else name


def is_attribute(name: str) -> bool:
    """Whether `self.<name>` is safe to write for a module's child or tensor."""
    return (
        name.isidentifier()
        and name.isascii()
        and not keyword.iskeyword(name)
        and not name.startswith("__")
        and name not in OWN
    )


@dataclass(frozen=True)
class DeviceNames:
    """Module name of one device's file, and class name of its program."""

    module: str
    program: str


def device_names(devices: Sequence[str]) -> dict[str, DeviceNames]:
    """Return the names of each device's file and class: `gpu-0` is `device_gpu_0`, `DeviceGpu0`.

    Small letters only, as some file systems take `GPU_0` for `gpu_0`; of two devices whose names
    come out the same, the later has a number. With `device_` before it, no name is a keyword or
    that of a module of anybody else's.
    """
    modules, programs = Names(), Names()
    found = {}
    for device in dict.fromkeys(devices):
        words = re.findall(r"[a-z0-9]+", device.lower()) or ["unnamed"]
        found[device] = DeviceNames(
            modules.fresh("_".join(["device", *words])),
            programs.fresh("".join(["Device", *(word.capitalize() for word in words)])),
        )
    return found


def by_number(name: str) -> list[tuple[bool, int, str]]:
    """Return what sorts `d2` before `d10`, as ruff sorts imports."""
    parts = re.split(r"(\d+)", name)
    return [(part.isdigit(), int(part) if part.isdigit() else 0, part) for part in parts]


class Names:
    """Hand out names that are not taken; the second `linear` is `linear_2`.

    Attributes:
        taken: every name given out or barred; may be added to.
    """

    def __init__(self, taken: Iterable[str] = ()) -> None:
        self.taken = set(taken)

    def fresh(self, base: str, mark: str = "_") -> str:
        """Return `base`, or `base_2` with the smallest free number, and take it."""
        name, number = base, 1
        while name in self.taken:
            number += 1
            name = f"{base}{mark}{number}"
        self.taken.add(name)
        return name

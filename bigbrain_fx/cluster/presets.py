"""What the vendor's datasheet says about common GPUs, and what models reach of it.

This room is a table; it does not know how a device is written in a file.

Rates are the datasheet's own: peak *FP32* without tensor cores, the dense rate of FP16 products
with FP32 sums, of TF32 where there is one, and memory bandwidth. No model reaches them: `Sustained`
has the shares that products and passes over memory of models were measured to reach, where anybody
has published that of the card, and what is usual where nobody has. `Preset.sustained_...` are the
products of both. `bigbrain-fx doctor` on the machine is better.
Memory is the datasheet's number in *decimal* gigabytes. Cards report up to 7 % more than that, and
the CUDA context, ECC and the allocator's fragments take about as much. What no datasheet says is
cuBLAS's workspace: torch chooses it by the card's compute capability.

A card that is sold with several memories, boards or power caps has a name for each. AMD's cards are
`cuda` to torch (ROCm), and so they are here. Apple's have no preset: bundles run on cpu and cuda.
"""

from __future__ import annotations

import re
from collections.abc import Mapping

from bigbrain_fx.cluster.cards import CARDS, UNITS as UNITS, Preset as Preset
from bigbrain_fx.cluster.quantity import BadValueError, nearest, quoted

PRESETS: Mapping[str, Preset] = CARDS

_ALIASES = {
    "v100": "v100-16",
    "rtxa6000": "a6000",
    "rtxa5000": "a5000",
    "rtxa4000": "a4000",
    "h200sxm": "h200",
}
_ALIASES |= {"h100sxm": "h100", "mi300": "mi300x"}
_APPLE = re.compile(r"^(apple)?m[1-9](pro|max|ultra)?$")


def preset(name: str) -> Preset:
    """Look a card up; case, blanks and hyphens do not matter: "RTX 3090", "rtx3090", "rtx-3090".

    Raises:
        BadValueError: no such card, or several: names them, or the nearest.
    """
    return PRESETS[preset_name(name)]


def preset_name(name: str) -> str:
    """Return how `PRESETS` writes a card's name; raises as `preset` does."""
    key = _key(name)
    by_key = {_key(known): known for known in PRESETS}
    for tried in (key, f"rtx{key}", f"gtx{key}"):
        if known := _ALIASES.get(tried) or by_key.get(tried):
            return known
    several = [by_key[k] for k in by_key if k.startswith(key) and k[len(key) :] in _VARIANTS]
    if several:
        raise BadValueError(
            f"unknown preset {quoted(name)}: there are {len(several)} of unlike memory or power",
            f"nearest: {', '.join(several)}; write which",
        )
    if _APPLE.match(key):
        raise BadValueError(
            f"{quoted(name)} is Apple's, and bundles run on cpu and cuda",
            'for a plan write "kind": "cpu", memory, flops and memory_bandwidth yourself',
        )
    near = nearest(key, by_key)
    hint = f"nearest: {', '.join(by_key[k] for k in near)}; " if near else ""
    raise BadValueError(
        f"unknown preset {quoted(name)}",
        f"{hint}known: {', '.join(PRESETS)}; or write memory, flops and memory_bandwidth yourself",
    )


_SIZES = ("8", "10", "12", "16", "24", "32", "40", "48", "64", "80", "96", "94", "141")
_VARIANTS = {f"{size}{board}" for size in _SIZES for board in ("", "pcie", "sxm2")}
"""What may follow a card's name where that alone is not enough."""

_BRANDS = re.compile(r"^(nvidia|geforce|tesla|amd|instinct|radeon|\W)+")


def _key(name: str) -> str:
    return re.sub(r"[^a-z0-9]", "", _BRANDS.sub("", name.lower()))

"""Datasheets of common GPUs, and the share of them that models reach.

This module is a table; it does not know how a device is written in a file.

Rates are the datasheet's own: peak *FP32* without tensor cores, dense FP16 products with FP32 sums,
TF32 where there is one, and memory bandwidth. No model reaches them. `Sustained` has the efficiency
that products and memory passes of models reached, measured where anybody has published it of the
card, and usual values elsewhere. `Preset.sustained_...` are the products of both.
`bigbrain-fx doctor` on the machine is better.
Memory is the datasheet's number in *decimal* gigabytes. Cards report up to 7 % more than that, and
the CUDA context, ECC and the allocator's fragments take about as much. What no datasheet says is
cuBLAS's workspace: torch chooses it by the card's compute capability.

A card that is sold with several memories, boards or power caps has a name for each. The names of
nvidia-smi and torch are understood, too ("NVIDIA A100-SXM4-80GB"). AMD's cards are `cuda` to torch
(ROCm), and so they are here. Apple's have no preset: bundles run on cpu and cuda.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass

from bigbrain_fx.cluster.cards import CARDS, MEASURED as MEASURED, UNITS as UNITS, Preset as Preset
from bigbrain_fx.cluster.quantity import BadValueError, nearest, quoted

PRESETS: Mapping[str, Preset] = CARDS

_ALIASES = {"rtxa6000": "a6000", "rtxa5000": "a5000", "rtxa4000": "a4000", "mi300": "mi300x"}
_APPLE = re.compile(r"^(apple)?m[1-9](pro|max|ultra)?$")
_NOT_THE_CARD = re.compile(r"\b(laptop|mobile|max-?q|mig)\b")


def preset(name: str) -> Preset:
    """Look a card up; case, blanks and hyphens do not matter: "RTX 3090", "rtx3090", "rtx-3090".

    Raises:
        BadValueError: no such card, or several: names them, or the nearest.
    """
    return PRESETS[preset_name(name)]


def preset_name(name: str) -> str:
    """Return how `PRESETS` writes a card's name; raises as `preset` does."""
    asked, alike = _parts(name), _alike(name)
    if _NOT_THE_CARD.search(name.lower()):
        raise BadValueError(
            f"unknown preset {quoted(name)}: it is slower than the card", _BY_HAND, code="BX1025"
        )
    if exact := next((known for known in alike if _key(known) == _key(name)), None):
        return exact
    fitting = [known for known in alike if asked.may_be(_whole(known))]
    if len(fitting) == 1:
        return fitting[0]
    if fitting:
        raise BadValueError(
            f"unknown preset {quoted(name)}: there are {len(fitting)} of unlike memory or power",
            f"nearest: {', '.join(fitting)}; write which",
            code="BX1026",
        )
    if _APPLE.match(asked.core):
        raise BadValueError(
            f"{quoted(name)} is Apple's, and bundles run on cpu and cuda",
            'for a plan write "kind": "cpu", memory, flops and memory_bandwidth yourself',
            code="BX1027",
        )
    near = alike or _nearest(asked.core)
    hint = f"nearest: {', '.join(near)}; " if near else ""
    raise BadValueError(
        f"unknown preset {quoted(name)}",
        f"{hint}known: {', '.join(PRESETS)}; or {_BY_HAND}",
        code="BX1028",
    )


_BY_HAND = "write memory, flops and memory_bandwidth yourself"


# --------------------------------------------------------------------------- names in parts


@dataclass(frozen=True, slots=True)
class _CardName:
    """A card's name without its maker's: "a100", and the memory and board that it says, or none."""

    core: str
    memory_gb: int | None
    board: str | None

    def may_be(self, card: _CardName) -> bool:
        """Whether nothing that is said is otherwise on a card."""
        return self.memory_gb in (None, card.memory_gb) and self.board in (None, card.board)


_BRANDS = re.compile(r"^(nvidia|geforce|tesla|amd|instinct|radeon|\W|_)+")
_GIGABYTES = re.compile(r"\b([0-9]+)[ _-]?g(i?b)?\b")
_MOST_GB = 288  # a word of more is no memory: 580 of an RX 580
_BOARDS = {"pcie": "pcie", "nvl": "nvl", "hbm3": "sxm"}  # an H100 on PCIe has HBM2e
_BOARDS |= {f"sxm{number}": "sxm" for number in ("", *range(2, 7))}
_FILLERS = ("generation", "gpu", "hbm2", "hbm2e", "hbm3e")


def _parts(name: str) -> _CardName:
    words = re.findall(r"[a-z0-9]+", _GIGABYTES.sub(r"\1", _BRANDS.sub("", name.lower())))
    sizes = [word for word in words[1:] if word.isdigit() and int(word) <= _MOST_GB]
    boards = [_BOARDS[word] for word in words if word in _BOARDS]
    core = [word for word in words if word not in (*sizes, *_BOARDS, *_FILLERS)]
    return _CardName("".join(core), int(sizes[-1]) if sizes else None, next(iter(boards), None))


def _whole(known: str) -> _CardName:
    """Return a preset's name with all that its datasheet says of it."""
    card, said = PRESETS[known], _parts(known)
    board = said.board or ("pcie" if card.wire.name.startswith("PCIe") else "sxm")
    return _CardName(said.core, round(card.memory_bytes / 1e9), board)


def _alike(name: str) -> list[str]:
    """Return the presets that are the card of a name in some memory, on some board."""
    core = _parts(name).core
    cores = {_parts(known).core for known in PRESETS}
    tried = (core, f"rtx{core}", f"gtx{core}", _ALIASES.get(core, ""))
    own = next((one for one in tried if one in cores), "")
    return [known for known in PRESETS if own and _parts(known).core == own]


def _nearest(core: str) -> list[str]:
    cores = {_parts(known).core: known for known in reversed(list(PRESETS))}  # its first name stays
    asked = (core, f"rtx{core}") if core else ()  # a blank is near to nothing
    tried = (found for one in asked for found in nearest(one, cores))
    return list(dict.fromkeys(cores[one] for one in tried))[:4]


def _key(name: str) -> str:
    """Return a name as it is compared: with its parts, without brand and punctuation."""
    parts = _parts(name)
    core = {"": "", **_ALIASES}.get(parts.core, parts.core)
    return "-".join(map(str, (core.removeprefix("rtx"), parts.memory_gb, parts.board)))

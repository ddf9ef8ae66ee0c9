"""Facts of optimizers as JSON, by parameter name: a part of them, and parts joined.

`optimizer_state.optimizer_facts` defines the form. The module knows no tensor and no device.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Iterable, Mapping
from typing import Any

from .coded import CodedError

OptimizerFacts = Mapping[str, Any]


class UnlikeFactsError(CodedError, ValueError):
    """Report that two devices differ about one parameter; names what."""


def parameter_of(tensor: str) -> str | None:
    """Return whose state a tensor of the optimizer is; None for a parameter or a buffer."""
    return tensor.split(":", 2)[2] if tensor.startswith("optimizer:") else None


def part_of_facts(whole: OptimizerFacts | None, names: Iterable[str]) -> dict[str, Any] | None:
    """Return what an optimizer says of some parameters; None: it updates none of them."""
    trained = {name for name in names if name in whole["of"]} if whole is not None else set()
    if whole is None or not trained:
        return None
    return {
        "class": whole["class"],
        "hyper": whole["hyper"],
        "of": {name: n for name, n in whole["of"].items() if name in trained},
        "scalars": {name: s for name, s in whole["scalars"].items() if name in trained},
        "strides": _of_tensors(whole["strides"], trained),
        "on_cpu": [name for name in whole["on_cpu"] if parameter_of(name) in trained],
    }


def _of_tensors(strides: Mapping[str, Any], trained: Collection[str]) -> dict[str, Any]:
    return {name: value for name, value in strides.items() if parameter_of(name) in trained}


def joined_facts(found: Iterable[OptimizerFacts | None]) -> dict[str, Any] | None:
    """Join what devices say of their optimizers; equal hyperparameters become one entry.

    Raises:
        UnlikeFactsError: two of them differ.
    """
    parts = [part for part in found if part is not None]
    if not parts:
        return None
    whole: dict[str, Any] = {"class": parts[0]["class"], "hyper": [], "on_cpu": []}
    whole |= {"of": {}, "scalars": {}, "strides": {}}
    places: dict[str, int] = {}
    for part in parts:
        if part["class"] != whole["class"]:
            raise UnlikeFactsError("the optimizer's class", code="BX5077")
        numbers = [_number(entry, whole["hyper"], places) for entry in part["hyper"]]
        of = {name: numbers[n] for name, n in part["of"].items()}
        for key, entries in (("of", of), *((k, part[k]) for k in ("scalars", "strides"))):
            for name, value in entries.items():
                if whole[key].setdefault(name, value) != value:
                    raise UnlikeFactsError(f"the optimizer's {key} of {name}", code="BX5078")
        whole["on_cpu"] += [name for name in part["on_cpu"] if name not in whole["on_cpu"]]
    return whole


def _number(entry: object, table: list[object], places: dict[str, int]) -> int:
    key = json.dumps(entry, sort_keys=True)
    if key not in places:
        places[key] = len(table)
        table.append(entry)
    return places[key]

"""The zoo: small models of every family, for `tools/conformance/coverage.py` and its tests.

    from tools.conformance.zoo import find
    find("gpt2").model()

Transformers and diffusers are imported when a family of theirs is read, and no network is used:
models are built from configurations.
"""

from __future__ import annotations

import importlib
from collections.abc import Iterator
from dataclasses import replace
from functools import cache

from tools.conformance.zoo.case import Case

FAMILIES = (
    "plain",
    "causal_lm",
    "encoders",
    "seq2seq",
    "vision",
    "multimodal",
    "audio",
    "diffusion",
)

__all__ = ["FAMILIES", "Case", "cases", "find"]


@cache
def family(name: str) -> tuple[Case, ...]:
    """Return the cases of one family, in the order of its file."""
    module = importlib.import_module(f"tools.conformance.zoo.{name}")
    return tuple(replace(case, family=name) for case in module.CASES)


def cases() -> Iterator[Case]:
    """Yield every case, family by family."""
    for name in FAMILIES:
        yield from family(name)


def find(name: str) -> Case:
    """Return a case by its name.

    Raises:
        KeyError: there is none of that name.
    """
    found = next((case for case in cases() if case.name == name), None)
    if found is None:
        raise KeyError(f"no case is called {name!r}: {', '.join(case.name for case in cases())}")
    return found

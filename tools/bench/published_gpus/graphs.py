"""Captured graphs as files: one for each source of rows, lines of JSON under xz.

Models of one source are alike, so that together they take little.
"""

from __future__ import annotations

import json
import lzma
from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

from pydantic import TypeAdapter

from bigbrain_fx.core import Graph

FOLDER = Path(__file__).resolve().parent / "data"


@dataclass(frozen=True)
class Key:
    """Key of a captured graph.

    `side` is a sequence's length or an image's width, `precision` what autocast computes in.
    """

    name: str
    side: int
    task: str
    precision: str
    layout: str = "nchw"


@lru_cache(maxsize=1)
def _adapter() -> TypeAdapter[Graph]:
    return TypeAdapter(Graph)


def read_graphs(path: Path, wanted: frozenset[Key] | None = None) -> Iterator[tuple[Key, Graph]]:
    """Yield the graphs of a file, or those wanted of them."""
    for line in lzma.decompress(path.read_bytes()).decode().splitlines():
        key_end = line.index("}") + 1
        key = Key(**json.loads(line[1:key_end]))
        if wanted is None or key in wanted:
            yield key, _adapter().validate_python(json.loads(line)[1])

"""Parts of a batch that the model file's own `micro(batch, parts)` cuts: edges of graphs, boxes.

micro(batch, 4) ─▶ four batches of one structure and the same shapes, a micro-batch each
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any

from torch import Tensor

from .entries import said
from .stream import BatchError

Micro = Callable[[Any, int], Any]
_RETURN = "return a list of as many batches, with the same entries of the same shapes"


def parts_of(micro: Micro, batch: object, count: int, step: int) -> list[Any]:
    """Return the parts of a batch.

    Raises:
        BatchError: `micro` fails; or its parts are not so many, or not alike.
    """
    try:
        found = micro(batch, count)
        found = [*found] if isinstance(found, Iterator) else found
    except Exception as error:
        first = (str(error).splitlines() or [""])[0]
        raise BatchError(
            f"step {step}: micro(batch, {count}) fails: {type(error).__name__}: {first}: let micro "
            "cut any batch of batches()",
            code="BX5196",
        ) from error
    if not isinstance(found, list | tuple) or len(found) != count:
        shown = len(found) if isinstance(found, list | tuple) else type(found).__name__
        raise BatchError(
            f"step {step}: micro(batch, {count}) must return {count} batches, found {shown}: "
            f"{_RETURN}",
            code="BX5197",
        )
    _require_alike([dict(_entries(part, ())) for part in found], step)
    return list(found)


def given_parts(batch: Any, count: int) -> list[dict[str, Tensor]]:  # noqa: ANN401  # as micro
    """Return the parts of a batch that its sender has cut: "x.0" is the x of the first."""
    named = [(*name.rpartition("."), tensor) for name, tensor in batch.items()]
    return [{n: t for n, _, m, t in named if m == str(micro)} for micro in range(count)]


def _require_alike(parts: list[dict[tuple[object, ...], str]], step: int) -> None:
    for number, part in enumerate(parts):
        keys = [*dict.fromkeys((*parts[0], *part))]
        key = next((k for k in keys if parts[0].get(k) != part.get(k)), None)
        if key is not None:
            one, other = (p.get(key, "nothing") for p in (parts[0], part))
            raise BatchError(
                f"step {step}: micro(batch, {len(parts)}) gives {'.'.join(map(str, key))!r} as "
                f"{one} in part 0 and as {other} in part {number}: fill the smaller one up in "
                "micro with what the loss leaves out",
                code="BX5198",
            )


def _entries(value: object, key: tuple[object, ...]) -> Iterator[tuple[tuple[object, ...], str]]:
    """Yield what is where in a batch: type and shape of tensors, of all else the type."""
    if isinstance(value, Mapping | tuple | list):
        pairs = value.items() if isinstance(value, Mapping) else enumerate(value)
        for name, item in pairs:
            yield from _entries(item, (*key, name))
    else:
        yield key, said(value) if isinstance(value, Tensor) else type(value).__name__

"""Classes that differ only in their arguments: self-attention is attention to a memory.

Where one call passes the same value twice, the other's class serves both, and gets it twice. The
module works on keys and bodies; it does not write text.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, TypeAlias

from bigbrain_fx.emit.ops.items import BlockCall, Body, Item, SequentialCall, Signature, all_blocks

if TYPE_CHECKING:
    from bigbrain_fx.emit.modules.blocks import Keys

Into: TypeAlias = Mapping[Signature, tuple[Signature, tuple[int, ...]]]
"""Key -> the key that serves it too, and which of its own arguments each of those is."""


def merged(keys: Keys, bodies: Sequence[Body]) -> list[Body]:
    """Return the bodies with as few classes as serve all calls; inner ones are merged first."""
    found = list(bodies)
    while into := _served(keys, found):
        found = [_rewritten(keys, body, into) for body in found]
    return found


def _served(keys: Keys, bodies: Sequence[Body]) -> Into:
    """Find keys that another one serves, none of which has a class inside that changes too."""
    inside_sequences = {block.key for body in bodies for block in _steps(body.items)}
    first = {block.key: block for body in bodies for block in all_blocks(body.items)}
    alike: dict[object, list[tuple[Signature, tuple[int, ...]]]] = defaultdict(list)
    for key, block in first.items():
        given: list[int] = []
        form = _form(keys.structure(block.body), given)
        if key not in inside_sequences:
            alike[block.module.type, form].append((key, tuple(given)))
    into: dict[Signature, tuple[Signature, tuple[int, ...]]] = {}
    for group in alike.values():
        widest, *others = sorted(group, key=lambda entry: -len(set(entry[1])))
        for key, narrow in others:
            if places := _places(widest[1], narrow):
                into[key] = widest[0], places
    both = {key: {block.key for block in all_blocks(first[key].body.items)} for key in first}
    return {a: (b, at) for a, (b, at) in into.items() if not (both[a] | both[b]) & set(into)}


def _form(structure: object, given: list[int]) -> object:
    """Return a structure without saying which argument is read where; that goes into `given`."""
    match structure:
        case ("outside", int(position)):
            given.append(position)
            return "outside"
        case tuple():
            return tuple(_form(part, given) for part in structure)
    return structure


def _places(wide: Sequence[int], narrow: Sequence[int]) -> tuple[int, ...]:
    """Return which argument of the narrow one each of the wide one is; nothing if it is two."""
    found = dict(zip(wide, narrow, strict=True))
    if any(found[a] != b for a, b in zip(wide, narrow, strict=True)):
        return ()
    return tuple(found[place] for place in sorted(found))


def _steps(items: Sequence[Item]) -> Iterator[BlockCall]:
    """Yield what stands inside an nn.Sequential, which hands on one value."""
    for item in items:
        if isinstance(item, SequentialCall):
            yield from all_blocks([item])
        elif isinstance(item, BlockCall):
            yield from _steps(item.body.items)


def _rewritten(keys: Keys, body: Body, into: Into) -> Body:
    if not any(block.key in into for block in all_blocks(body.items)):
        return body
    return replace(body, items=tuple(_item(keys, item, into) for item in body.items))


def _item(keys: Keys, item: Item, into: Into) -> Item:
    if not isinstance(item, BlockCall):
        return item
    if item.key in into:
        key, places = into[item.key]
        takes = tuple(item.body.takes[place] for place in places)
        return BlockCall(item.module, replace(item.body, takes=takes), key)
    body = _rewritten(keys, item.body, into)
    changed = body is not item.body
    return BlockCall(item.module, body, keys.key(body, item.module)) if changed else item

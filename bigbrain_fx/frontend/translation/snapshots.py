"""Copies of buffers that forward writes, for readers with a gradient.

    self.mean.lerp_(x.mean(0), 0.1)       the next micro-batch's forward writes it again,
    y = x / self.mean                     before this one's backward reads the old value

One process runs each backward before the next forward, and finds its saved values there. This file
edits core ops; it knows nothing of schedules.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from bigbrain_fx.core import Arg, Op, Param, Ref, TensorSpec, leaves, moved
from bigbrain_fx.frontend.translation.batch import unique
from bigbrain_fx.frontend.translation.nodes import name_of

_SAVES_NOTHING = ("aten.add.", "aten.sub.")


def with_copies(ops: Sequence[Op], params: Sequence[Param], names: set[str]) -> list[Op]:
    """Let ops that read a written buffer, and have a gradient, read a copy of it.

    Args:
        ops: in order; bodies of regions are left as they are.
        params: of the model.
        names: taken so far; the copies' names are added.
    """
    canonical = {p.name: p.canonical for p in params}
    frozen = {p.canonical for p in params if not p.spec.requires_grad}
    written = {canonical[name] for op in ops for name in op.mutates if name in canonical} & frozen
    if not written:
        return list(ops)
    specs = {p.name: p.spec for p in params} | {op.name: op.outputs[0] for op in ops if op.outputs}
    copier = _Copier({op.name: op.view_of for op in ops}, canonical, written, specs, names)
    return [made for op in ops for made in copier.copied(op)]


@dataclass(frozen=True)
class _Copier:
    """Views and shapes of the values."""

    view_of: Mapping[str, str | None]
    canonical: Mapping[str, str]
    written: set[str]
    specs: Mapping[str, TensorSpec]
    names: set[str]

    def copied(self, op: Op) -> Iterator[Op]:
        """Yield copies of an op's inputs, and the op that reads them."""
        own = {self._root(name) for name in (*op.mutates, op.name)}
        read = {name_of(arg): arg for arg in leaves((*op.args, *(v for _, v in op.kwargs)))}
        held = self.written - own
        found = {name: arg for name, arg in read.items() if name and self._root(name) in held}
        if not op.requires_grad or op.body is not None or op.target.startswith(_SAVES_NOTHING):
            found = {}
        taken = {name: self._copy(op, name, arg) for name, arg in found.items() if name}
        yield from taken.values()
        yield _reading(op, {name: Ref(copy.name) for name, copy in taken.items()}) if taken else op

    def _root(self, name: str) -> str:
        while name not in self.canonical and self.view_of.get(name):
            name = self.view_of[name] or name
        return self.canonical.get(name, name)

    def _copy(self, op: Op, name: str, arg: Arg) -> Op:
        spec = replace(self.specs[name], requires_grad=False)
        reads, writes = moved("aten.clone.default", [spec], [spec], False)
        return Op(
            unique(f"{name.rpartition('.')[2]}_now", self.names),
            "aten.clone.default",
            (arg,),
            outputs=(spec,),
            modules=op.modules,
            source=op.source,
            code=op.code,
            lines=op.lines,
            reads_bytes=reads,
            writes_bytes=writes,
        )


def _reading(op: Op, instead: Mapping[str, Ref]) -> Op:
    """Return an op that reads other values."""

    def put(arg: Arg) -> Arg:
        if isinstance(arg, tuple):
            return tuple(put(item) for item in arg)
        return instead.get(name_of(arg) or "", arg)

    kwargs = tuple((name, put(value)) for name, value in op.kwargs)
    return replace(op, args=tuple(put(arg) for arg in op.args), kwargs=kwargs)

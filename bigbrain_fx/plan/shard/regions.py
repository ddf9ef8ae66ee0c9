"""A region whose body reads parameters -> one that is given them: its members hold parts only."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from bigbrain_fx.core import Arg, Input, Op, ParamRef, Ref, TensorSpec

Given = Mapping[str, tuple[Ref, TensorSpec]]


def region_given(op: Op, values: Given) -> Op:
    """Return a region, and those in it, that reads values where it read these parameters.

    Args:
        op: a region, as `core.Op` describes it; any other op comes back as it is.
        values: by parameter, what is read in its place, and how that is.
    """
    read = {name: values[name] for name in op.params if name in values}
    if op.body is None or not read:
        return op

    def changed(arg: Arg) -> Arg:
        if isinstance(arg, tuple):
            return tuple(map(changed, arg))
        return read[arg.param][0] if isinstance(arg, ParamRef) and arg.param in read else arg

    def inside(each: Op) -> Op:
        kwargs = tuple((key, changed(value)) for key, value in each.kwargs)
        own = replace(each, args=tuple(map(changed, each.args)), kwargs=kwargs)
        return region_given(own, read)

    entries = (Input(ref.value, (), spec, batched=False) for ref, spec in read.values())
    body = replace(op.body, ops=tuple(map(inside, op.body.ops)), inputs=(*op.body.inputs, *entries))
    return replace(op, args=(*op.args, *(ref for ref, _ in read.values())), body=body)

"""Sizes in an op's arguments, for a member: views, slices, pieces and groups of its own part."""

from __future__ import annotations

from dataclasses import replace

from bigbrain_fx.core import Arg, Op, Ref
from bigbrain_fx.plan.shard.local_op import Local, plainly
from bigbrain_fx.plan.shard.sizes import SizePart


def sized(local: Local) -> list[Op]:
    """Give a view or an expansion the member's sizes; -1 stays what it is."""
    place = local.place(local.op.name)
    at = 2 if local.op.target.startswith("aten.unflatten") else 1
    sizes = local.arg(at, "")
    if place is None or not isinstance(sizes, tuple):
        return plainly(local)
    before = len(local.op.outputs[0].shape) - len(sizes)
    if at == 2:
        first = local.op.args[1]
        assert isinstance(first, int)
        before = first % len(local.spec(local.op.args[0]).shape)
    index = place.dim - before
    if not 0 <= index < len(sizes) or sizes[index] == -1:
        return plainly(local)
    own: Arg = local.given.outputs[0].shape[place.dim]
    if isinstance(own, str):  # heads beside the batch in one dimension: a number at run time only
        own, sizes = _at_run_time(local, index, sizes, before)
    return [*local.made, local.with_arg(at, (*sizes[:index], own, *sizes[index + 1 :]))]


def _at_run_time(
    local: Local, index: int, sizes: tuple[Arg, ...], before: int
) -> tuple[Arg, tuple[Arg, ...]]:
    """Return a size that is known at run time only, and the others beside it.

    A view works one out, and an expansion none: there -1 keeps what is.
    """
    whole, known = sizes[index], local.given.outputs[0].shape
    if "expand" in local.op.target or "broadcast" in local.op.target:
        return _part_of(local, whole), sizes
    others = tuple(known[before + i] if n == -1 else n for i, n in enumerate(sizes))
    return -1, others


def _part_of(local: Local, count: Arg) -> Arg:
    """Write the member's part of a number that the graph works out."""
    if not isinstance(count, Ref) or _is_of_part(local, count):
        return count
    times = local.emit("times", "operator.mul", count, local.part.length, spec=None)
    return local.emit("rows", "operator.floordiv", times, local.part.axis.size, spec=None)


def _is_of_part(local: Local, count: Ref) -> bool:
    """Whether a number is made of a size of which the member has its own part already."""
    pending, ops = [count.value], local.forms.whole.op
    while pending:
        made = ops[pending.pop()]
        if made.outputs and local.place(made.name) is not None:
            return True
        pending += [] if made.outputs else [name for name in made.refs if name in ops]
    return False


def repeated(local: Local) -> list[Op]:
    """Give the member its part of a count of repetitions, where what is repeated is whole.

    How long the result is follows from them; it may be said besides, and is another length here.
    """
    kwargs = tuple(each for each in local.given.kwargs if each[0] != "output_size")
    local.given = replace(local.given, args=local.given.args[:3], kwargs=kwargs)
    times = local.op.args[1]
    if local.place_of_arg(0) is not None or not isinstance(times, int):
        return plainly(local)
    return [local.with_arg(1, local.part.of(times))]


def tiled(local: Local) -> list[Op]:
    """Give the member its part of the copies that lie side by side, where they are divided."""
    place, sizes = local.place(local.op.name), local.given.args[1]
    if place is None or local.place_of_arg(0) is not None or not isinstance(sizes, tuple):
        return plainly(local)
    own = scaled(local.part, sizes[place.dim])
    return [local.with_arg(1, (*sizes[: place.dim], own, *sizes[place.dim + 1 :]))]


def sliced(local: Local) -> list[Op]:
    """Scale the bounds of a slice in the dimension that is divided."""
    place, dim = local.place_of_arg(0), local.arg(1, "dim", 0)
    assert isinstance(dim, int)
    if place is None or dim % len(local.spec(local.op.args[0]).shape) != place.dim:
        return plainly(local)
    bounds = (scaled(local.part, bound) for bound in local.given.args[2:4])
    return [replace(local.given, args=(*local.given.args[:2], *bounds, *local.given.args[4:]))]


def scaled(part: SizePart, bound: Arg) -> Arg:
    """Return the member's part of a bound, where it is a number."""
    return part.of(bound) if isinstance(bound, int) else bound


def cut_up(local: Local) -> list[Op]:
    """Scale the lengths of the pieces that a tensor is cut into."""
    place, dim = local.place_of_arg(0), local.arg(2, "dim", 0)
    assert isinstance(dim, int)
    if place is None or dim % len(local.spec(local.op.args[0]).shape) != place.dim:
        return plainly(local)
    sizes = local.given.args[1]
    own = tuple(scaled(local.part, n) for n in sizes) if isinstance(sizes, tuple) else None
    return [local.with_arg(1, own or scaled(local.part, sizes))]


def grouped(local: Local) -> list[Op]:
    """Give a group norm the member's own groups."""
    groups = local.given.args[1]
    has = local.place_of_arg(0)
    return [local.with_arg(1, scaled(local.part, groups)) if has and has.dim == 1 else local.given]

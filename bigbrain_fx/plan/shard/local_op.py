"""One op as it is written for a rank: what is known of it, and how ops are put in its place."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import TypeAlias, cast

from bigbrain_fx.core import Arg, Op, ParamRef, Place, Ref, TensorSpec, flops, moved
from bigbrain_fx.plan.shard.saved import RULES, Forms, SizePart, layout, rule_saves


@dataclass
class Local:
    """One op that is written for a rank.

    Attributes:
        op: as it is in the graph that is split.
        given: the same, reading what the rank has.
        part: what the rank has.
        made: the ops so far.
    """

    forms: Forms
    op: Op
    given: Op
    part: SizePart
    made: list[Op] = field(default_factory=list)

    @property
    def summed(self) -> bool:
        """Whether the ranks' results are parts of a sum."""
        return self.op.name in self.part.axis.summed

    def arg(self, place: int, name: str, default: Arg = None) -> Arg:
        """Return an argument of the rank's op by place or name."""
        if place < len(self.given.args):
            return self.given.args[place]
        return dict(self.given.kwargs).get(name, default)

    def with_arg(self, place: int, value: Arg) -> Op:
        """Return the rank's op with another argument."""
        args = self.given.args
        return replace(self.given, args=(*args[:place], value, *args[place + 1 :]))

    def place(self, name: str) -> Place | None:
        """Return where the axis lies in a value of the graph that is split."""
        held = self.forms.place_of.get(name)
        return held[1] if held is not None and held[0] is self.part else None

    def place_of_arg(self, index: int) -> Place | None:
        """Return where the axis lies in an argument."""
        arg = self.op.args[index] if index < len(self.op.args) else None
        if not isinstance(arg, Ref | ParamRef) or self.part.gathers(self.op, arg):
            return None
        return self.place(arg.value if isinstance(arg, Ref) else arg.param)

    def spec(self, arg: Arg) -> TensorSpec:
        """Return how an argument of `op` is in the graph that is split."""
        assert isinstance(arg, Ref | ParamRef)
        found = self.forms.spec(arg)
        assert found is not None
        return found

    def emit(
        self, suffix: str, target: str, *args: Arg, spec: TensorSpec | None, **kwargs: Arg
    ) -> Ref:
        """Write an op of the rank's own; an empty suffix names it as the op itself."""
        name = self.forms.name(f"{self.op.name}_{suffix}") if suffix else self.op.name
        outputs = () if spec is None else (spec,)
        family = target.split(".")[1]
        is_view = RULES.get(family) == "view" and isinstance(args[0], Ref)
        read = [*filter(None, map(self._member_spec, args))]
        reads_bytes, writes_bytes = moved(target, read, outputs, is_view)
        blank = replace(
            self.op,
            name=name,
            target=target,
            args=args,
            kwargs=tuple(kwargs.items()),
            outputs=outputs,
            is_tuple=False,
            random=False,
            mutates=(),
            view_of=None,
            flops=flops(target, read, outputs, args),
            reads_bytes=reads_bytes,
            writes_bytes=writes_bytes,
            saves=None,
        )
        base = args[0] if is_view else None
        made = replace(blank, view_of=base.value if isinstance(base, Ref) else None)
        self.made.append(replace(made, saves=rule_saves(made, family) if spec else None))
        return Ref(name)

    def _member_spec(self, arg: Arg) -> TensorSpec | None:
        """Return how what an op of the rank's own reads is; None for what is no tensor."""
        if not isinstance(arg, Ref | ParamRef):
            return None
        made = [op for op in self.made if arg == Ref(op.name)]
        if made:
            return made[0].outputs[0] if made[0].outputs else None
        place = self.given.args.index(arg) if arg in self.given.args else None
        whole = None if place is None else self.forms.spec(cast("Ref", self.op.args[place]))
        if place is None or whole is None:
            return None
        held = self.place_of_arg(place)
        return whole if held is None else self.part.narrow(whole, held, self.forms.whole.batch)

    def reduced(self, suffix: str, value: Ref, spec: TensorSpec, how: str = "sum") -> Ref:
        """Write a sum over the members."""
        name = self.forms.name(f"{self.op.name}_{suffix}") if suffix else self.op.name
        self.made.append(self.forms.exchange("all_reduce", name, value, spec, self.op, how))
        return Ref(name)

    def total(self, suffix: str, part: Ref) -> Ref:
        """Write the sum of what the ranks made of the op, or of it the part that each reads."""
        held, spec = self.forms.scattered.get(self.op.name), self.op.outputs[0]
        if held is None:
            return self.reduced(suffix, part, spec)
        name = self.forms.name(f"{self.op.name}_{suffix}") if suffix else self.op.name
        own, args = self.forms.narrow(spec, held), layout(*held)
        about = "reduce_scatter", name, part, own, self.op
        self.made.append(self.forms.exchange(*about, *args, whole=spec))
        self.forms.own[self.op.name] = held
        return Ref(name)

    def once(self, ref: Ref | ParamRef) -> tuple[Ref | ParamRef, TensorSpec]:
        """Return what is added to that sum, once, and how what comes out is."""
        held, spec = self.forms.scattered.get(self.op.name), self.op.outputs[0]
        if held is None:
            return self.forms.whole_form(ref), spec
        return self.forms.copied_form(ref), self.forms.narrow(spec, held)


Form: TypeAlias = Callable[[Local], "list[Op]"]


def plainly(local: Local) -> list[Op]:
    """Run the same op; add the ranks' results where they are parts."""
    return parts_reduced(local, local.given)


def parts_reduced(local: Local, given: Op) -> list[Op]:
    """Run an op on parts of a sum, and add the ranks' results."""
    if not local.summed:
        return [given]
    part = replace(given, name=local.forms.name(f"{given.name}_part"))
    local.made.append(part)
    local.total("", Ref(part.name))
    return local.made


# ------------------------------------------------------------------------------------------------
# Sizes in an op's arguments, for a rank: views, slices, pieces and groups of its own part.


def sized(local: Local) -> list[Op]:
    """Give a view or an expansion the rank's sizes; -1 stays what it is."""
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
    """Write the rank's part of a number that the graph works out."""
    if not isinstance(count, Ref) or _is_of_part(local, count):
        return count
    times = local.emit("times", "operator.mul", count, local.part.length, spec=None)
    return local.emit("rows", "operator.floordiv", times, local.part.axis.size, spec=None)


def _is_of_part(local: Local, count: Ref) -> bool:
    """Whether a number is made of a size of which the rank has its own part already."""
    pending, ops = [count.value], local.forms.whole.op
    while pending:
        made = ops[pending.pop()]
        if made.outputs and local.place(made.name) is not None:
            return True
        pending += [] if made.outputs else [name for name in made.refs if name in ops]
    return False


def repeated(local: Local) -> list[Op]:
    """Give the rank its part of a count of repetitions, where what is repeated is whole.

    How long the result is follows from them; it may be said besides, and is another length here.
    """
    kwargs = tuple(each for each in local.given.kwargs if each[0] != "output_size")
    local.given = replace(local.given, args=local.given.args[:3], kwargs=kwargs)
    times = local.op.args[1]
    if local.place_of_arg(0) is not None or not isinstance(times, int):
        return plainly(local)
    return [local.with_arg(1, local.part.of(times))]


def tiled(local: Local) -> list[Op]:
    """Give the rank its part of the copies that lie side by side, where they are divided."""
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
    """Return the rank's part of a bound, where it is a number."""
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
    """Give a group norm the rank's own groups."""
    groups = local.given.args[1]
    has = local.place_of_arg(0)
    return [local.with_arg(1, scaled(local.part, groups)) if has and has.dim == 1 else local.given]

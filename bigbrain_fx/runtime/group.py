"""Messages of a tensor group's ranks inside a stage, as functions with a gradient.

    copy_to_group   forward nothing; backward the ranks' gradients are added      (Megatron's f)
    all_reduce      forward the ranks' parts are added; backward nothing          (Megatron's g)
    all_gather      forward the ranks' parts are put together; backward each keeps its own
    own_part        forward each keeps its own part; backward the gradients are put together
    reduce_scatter  forward each gets its own part of the sum; backward gradients are put together
    gather_to_group forward as all_gather; backward each gets its own part of the gradients' sum

Every rank sends to every other, and adds in the order of the ranks: all have the same bits,
whenever messages arrive. Of a large tensor each adds a piece, and sends that to all: the same sums,
in fewer bytes. This file knows tensors and channels; it knows no layer and no schedule.

Source: Shoeybi et al., "Megatron-LM" (2019), section 3; for the last two Korthikanti et al. (2022),
"Reducing Activation Recomputation in Large Transformer Models", section 4.2.2.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, TypeAlias

import torch
from torch import Tensor, nn

from .channel import Channel
from .modules import active

Shape = Sequence[int]
Inner = int | Sequence[int]  # `core.Inner`: side by side at each index, of each piece that follows
Ways = dict[tuple[str, int, torch.dtype], Channel]


LARGE = 1 << 14  # numbers; `plan.tensor.exchange` has it, too


def pieces(numel: int, members: int) -> tuple[int, ...]:
    """Return how many numbers of a sum each rank adds; one entry where each adds all of it."""
    if members == 2 or numel < LARGE:
        return (numel,)
    return _evenly(numel, members)


def _evenly(numel: int, members: int) -> tuple[int, ...]:
    return tuple(numel // members + (member < numel % members) for member in range(members))


def added(parts: Sequence[Tensor]) -> Tensor:
    """Add tensors of all ranks in their order."""
    total = parts[0].contiguous()
    for part in parts[1:]:
        total = total + part.contiguous()
    return total


def largest(parts: Sequence[Tensor]) -> Tensor:
    """Return the largest of all ranks' numbers, each by itself."""
    most = parts[0].contiguous()
    for part in parts[1:]:
        most = torch.maximum(most, part.contiguous())
    return most


def joined(parts: Sequence[Tensor], dim: int, inner: Inner, lengths: Shape) -> Tensor:
    """Put parts together along a dimension that is read as (rest, size, inner)."""
    if not isinstance(inner, int):
        cut = [_apart(part, dim, inner, n) for part, n in zip(parts, lengths, strict=True)]
        found = [joined(own, dim + 1, n, lengths) for n, *own in zip(inner, *cut, strict=True)]
        return torch.cat(found, dim + 1).flatten(dim, dim + 1)
    read = [p.unflatten(dim, (-1, n, inner)) for p, n in zip(parts, lengths, strict=True)]
    return torch.cat(read, dim + 1).flatten(dim, dim + 2).contiguous()


def _apart(tensor: Tensor, dim: int, inner: Sequence[int], count: int) -> Sequence[Tensor]:
    """Cut unlike pieces of a dimension apart; what they follow each other in is a dimension more.

    Each has `count` indices, of as many numbers as `inner` says.
    """
    read: Tensor = tensor.unflatten(dim, (-1, count * sum(inner)))
    found: Sequence[Tensor] = read.split([count * n for n in inner], dim + 1)
    return found


def part_of_whole(whole: Tensor, dim: int, inner: Inner, lengths: Shape, member: int) -> Tensor:
    """Return a rank's part of a tensor; see `joined`."""
    if not isinstance(inner, int):
        cut = zip(_apart(whole, dim, inner, sum(lengths)), inner, strict=True)
        found = [part_of_whole(piece, dim + 1, n, lengths, member) for piece, n in cut]
        return torch.cat(found, dim + 1).flatten(dim, dim + 1)
    read: Tensor = whole.unflatten(dim, (-1, sum(lengths), inner))
    own = read.narrow(dim + 1, sum(lengths[:member]), lengths[member])
    return own.flatten(dim, dim + 2).contiguous()


class Group:
    """One rank's side of its group.

    Args:
        members: names of the devices, in the order in which parts are added.
        name: of this one.
        channels: of this device; those of parts are used, one for each rank, size and type.
        send, recv: the device's own.
    """

    def __init__(
        self,
        members: Sequence[str],
        name: str,
        channels: Sequence[Channel],
        send: Callable[[Channel, Tensor], None],
        recv: Callable[[Channel], Tensor],
    ) -> None:
        self.members = tuple(members)
        self.rank = self.members.index(name)
        self.others = [m for m in range(len(self.members)) if m != self.rank]
        self.send, self.recv = send, recv
        self.rows = self.full_rows = 1
        self.waiting: list[tuple[Tensor, Tensor]] = []  # (parameter, this rank's gradient of it)
        parts = [channel for channel in channels if channel.kind == "part"]
        self.outward: Ways = {_key(c, c.receiver): c for c in parts if c.sender == name}
        self.inward: Ways = {_key(c, c.sender): c for c in parts if c.receiver == name}

    def begin(self, rows: int, full_rows: int) -> None:
        """Take the rows of the micro-batch that a stage runs on, and those of a full one.

        Messages of a smaller micro-batch are filled up: channels are for full ones.
        """
        self.rows, self.full_rows = rows, full_rows

    def parts(self, own: Tensor, shapes: Sequence[Shape], rooms: Shape) -> list[Tensor]:
        """Send a tensor to the other ranks; return what each has, in their order.

        Args:
            own: what this rank has; private, nobody writes into it while it travels.
            shapes: of what each rank has.
            rooms: how many numbers each one's message is planned for.
        """
        flat = own.reshape(-1)
        for member in self.others:
            self._give(member, flat, rooms[self.rank])
        found = [own] * len(self.members)
        for member in self.others:
            got = self._take(member, rooms[member], flat.dtype)
            found[member] = got[: _numel(shapes[member])].view(tuple(shapes[member]))
        return found

    def combined(
        self, own: Tensor, how: Callable[[Sequence[Tensor]], Tensor] = added, *, grows: bool = True
    ) -> Tensor:
        """Combine the ranks' tensors, which have one shape: all get the same bits."""
        own, count = _private(own), len(self.members)
        room = self._room(own, grows=grows)
        rooms = pieces(room, count)
        if len(rooms) == 1:
            return how(self.parts(own, [own.shape] * count, [room] * count))
        lengths = _evenly(own.numel(), count)
        piece = how(self._scattered(own.reshape(-1), lengths, rooms))
        return torch.cat(self.parts(piece, [(n,) for n in lengths], rooms)).view(own.shape)

    def sums_of_waiting(self, named: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Add the ranks' gradients of parameters that wait for it, in one message of each type.

        Args:
            named: this device's parameters, in the order that all ranks have.

        Returns:
            The sums by name.
        """
        gradient = {id(parameter): given for parameter, given in self.waiting}
        self.waiting = []
        own = {name: gradient[id(p)] for name, p in named.items() if id(p) in gradient}
        found: dict[str, Tensor] = {}
        for dtype in dict.fromkeys(given.dtype for given in own.values()):
            same = {name: given for name, given in own.items() if given.dtype == dtype}
            flat = torch.cat([given.reshape(-1) for given in same.values()])
            count = len(self.members)
            total = added(self.parts(flat, [flat.shape] * count, [flat.numel()] * count))
            cut = total.split([given.numel() for given in same.values()])
            found |= {n: s.view(g.shape) for (n, g), s in zip(same.items(), cut, strict=True)}
        return found

    def _scattered(self, flat: Tensor, lengths: Shape, rooms: Shape) -> list[Tensor]:
        """Send each rank its piece of a tensor; return what all have of this one's piece."""
        found = list(flat.split(list(lengths)))
        for member in self.others:
            self._give(member, found[member], rooms[member])
        for member in self.others:
            found[member] = self._take(member, rooms[self.rank], flat.dtype)[: lengths[self.rank]]
        return found

    def whole(
        self, own: Tensor, dim: int, inner: Inner, lengths: Shape, *, grows: bool = True
    ) -> Tensor:
        """Put the ranks' parts together."""
        shape = list(own.shape)
        rest = shape[dim] // lengths[self.rank]
        shapes = [(*shape[:dim], rest * n, *shape[dim + 1 :]) for n in lengths]
        rooms = [self._room(own, grows=grows) // lengths[self.rank] * n for n in lengths]
        return joined(self.parts(_private(own), shapes, rooms), dim, inner, lengths)

    def own_sum(
        self, given: Tensor, dim: int, inner: Inner, lengths: Shape, *, grows: bool = True
    ) -> Tensor:
        """Add the ranks' tensors, which have one shape; return this rank's part of the sum."""
        room, count, given = self._room(given, grows=grows), sum(lengths), given.detach()
        for member in self.others:
            part = part_of_whole(given, dim, inner, lengths, member)
            part = part.clone() if part._is_view() else part  # nobody writes into it as it travels
            self._give(member, part.reshape(-1), room // count * lengths[member])
        own = part_of_whole(given, dim, inner, lengths, self.rank)
        found = [own] * len(lengths)
        for member in self.others:
            got = self._take(member, room // count * lengths[self.rank], own.dtype)
            found[member] = got[: own.numel()].view(own.shape)
        return added(found)

    def _room(self, own: Tensor, *, grows: bool) -> int:
        """Return the numbers that a tensor has in a full micro-batch; a scalar is one in any."""
        return own.numel() * self.full_rows // self.rows if grows and own.dim() else own.numel()

    def _give(self, member: int, flat: Tensor, room: int) -> None:
        """Start sending numbers to a rank, filled up to what its channel carries."""
        way = self.outward[self.members[member], room, flat.dtype]
        missing = room - flat.numel()
        self.send(way, torch.cat([flat, flat.new_zeros(missing)]) if missing else flat)

    def _take(self, member: int, room: int, dtype: torch.dtype) -> Tensor:
        """Wait for a rank's message."""
        with _paused():
            return self.recv(self.inward[self.members[member], room, dtype])


def _key(channel: Channel, member: str) -> tuple[str, int, torch.dtype]:
    return member, _numel(channel.shape), channel.dtype


def _numel(shape: Shape) -> int:
    count = 1
    for size in shape:
        count *= size
    return count


def _private(own: Tensor) -> Tensor:
    """Return a dense tensor into which nothing writes while it is being sent."""
    fresh = own.is_contiguous() and not own._is_view()
    return own.detach() if fresh else own.detach().clone(memory_format=torch.contiguous_format)


@contextmanager
def _paused() -> Iterator[None]:
    """While this device waits, others of the process may draw, each by its own key.

    An exchange may stand between a seed and the draw that it is for.
    """
    kept, dice = (active.key, active.device, active.group), torch.get_rng_state()
    try:
        yield
    finally:
        active.key, active.device, active.group = kept
        torch.set_rng_state(dice)


def _grows(value: Tensor) -> bool:
    """Whether a value has numbers for each row; weights have none. `require_growing` has looked."""
    return not isinstance(value, nn.Parameter)


Step: TypeAlias = Callable[[Tensor], Tensor | None]


class _Exchange(torch.autograd.Function):
    """A function of all ranks' values, and another one of their gradients.

    None is given back where no gradient comes: all ranks run the same code, so none of them has
    one.
    """

    @staticmethod
    def forward(ctx: Any, value: Tensor, there: Step, back: Step) -> Tensor | None:  # noqa: ANN401
        ctx.set_materialize_grads(False)
        ctx.back = back
        return there(value)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor | None) -> Any:  # noqa: ANN401  # torch's own
        return None if gradient is None else ctx.back(gradient), None, None


def _exchanged(value: Tensor, there: Step, back: Step) -> Tensor:
    """Return a value's exchange; `back` must hold no value that its forward could let go of."""
    found: Tensor = _Exchange.apply(value, there, back)  # type: ignore[no-untyped-call]
    return found


def copy_to_group(value: Tensor, group: Group, when: str = "") -> Tensor:
    """Pass a value to each rank's computation of its part; backward adds their gradients.

    Gradients of a parameter are added when the stage's backward ends, with all others that wait for
    it. They are added "at once" where something else has a gradient of it, too.
    """
    if isinstance(value, nn.Parameter) and not when:
        return _exchanged(value, _alike, lambda own: group.waiting.append((value, own)))
    grows = _grows(value)
    return _exchanged(value, _alike, lambda own: group.combined(own, grows=grows))


def _alike(value: Tensor) -> Tensor:
    return value.view_as(value)


def all_reduce(part: Tensor, group: Group, how: str = "sum") -> Tensor:
    """Add what the ranks have, in their order; "max" takes the largest."""
    combine = added if how == "sum" else largest
    return _exchanged(part, lambda own: group.combined(own, combine), lambda gradient: gradient)


def all_gather(part: Tensor, group: Group, dim: int, inner: Inner, lengths: Shape) -> Tensor:
    """Put the ranks' parts together: rank m has lengths[m] of them, `inner` numbers each."""
    how, grows = (dim, inner, lengths), _grows(part)

    def there(own: Tensor) -> Tensor:
        return group.whole(own.clone(memory_format=torch.contiguous_format), *how, grows=grows)

    return _exchanged(part, there, lambda gradient: part_of_whole(gradient, *how, group.rank))


def own_part(whole: Tensor, group: Group, dim: int, inner: Inner, lengths: Shape) -> Tensor:
    """Keep this rank's part; backward puts the ranks' gradients together."""
    how, grows = (dim, inner, lengths), _grows(whole)
    return _exchanged(
        whole,
        lambda value: part_of_whole(value, *how, group.rank),
        lambda gradient: group.whole(gradient, *how, grows=grows),
    )


def reduce_scatter(part: Tensor, group: Group, dim: int, inner: Inner, lengths: Shape) -> Tensor:
    """Add what the ranks have, in their order; keep this rank's part of the sum."""
    how = dim, inner, lengths
    return _exchanged(
        part, lambda own: group.own_sum(own, *how), lambda gradient: group.whole(gradient, *how)
    )


def gather_to_group(part: Tensor, group: Group, dim: int, inner: Inner, lengths: Shape) -> Tensor:
    """Put the ranks' parts together, for what each computes of its part; see `copy_to_group`."""
    how = dim, inner, lengths
    return _exchanged(
        part, lambda own: group.whole(own, *how), lambda gradient: group.own_sum(gradient, *how)
    )

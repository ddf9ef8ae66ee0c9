"""States of the ranks of tensor groups -> the whole model's, and its parts for other ranks.

    commit of d0: rows 0:32 of a weight, and of its moments ─┐
    commit of d1: rows 32:64                                 ┴─▶ the weight ──▶ other parts

Optimizer state in the shape of a part is divided as the part is; all else must be the same on all
ranks. This file moves bytes by shards; it knows no devices and no commits.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, TypeAlias

from bigbrain_fx.bundles.resplitting.named import Named, TensorPlace, differs, places_of
from bigbrain_fx.core import Shard
from bigbrain_fx.plan import Plan
from bigbrain_fx.runtime import TensorEntry, UnlikeFactsError, joined_facts, parameter_of
from bigbrain_fx.weights import DTYPES, cut_bytes, part_name, part_shape, read_header, whole_tensors

Shape: TypeAlias = tuple[int, ...]


@dataclass(frozen=True)
class PartPlace:
    """Place of a rank's part of a tensor in the whole tensor."""

    whole: TensorPlace
    shard: Shard

    @property
    def entry(self) -> TensorEntry:
        """How the part is stored."""
        return replace(self.whole.entry, shape=part_shape(self.whole.entry.shape, self.shard))

    @property
    def data(self) -> bytes:
        """Its bytes."""
        entry = self.whole.entry
        return cut_bytes(bytes(self.whole.data), entry.shape, self.shard, DTYPES[entry.dtype][1])


@dataclass(frozen=True)
class Division:
    """Tensors of a state that a plan divides, with their division; by canonical names."""

    shards: Mapping[tuple[str, int], Shard]
    shapes: Mapping[str, Shape]

    @staticmethod
    def of(plan: Plan) -> Division:
        """Return a plan's; without groups it divides nothing."""
        param = plan.graph.param
        shards = {(param[s.param].canonical, s.member): s for s in plan.sharded.shards}
        shapes = {p.canonical: tuple(int(n) for n in p.spec.shape) for p in plan.graph.params}
        return Division(shards, shapes)

    def shard(self, full: str, shape: Shape, member: int) -> Shard | None:
        """Return how a whole tensor of a state is divided; None where it is not."""
        name = _model_name(full)
        own = self.shards.get((name, member))
        return own if own is not None and shape == self.shapes[name] else None

    def is_part(self, full: str, shape: Shape, member: int) -> bool:
        """Whether a rank's tensor is its part of a whole one."""
        name = _model_name(full)
        own = self.shards.get((name, member))
        return own is not None and shape == part_shape(self.shapes[name], own)

    def parts(
        self, tensors: Mapping[str, TensorPlace], member: int
    ) -> dict[str, TensorPlace | PartPlace]:
        """Return what a rank has of whole tensors."""
        found: dict[str, TensorPlace | PartPlace] = {}
        for full, place in tensors.items():
            own = self.shard(full, place.entry.shape, member)
            found[full] = place if own is None else PartPlace(place, own)
        return found

    def part_of_facts(
        self, facts: Mapping[str, Any] | None, parts: Mapping[str, TensorPlace | PartPlace]
    ) -> dict[str, Any] | None:
        """Return what an optimizer says, with the strides that its parts have."""
        if facts is None:
            return None
        strides = {
            full: _dense_as(given, parts[full].entry.shape)
            if isinstance(parts.get(full), PartPlace)
            else given
            for full, given in facts["strides"].items()
        }
        return {**facts, "strides": strides}


def _model_name(full: str) -> str:
    return parameter_of(full) or full.partition(":")[2]


def _dense_as(strides: Sequence[int], shape: Shape) -> list[int]:
    """Return the strides of a dense tensor whose dimensions lie in the order of these."""
    found, step = [0] * len(shape), 1
    for dim in sorted(range(len(shape)), key=lambda dim: (strides[dim], -dim)):
        found[dim] = step
        step *= shape[dim]
    return found


def whole_state(members: Sequence[Named], plan: Plan, image: Path) -> Named:
    """Put the states of all ranks together.

    Args:
        members: of a plan with tensor groups, in order.
        plan: whose they are.
        image: the file to write divided tensors to; keep it while the result is needed.

    Raises:
        InputError: what ranks have in common is not the same; or the disk is full.
    """
    division, first, where = Division.of(plan), members[0], next(iter(members[0].files.values()))
    divided = list(_divided(members, division, where.parent))
    _write(members, division, divided, image)
    for other in members[1:]:
        if (other.step, other.facts) != (first.step, first.facts):
            raise differs("the state", "another rank of a tensor group", where.parent)
    rest = {full: place for full, place in first.tensors.items() if full not in divided}
    optimizer = _optimizer(members, division, divided, where.parent)
    files = {"parts": image, **first.files}  # the parts, put together, come first
    return Named(
        first.step, files, {**places_of(image, first.step), **rest}, first.facts, optimizer
    )


def _divided(members: Sequence[Named], division: Division, where: Path) -> Iterator[str]:
    """Yield what ranks have parts of; what is not divided has one content."""
    for full in dict.fromkeys(name for each in members for name in each.tensors):
        own = [each.tensors.get(full) for each in members]
        places = [place for place in own if place is not None]
        parts = [division.is_part(full, p.entry.shape, m) for m, p in enumerate(own) if p]
        if len(places) < len(own):
            raise differs(full, "a rank of a tensor group", where)
        if all(parts):
            yield full
        elif len({place.loaded.checks[full] for place in places}) > 1:
            raise differs(full, "a rank of a tensor group", where)


def _write(
    members: Sequence[Named], division: Division, divided: Sequence[str], image: Path
) -> None:
    headers = [
        {full: stored for file in each.files.values() for full, stored in read_header(file).items()}
        for each in members
    ]
    found = {
        part_name(full, m): header[full] for full in divided for m, header in enumerate(headers)
    }
    shards = [
        replace(division.shards[_model_name(full), m], param=full)
        for full in divided
        for m in range(len(members))
    ]
    shapes = {full: division.shapes[_model_name(full)] for full in divided}
    whole_tensors(found, shards, shapes, image)


def _optimizer(
    members: Sequence[Named], division: Division, divided: Sequence[str], where: Path
) -> dict[str, Any] | None:
    """Join what the ranks' optimizers say; strides of parts become those of the whole."""
    own = set(divided)
    each = [named.optimizer for named in members]
    plain = [
        None
        if facts is None
        else {**facts, "strides": {n: s for n, s in facts["strides"].items() if n not in own}}
        for facts in each
    ]
    try:
        joined = joined_facts(plain)
    except UnlikeFactsError as error:
        raise differs(str(error), "a rank of a tensor group", where) from error
    if joined is not None:
        first = members[0].optimizer or {"strides": {}}
        joined["strides"] |= {
            full: _dense_as(strides, division.shapes[_model_name(full)])
            for full, strides in first["strides"].items()
            if full in own
        }
    return joined

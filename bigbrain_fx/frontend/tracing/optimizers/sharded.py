"""Whether the user's optimizer may be given a part of a parameter, as in a tensor group.

Steps on made-up numbers, once with whole parameters and once with each member's parts of them: what
is not updated number by number (Muon, Adafactor, LAMB) shows here, and is refused.
This file knows the contract for `optimizer` and shards; it knows no graph.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor, nn

from bigbrain_fx.core import Shard
from bigbrain_fx.frontend.tracing.executor.tensor_parallel import taken
from bigbrain_fx.frontend.tracing.optimizers.refusals import LOOKS_AT_MORE_NUMBERS
from bigbrain_fx.frontend.tracing.optimizers.trial import (
    ALIKE,
    Make,
    Shape,
    dice_kept,
    numbers_of,
    place_of,
    run_trial,
    worst,
)

MOST_NUMBERS = 4_000_000


def require_divided(model: nn.Module, make: Make, shards: Sequence[Shard]) -> None:
    """Try an optimizer with whole parameters, and with the parts that each member has.

    One parameter stands for all whose names differ in numbers and that are divided alike.

    Raises:
        InputError: it updates a part otherwise than that part of the whole.
    """
    trained = {n: p for n, p in model.named_parameters() if p.requires_grad}
    of = {(s.param, s.member): s for s in shards if s.param in trained}
    names = _representative(trained, of)
    shapes = {n: Shape(_few(trained[n], of.get((n, 0))), torch.float64) for n in names}
    with dice_kept():
        whole = run_trial(make, shapes, names)
        for member in sorted({number for _, number in of}):

            def cut(name: str, numbers: Tensor, member: int = member) -> Tensor:
                shard = of.get((name, member))
                return numbers if shard is None else taken(numbers, shard).contiguous()

            found = run_trial(make, shapes, names, cut=cut)
            want = {name: cut(name, whole[name]) for name in names}
            start = {name: cut(name, numbers_of(name, shapes[name])) for name in names}
            name, error = worst(found, want, start)
            if error > ALIKE:
                is_part = (name, member) in of
                what = f"the part of {name} that member {member} has" if is_part else name
                raise LOOKS_AT_MORE_NUMBERS.error(place_of(make), what=what, error=error)


def _representative(
    trained: Mapping[str, nn.Parameter], of: Mapping[tuple[str, int], Shard]
) -> list[str]:
    found: dict[object, str] = {}
    for name, parameter in trained.items():
        shard = of.get((name, 0))
        layout = None if shard is None else (shard.dim, shard.size, shard.inner)
        found.setdefault((re.sub(r"\d+", "*", name), tuple(parameter.shape), layout), name)
    return list(found.values())


def _few(parameter: nn.Parameter, shard: Shard | None) -> tuple[int, ...]:
    """Return a parameter's shape; of a large one with the dimensions cut that are not divided."""
    size = list(parameter.shape)
    free = [dim for dim in range(len(size)) if shard is None or dim != shard.dim]
    while math.prod(size) > MOST_NUMBERS and any(size[dim] > 1 for dim in free):
        longest = max(free, key=lambda dim: size[dim])
        size[longest] //= 2
    return tuple(size)

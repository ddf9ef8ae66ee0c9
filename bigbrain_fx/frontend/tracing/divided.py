"""Whether the user's optimizer may be given a part of a parameter: tried, like all it is asked.

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
from bigbrain_fx.errors import InputError
from bigbrain_fx.frontend.tracing.lockstep import taken
from bigbrain_fx.frontend.tracing.parted import _error
from bigbrain_fx.frontend.tracing.trial import Make, Shape, dice_kept, numbers_of, place_of

MOST_NUMBERS = 4_000_000
_STEPS = 3
_ALIKE = 1e-9  # of a parameter's largest update, in float64
Tensors = Mapping[str, Tensor]


def require_divided(model: nn.Module, make: Make, shards: Sequence[Shard]) -> None:
    """Try an optimizer with whole parameters, and with the parts that each member has.

    One parameter stands for all whose names differ in numbers and that are divided alike.

    Raises:
        InputError: it updates a part otherwise than that part of the whole.
    """
    trained = {n: p for n, p in model.named_parameters() if p.requires_grad}
    of = {(s.param, s.member): s for s in shards if s.param in trained}
    names = _representative(trained, of)
    start = {
        n: numbers_of(n, Shape(_few(trained[n], of.get((n, 0))), torch.float64)) for n in names
    }
    with dice_kept():
        whole = _stepped(make, start, start)
        for member in sorted({number for _, number in of}):
            own = {n: _part(t, of.get((n, member))) for n, t in start.items()}
            found = _stepped(make, own, start, {n: of.get((n, member)) for n in names})
            for name in names:
                want = _part(whole[name], of.get((name, member)))
                error = _error(found[name], want, own[name])
                if error > _ALIKE:
                    raise _unlike(name, member, error, make, (name, member) in of)


def _unlike(name: str, member: int, error: float, make: Make, is_part: bool) -> InputError:
    what = f"the part of {name} that member {member} has" if is_part else name
    return InputError(
        f"optimizer(named_params) looks at more than one number at a time: with --tensor it "
        f"updates {what} otherwise, by {error:.1e} of its update",
        code="BX2107",
        at=place_of(make),
        notes=("every member makes an optimizer of its own, and gives it the parts it has",),
        help="update each number by its own gradient alone, as torch.optim.AdamW does, or leave "
        "--tensor out",
    )


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


def _part(tensor: Tensor, shard: Shard | None) -> Tensor:
    return tensor if shard is None else taken(tensor, shard).contiguous()


def _stepped(
    make: Make, start: Tensors, whole: Tensors, shards: Mapping[str, Shard | None] | None = None
) -> Tensors:
    """Return parameters after some steps; their gradients are parts of those of the whole ones."""
    torch.default_generator.manual_seed(0)
    params = {name: nn.Parameter(tensor.clone()) for name, tensor in start.items()}
    made = make(list(params.items()))
    for step in range(_STEPS):
        for name, parameter in params.items():
            shape = Shape(tuple(whole[name].shape), torch.float64)
            shard = shards.get(name) if shards else None
            parameter.grad = _part(numbers_of(f"{step} {name}", shape), shard).clone()
        made.step()
    return {name: parameter.detach() for name, parameter in params.items()}

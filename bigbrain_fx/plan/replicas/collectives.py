"""What torch.distributed's collectives need of replicas that sum by them: refused in words else.

This file knows stages and their devices; it knows no process group.
"""

from __future__ import annotations

from collections.abc import Sequence

from bigbrain_fx.core import Stages
from bigbrain_fx.errors import InputError
from bigbrain_fx.plan.nouns import Plan

_WITHOUT = "leave --all-reduce-order backend out: our own sums do not need it"


def require_collectives(plan: Plan) -> None:
    """Refuse replicas whose processes would not meet in the same collectives in the same order.

    A group of processes has one for each place of the pipeline, and calls collectives bucket by
    bucket; with ZeRO 2 for each micro-batch, else once a step.

    Raises:
        InputError: replicas are cut unlike, or of several kinds of devices; or with ZeRO 2 they
            have unequal shares or backwards in two parts.
    """
    stages = plan.stages
    if len(set(map(len, _cuts(stages)))) > 1 or len(set(_cuts(stages))) > 1:
        raise InputError(
            "--all-reduce-order backend sums stage by stage, and these replicas are cut unlike",
            code="BX1274",
            help=f"give each replica as many equal devices, or {_WITHOUT}",
        )
    kinds = sorted({plan.cluster.device[name].kind for name in stages.devices})
    if len(kinds) > 1:
        raise InputError(
            "--all-reduce-order backend is for devices of one kind, and these are "
            f"{' and '.join(kinds)}",
            code="BX1275",
            help=_WITHOUT,
        )
    if stages.zero_stage == 2:
        require_alike_micros(stages.micros)
        _require_whole_backwards(stages)


def _cuts(stages: Stages) -> list[tuple[tuple[str, ...], ...]]:
    """Return the ops of each stage, by replica."""
    return [
        tuple(stage.ops for stage in stages.of_replica(number)) for number in range(stages.replicas)
    ]


def require_alike_micros(micros: Sequence[Sequence[int]]) -> None:
    """Refuse replicas that have not each a collective for the other's micro-batch."""
    counts = [len(own) for own in micros]
    if len(set(counts)) > 1:
        raise InputError(
            "--zero 2 --all-reduce-order backend sums micro-batches one of each replica "
            "together, and "
            f"they have {', '.join(map(str, counts))}",
            code="BX1276",
            at="--replica-ratio",
            help=f"--replica-ratio {':'.join('1' * len(counts))}, --zero 1, or --all-reduce-order "
            "micro",
        )


def _require_whole_backwards(stages: Stages) -> None:
    """Refuse gradients that come after their stage's backward, and its collective."""
    if stages.deferring:
        raise InputError(
            "--zero 2 --all-reduce-order backend sums a stage's gradients after its backward, and "
            "here "
            "some come later",
            code="BX1277",
            help="use --schedule 1f1b, --zero 1, or --all-reduce-order micro",
        )

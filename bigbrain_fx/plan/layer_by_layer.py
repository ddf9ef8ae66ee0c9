"""`--offload weights` -> what it asks of options and placement: a stage for each layer, in turn.

    stage 0  F0 F1 F2 .  .  .  .  .  .  .  .  .  .  .  .  B0 B1 B2      a device has one layer's
    stage 1  .  .  .  F0 F1 F2 .  .  .  .  .  .  B0 B1 B2 .  .  .       weights at a time
    stage 2  .  .  .  .  .  .  F0 F1 F2 B0 B1 B2 .  .  .  .  .  .

It knows options and layers; it knows no bytes and no time.
"""

from __future__ import annotations

from dataclasses import replace

from bigbrain_fx.core import Cluster, Graph, Placement
from bigbrain_fx.errors import InputError
from bigbrain_fx.plan.gathered_parts import breaks_at_layers
from bigbrain_fx.plan.nouns import Options, Source
from bigbrain_fx.plan.offloading import WORDS
from bigbrain_fx.plan.schedule import GPipe


def layer_by_layer(options: Options, cluster: Cluster, source: Source | None = None) -> Options:
    """Return options with all that offloaded weights imply; those without, as they are.

    What the optimizer keeps and what stages receive lie in stores too, each stage runs its forward
    again, and all micro-batches of a stage run before the next one's. `source` is None where no
    model is at hand yet.

    Raises:
        InputError: something else was asked for that does not go with it.
    """
    if "weights" not in options.offload:
        return options
    for is_asked, what, remedy in _unfit(options, cluster, source):
        if is_asked:
            raise InputError(
                f"{what}: --offload weights does not go with it", code="BX1239", help=remedy
            )
    return replace(options, offload=WORDS, recompute="all", schedule=GPipe.name, tensor=1)


def _unfit(
    options: Options, cluster: Cluster, source: Source | None
) -> tuple[tuple[bool, str, str], ...]:
    cuda = [device.name for device in cluster.devices if device.kind != "cpu"]
    again = options.recompute
    asked = again if isinstance(again, str) else ",".join(map(str, again or ("none",)))
    named = options.replicas is None and (cluster.replicas or options.replica_shares)
    sums = named or options.zero_stage or options.all_reduce_order != "replica"
    return (
        (
            bool(cuda),
            f"device {cuda[0]} computes in memory of its own" if cuda else "",
            "use --offload activations,state, or cpu devices alone",
        ),
        (
            options.schedule not in (None, GPipe.name),
            f"--schedule {options.schedule} comes back to each stage for each micro-batch",
            f"leave --schedule out, or write --schedule {GPipe.name}",
        ),
        (
            options.recompute not in (None, "all"),
            f"--recompute {asked} keeps what other stages save",
            "leave --recompute out: every stage runs its forward again",
        ),
        (
            bool(options.defer),
            "--defer keeps gradients of weights waiting",
            "leave --defer out",
        ),
        (
            bool(sums) or options.replicas not in (None, 1),
            "replicas sum gradients in memory",
            "write --replicas 1, and no --zero and no --sum-order",
        ),
        (
            source is not None and source.grad_scaler is not None,
            "grad_scaler divides all gradients at once, in memory",
            "train in bfloat16 without grad_scaler, or use --offload activations,state",
        ),
    )


def in_layers(graph: Graph, placement: Placement, rows: int) -> Placement:
    """Begin a stage at each layer that has weights worth moving."""
    breaks = dict.fromkeys((*placement.breaks, *breaks_at_layers(graph, rows)))
    return replace(placement, breaks=tuple(breaks))

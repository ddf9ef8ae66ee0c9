"""`--offload weights` -> what it asks of options and placement: a stage for each layer, in turn.

    stage 0  F0 F1 F2 .  .  .  .  .  .  .  .  .  .  .  .  B0 B1 B2      a device has one layer's
    stage 1  .  .  .  F0 F1 F2 .  .  .  .  .  .  B0 B1 B2 .  .  .       weights at a time
    stage 2  .  .  .  .  .  .  F0 F1 F2 B0 B1 B2 .  .  .  .  .  .

It knows options and layers; it knows no bytes and no time.
"""

from __future__ import annotations

from dataclasses import replace

from bigbrain_fx.core import Graph, Placement
from bigbrain_fx.plan.gathered_parts import breaks_at_layers
from bigbrain_fx.plan.nouns import Options
from bigbrain_fx.plan.offloading import WORDS
from bigbrain_fx.plan.schedule import GPipe


def layer_by_layer(options: Options) -> Options:
    """Return options with all that offloaded weights imply; those without, as they are.

    What the optimizer keeps and what stages receive lie in stores too, each stage runs its forward
    again, and all micro-batches of a stage run before the next one's.
    """
    if "weights" not in options.offload:
        return options
    return replace(options, offload=WORDS, recompute="all", schedule=GPipe.name, tensor=1)


def in_layers(graph: Graph, placement: Placement, rows: int) -> Placement:
    """Begin a stage at each layer that has weights worth moving."""
    breaks = dict.fromkeys((*placement.breaks, *breaks_at_layers(graph, rows)))
    return replace(placement, breaks=tuple(breaks))

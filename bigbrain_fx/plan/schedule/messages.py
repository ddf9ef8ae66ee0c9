"""Put the messages around what a device computes: orders of Forward and Backward become Programs.

The order written here is the contract with the emitter, which writes the same order as text:

    Recv activations, Forward, Send activations        each in the order of `stages.into` / `out_of`
    Recv gradients,   Backward, Send gradients
    Send tied, Recv tied, Send norm, Recv norm, OptimizerStep          once, after all micro-batches

Edges with both ends on one device have no instruction. It knows nothing of times or memory.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TypeAlias

from bigbrain_fx.core import (
    Backward,
    EdgeKind,
    Forward,
    Instruction,
    OptimizerStep,
    Program,
    Recv,
    Send,
    Stages,
)

Compute: TypeAlias = Forward | Backward
Orders: TypeAlias = dict[str, tuple[Compute, ...]]
"""What each device computes, in order."""


def with_messages(stages: Stages, orders: Orders, trained: frozenset[int]) -> tuple[Program, ...]:
    """Return one program per device, in the order of `stages.devices`."""
    return tuple(
        Program(device, tuple(_instructions(stages, device, orders[device], bool(trained))))
        for device in stages.devices
    )


def _instructions(
    stages: Stages, device: str, order: tuple[Compute, ...], training: bool
) -> Iterator[Instruction]:
    for compute in order:
        yield from _surrounded(stages, compute)
    if training:
        yield from _once_a_step(stages, device, "tied")
        yield from _once_a_step(stages, device, "norm")
        yield OptimizerStep()


def _surrounded(stages: Stages, compute: Compute) -> Iterator[Instruction]:
    kind: EdgeKind = "activation" if isinstance(compute, Forward) else "gradient"
    for edge in stages.into(compute.stage, kind):
        if not stages.is_local(edge):
            yield Recv(edge, compute.micro)
    yield compute
    for edge in stages.out_of(compute.stage, kind):
        if not stages.is_local(edge):
            yield Send(edge, compute.micro)


def _once_a_step(stages: Stages, device: str, kind: EdgeKind) -> Iterator[Instruction]:
    edges = [edge for edge in stages.edges if edge.kind == kind and not stages.is_local(edge)]
    for edge in edges:
        if stages.stages[edge.source].device == device:
            yield Send(edge, None)
    for edge in edges:
        if stages.stages[edge.target].device == device:
            yield Recv(edge, None)

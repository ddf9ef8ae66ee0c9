"""Profile databases made by hand: of synthetic graphs, with times that the eye can check."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

from bigbrain_fx.core import Graph
from bigbrain_fx.costs.profiles import Machine, OpProfile, ProfileStore, Signature, signatures
from tests.support.synthetic import random_graph

MACHINE = Machine(
    *("cpu", "a processor", "2.9.0", 1, 2e9, 2e9, 1e-6),
    optimizer_s_per_byte=1e-8,
    optimizer_s_per_tensor=1e-5,
)


def profile_of(signature: Signature, forward_s: float = 1e-3, **more: float) -> OpProfile:
    """Make a profile whose backward takes twice its forward, if it has one."""
    backward_s = 2 * forward_s if signature.wants_backward else 0.0
    of_weights = any(t.wants_grad and t.is_parameter for t in signature.tensors)
    return OpProfile(
        signature,
        forward_s,
        backward_input_s=backward_s / 2 if of_weights else backward_s,
        backward_weight_s=backward_s / 2 if of_weights else 0.0,
        samples=20,
        **more,  # type: ignore[arg-type]  # flops and bytes
    )


def profiles_of(graph: Graph) -> Iterable[OpProfile]:
    """Make a profile for each op of a graph, with its flops and bytes."""
    for op, signature in signatures(graph):
        sizes = {"flops": op.flops, "writes_bytes": op.writes_bytes}
        yield profile_of(signature, **{name: int(value) for name, value in sizes.items()})


def database(path: Path, seeds: Iterable[int] = range(4)) -> Path:
    """Write profiles of the ops of some random graphs."""
    for seed in seeds:
        ProfileStore(path).put(MACHINE, *profiles_of(random_graph(seed, 25)))
    return path

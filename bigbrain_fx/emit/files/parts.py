"""Which files of the runtime and the supervisor only some bundles run, and which bundles those are.

A part is left out by its ways in, the files through which all others of it are reached; whoever
imports one of them does so late, and only where the plan has the part.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass
from pathlib import Path

from bigbrain_fx.plan import Plan


@dataclass(frozen=True)
class Copied:
    """What decides on the files of a bundle.

    Attributes:
        plan: of the bundle.
        supervised: it replaces processes that die.
        extras: what it was asked to have beside what its plan needs, of `EXTRAS`.
    """

    plan: Plan
    supervised: bool
    extras: Collection[str] = ()


@dataclass(frozen=True)
class Part:
    """Files of one feature, and whether a bundle has it."""

    name: str
    is_in: Callable[[Copied], object]
    runtime: tuple[str, ...] = ()
    supervisor: tuple[str, ...] = ()


def _has_copies(bundle: Copied) -> bool:
    """Whether several devices hold a weight that each of them updates."""
    stages = bundle.plan.stages
    is_tied = any(edge.kind == "tied" for edge in stages.edges)
    return bool(stages.micros) or stages.members > 1 or is_tied


def _has_hosts(bundle: Copied) -> bool:
    """Whether the devices are on several hosts."""
    device = bundle.plan.cluster.device
    return len({device[name].host for name in bundle.plan.stages.devices}) > 1


def _has_suspicion(bundle: Copied) -> bool:
    return bundle.supervised and "suspicion" in bundle.extras


_OF_REPLICAS = (
    *("buckets", "joining", "peer_states", "replicas", "standing", "statistics", "surviving"),
)
PARTS = (
    Part("processes that are replaced", lambda b: b.supervised, ("control", "member")),
    Part("replicas", lambda b: b.plan.stages.micros, _OF_REPLICAS),  # one, summed by a tree, too
    Part("sums by torch's collectives", lambda b: b.plan.stages.by_backend, ("collectives",)),
    Part("ZeRO 3", lambda b: b.plan.stages.gathers, ("unsharded",)),
    Part("copies of a weight", _has_copies, ("copies",)),
    Part("tensor groups", lambda b: b.plan.stages.members > 1, ("group",)),
    Part("stores", lambda b: b.plan.stages.offload, ("stores",)),
    Part("weights in stores", lambda b: "weights" in b.plan.stages.offload, ("stored_weights",)),
    Part("activations in stores", lambda b: b.plan.stages.saving, ("stored_activations",)),
    Part("torch.compile", lambda b: b.plan.stages.compiled, ("compiled",)),
    Part("steps that overlap", lambda b: b.plan.stages.asynchronous, ("asynchronous",)),
    Part("torch's pipeline runner", lambda b: "pipelining" in b.extras, ("pipelining",)),
    Part("steps computed again", _has_suspicion, ("suspicion",)),
    Part("messages over MPI", lambda b: "mpi" in b.extras, ("mpi",)),
    Part("several hosts", _has_hosts, supervisor=("multi_host", "secured")),
    Part("sessions", lambda b: False, supervisor=("feeding",)),  # whoever opens one has ours
)
UNIMPORTED = {  # files that nothing of a bundle imports, and that it has all the same
    "runtime": ("pipelining",),  # a user's own loop does
    "supervisor": ("ending_orphans",),  # is a program
}


REPLACING = PARTS[0]
EXTRAS = ("mpi", "pipelining", "suspicion")  # parts that a bundle has when asked to, by their file


def is_chain(plan: Plan) -> bool:
    """Whether torch's own pipeline runner can run the stages; it has one version of weights."""
    stages = plan.stages
    is_several = stages.micros or stages.asynchronous or plan.placement.tensor is not None
    return stages.is_chain and not (is_several or plan.graph.is_opaque_step)


def extras_of(bundle: Path) -> tuple[str, ...]:
    """Return the extras that a bundle has."""
    return tuple(name for name in EXTRAS if (bundle / "runtime" / f"{name}.py").is_file())


def left_out(bundle: Copied, room: str) -> frozenset[str]:
    """Return the files of a room that a bundle never runs: the ways into parts it has not."""
    return ways_into((part for part in PARTS if not part.is_in(bundle)), room)


def ways_into(parts: Iterable[Part], room: str) -> frozenset[str]:
    """Return the files of a room through which all others of some parts are reached."""
    files = (part.runtime if room == "runtime" else part.supervisor for part in parts)
    return frozenset(file for each in files for file in each)

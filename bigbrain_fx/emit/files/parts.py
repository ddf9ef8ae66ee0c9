"""Which files of the runtime and the supervisor only some bundles run, and which bundles those are.

A part is left out by its ways in, the files through which all others of it are reached; whoever
imports one of them does so late, and only where the plan has the part.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass

from bigbrain_fx.plan import Plan


@dataclass(frozen=True)
class Copied:
    """What decides on the files of a bundle: its plan, and whether it replaces processes."""

    plan: Plan
    supervised: bool


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


def _is_chain(bundle: Copied) -> bool:
    """Whether torch's own pipeline runner can run the stages; it has one version of weights."""
    plan = bundle.plan
    is_chain = plan.stages.is_chain and plan.placement.tensor is None
    is_plain = not (plan.stages.asynchronous or plan.graph.is_opaque_step)
    return bundle.supervised and is_chain and is_plain


def _has_hosts(bundle: Copied) -> bool:
    """Whether the devices are on several hosts."""
    device = bundle.plan.cluster.device
    return len({device[name].host for name in bundle.plan.stages.devices}) > 1


_OF_REPLICAS = ("buckets", "joining", "replicas", "standing", "statistics", "surviving")
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
    Part("torch's pipeline runner", _is_chain, ("pipelining",)),
    Part("several hosts", _has_hosts, supervisor=("multi_host",)),
    Part("sessions", lambda b: False, supervisor=("feeding",)),  # whoever opens one has ours
)
UNIMPORTED = {  # files that nothing of a bundle imports, and that it has all the same
    "runtime": ("pipelining",),  # a user's own loop does
    "supervisor": ("ending_orphans",),  # is a program
}


REPLACING = PARTS[0]


def left_out(bundle: Copied, room: str) -> frozenset[str]:
    """Return the files of a room that a bundle never runs: the ways into parts it has not."""
    return ways_into((part for part in PARTS if not part.is_in(bundle)), room)


def ways_into(parts: Iterable[Part], room: str) -> frozenset[str]:
    """Return the files of a room through which all others of some parts are reached."""
    files = (part.runtime if room == "runtime" else part.supervisor for part in parts)
    return frozenset(file for each in files for file in each)

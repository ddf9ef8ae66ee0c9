"""Features of bundles: the files of the runtime and the supervisor that only some bundles run.

A part is left out by its ways in, the files through which all others of it are reached. Other
files import one of them late, and only where the plan has the part.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass
from pathlib import Path

from bigbrain_fx.plan import Plan, may_be_ungiven


@dataclass(frozen=True)
class Copied:
    """Facts that decide on the files of a bundle.

    Attributes:
        plan: of the bundle.
        supervised: it replaces processes that die.
        extras: requested features beside those that the plan needs, of `EXTRAS`.
    """

    plan: Plan
    supervised: bool
    extras: Collection[str] = ()


@dataclass(frozen=True)
class Part:
    """Files of one feature, and whether a bundle has it.

    Attributes:
        is_check: it changes no number: the tier without it trains the same plan.
        is_in_device: it is a part of a device's steps, which `checked_device` does not know.
    """

    name: str
    is_in: Callable[[Copied], object]
    runtime: tuple[str, ...] = ()
    supervisor: tuple[str, ...] = ()
    is_check: bool = False
    is_in_device: bool = True


def _has_copies(bundle: Copied) -> bool:
    """Whether several devices hold a weight that each of them updates."""
    stages = bundle.plan.stages
    is_tied = any(edge.kind == "tied" for edge in stages.edges)
    return bool(stages.micros) or stages.members > 1 or is_tied


def _recomputes(bundle: Copied) -> bool:
    """Whether stages run forward twice: also to drop what micro-batches without rows write."""
    stages = bundle.plan.stages
    again = any(stage.runs_again for stage in stages.stages) or bool(stages.saving)
    return again or _is_uneven(bundle) or "pipelining" in bundle.extras


def _is_uneven(bundle: Copied) -> bool:
    """Whether micro-batches may have unequal rows."""
    return bundle.plan.source.drop_last is False


def _has_rules(bundle: Copied) -> bool:
    """Whether the model file says how batches are split, or its own step cuts them."""
    return not bundle.plan.source.splits_evenly or bundle.plan.graph.is_opaque_step


def _varies(bundle: Copied) -> bool:
    """Whether messages say their own form: shapes are unequal, or gradients may be missing."""
    return bundle.plan.source.varies or bool(may_be_ungiven(bundle.plan.graph))


def _has_state(bundle: Copied) -> bool:
    """Whether an opaque module goes by what it has left in plain attributes."""
    return any(op.state for op in bundle.plan.graph.ops)


def _has_hosts(bundle: Copied) -> bool:
    device = bundle.plan.cluster.device
    return len({device[name].host for name in bundle.plan.stages.devices}) > 1


def _has_more(bundle: Copied) -> object:
    """Whether a supervisor may watch, check, span hosts, or lose replicas."""
    return {"hosts", "suspicion", "watch"} & {*bundle.extras} or bundle.plan.stages.micros


def _has_gpus(bundle: Copied) -> bool:
    device = bundle.plan.cluster.device
    return any(device[name].kind != "cpu" for name in bundle.plan.stages.devices)


EXTRAS = ("checks", "hosts", "mpi", "pipelining", "suspicion", "watch")  # asked for
_FILES = {"checks": "data", "generators": "own_dice"}  # by which one is known, if not by its own
SESSION = "feeding"  # a part that only `Machine` asks for
GENERATORS = "generators"  # and one that model files do


_SPARE = ("suspicion",)
_OF_HOSTS = ("hosts", "last_commit")
_OF_REPLICAS = (
    *("buckets", "joining", "peer_states", "replicas"),
    *("standing", "state_parts", "statistics", "surviving"),
)
PARTS = (
    Part(
        "processes that are replaced",
        lambda b: b.supervised,
        ("control", "member"),
        is_in_device=False,
    ),
    Part(
        "replicas", lambda b: b.plan.stages.micros, _OF_REPLICAS, ("peering",)
    ),  # one, summed by a tree, too
    Part("sums by torch's collectives", lambda b: b.plan.stages.by_backend, ("collectives",)),
    Part("ZeRO 3", lambda b: b.plan.stages.gathers, ("unsharded",)),
    Part("copies of a weight", _has_copies, ("copies",), is_check=True, is_in_device=False),
    Part("tensor groups", lambda b: b.plan.stages.members > 1, ("group", "group_runs")),
    Part("stores", lambda b: b.plan.stages.offload, ("stores", "offloading", "offload_malloc")),
    Part("weights in stores", lambda b: "weights" in b.plan.stages.offload, ("stored_weights",)),
    Part("activations in stores", lambda b: b.plan.stages.saving, ("stored_activations",)),
    Part("torch.compile", lambda b: b.plan.stages.compiled, ("compiled",)),
    Part("steps that overlap", lambda b: b.plan.stages.asynchronous, ("asynchronous",)),
    Part("torch's pipeline runner", lambda b: "pipelining" in b.extras, ("pipelining",)),
    Part("steps computed again", lambda b: "suspicion" in b.extras, _SPARE, _SPARE),
    Part("messages over MPI", lambda b: "mpi" in b.extras, ("mpi",), is_in_device=False),
    Part("micro-batches of unequal rows", _is_uneven),
    Part("recomputation", _recomputes, ("recompute",)),
    Part("a loss scale", lambda b: b.plan.source.grad_scaler is not None, ("loss_scale",)),
    Part(
        "a scheduler of learning rates",
        lambda b: b.plan.source.has_scheduler,
        ("rates",),
        is_check=True,
        is_in_device=False,
    ),
    Part("messages that vary", _varies, ("varying",)),
    Part("a split backward", lambda b: b.plan.stages.deferring, ("deferred",)),
    Part(
        "recomputed operations",
        lambda b: b.plan.stages.again or "pipelining" in b.extras,
        ("promises",),
    ),
    Part("batches of several lengths", lambda b: b.plan.source.lengths, ("lengths",)),
    Part("batches that are split by rules", _has_rules, ("splitting",)),
    Part("a training step that runs as it is", lambda b: b.plan.graph.is_opaque_step),
    Part(
        "opaque modules with state",
        _has_state,
        ("module_state",),
        is_check=True,
        is_in_device=False,
    ),
    Part("devices of several hosts", _has_hosts, ("addresses",), is_check=True, is_in_device=False),
    Part("GPUs", _has_gpus, ("gpus",), is_in_device=False),
    Part(
        "a watch over processes and memory",
        lambda b: {"watch", "hosts"} & {*b.extras},
        (),
        ("aside", "catch_up", "host_memory", "outliving", "watch"),
        is_in_device=False,
    ),
    Part(
        "what a supervisor does beside replacing processes",
        _has_more,
        (),
        ("more", "more_arguments"),
        is_in_device=False,
    ),
    Part(
        "several hosts",
        lambda b: "hosts" in b.extras,
        _OF_HOSTS,
        ("multi_host", "secured"),
        is_in_device=False,
    ),
    Part(
        "random generators of the model file's own",
        lambda b: GENERATORS in b.extras or b.plan.graph.is_opaque_step or _has_state(b),
        ("own_dice",),
        is_check=True,
        is_in_device=False,
    ),
    Part("sessions", lambda b: SESSION in b.extras, ("feeding",), is_in_device=False),
    Part("the caller of sessions", lambda b: False, (), ("feeding",)),  # who opens one has ours
)


def _is_whole(bundle: Copied) -> bool:
    return any(part.is_in(bundle) for part in PARTS if part.is_in_device)


WHOLE_DEVICE = Part("a device of any plan", _is_whole, ("device", "planned_infer"))


def _is_checked(bundle: Copied) -> bool:
    is_asked = bool({"checks", SESSION} & {*bundle.extras})
    return is_asked or bundle.plan.mode != "train" or _is_whole(bundle)


CHECKS = Part("checks of batches beyond shape and type", _is_checked, ("data",), is_check=True)
KNOWN = Part(
    "batches of which none has entries that the first lacks",
    lambda b: b.supervised or _is_checked(b),
    ("known_stream",),
    is_check=True,
)
UNIMPORTED = {  # files that nothing of a bundle imports, and that it has all the same
    "runtime": ("hosts", "pipelining"),  # `member` does by its name, a user's own loop
    "supervisor": (),
}


REPLACING = PARTS[0]


def is_chain(plan: Plan) -> bool:
    """Whether torch's own pipeline runner can run the stages; it has one version of weights."""
    stages = plan.stages
    is_several = stages.micros or stages.asynchronous or plan.placement.tensor is not None
    return stages.is_chain and not (is_several or plan.graph.is_opaque_step)


def extras_of(bundle: Path) -> tuple[str, ...]:
    """Return the extras that a bundle has."""
    files = ((name, f"{_FILES.get(name, name)}.py") for name in (*EXTRAS, SESSION, GENERATORS))
    rooms = bundle / "runtime", bundle / "supervisor"
    return tuple(name for name, file in files if any((room / file).is_file() for room in rooms))


def left_out(bundle: Copied, room: str) -> frozenset[str]:
    """Return the files of a package that a bundle never runs: the ways into parts it has not."""
    return ways_into(
        (part for part in (*PARTS, WHOLE_DEVICE, CHECKS, KNOWN) if not part.is_in(bundle)), room
    )


def ways_into(parts: Iterable[Part], room: str) -> frozenset[str]:
    """Return the files of a package through which all others of some parts are reached."""
    files = (part.runtime if room == "runtime" else part.supervisor for part in parts)
    return frozenset(file for each in files for file in each)


def beyond_bare(plan: Plan) -> str | None:
    """Return the first feature of a plan that the plain pipeline of `--bare` lacks, if any."""
    bundle = Copied(plan, supervised=False)
    return next((p.name for p in PARTS if p.is_in(bundle) and not p.is_check), None)

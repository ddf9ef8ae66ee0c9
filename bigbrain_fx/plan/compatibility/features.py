"""Features of requests, under their user-facing names, for rules of compatibility."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeAlias

from bigbrain_fx.core import OPAQUE_MODULE, Cluster, Graph, Op
from bigbrain_fx.errors import InputError
from bigbrain_fx.plan.nouns import AUTO, Options, Source
from bigbrain_fx.plan.replica_statistics import written
from bigbrain_fx.plan.schedule import SCHEDULES, Gems, GPipe, traits
from bigbrain_fx.planning import label, options_of

# ------------------------------------------------------------------------------------------------
# One rule: two features that do not go together, why not, and what to do instead.
#
#   Rule(COMPILE, ZERO_3, "weights come and go between forward and backward", "use --zero 2", ...)
#     ──▶ error[BX1227j]: --compile does not go with --zero 3: weights come and go ...
#           help: use --zero 2, or leave --compile out
#
# A feature is what a user asked for, or what the model or the cluster is.


@dataclass(frozen=True)
class Request:
    """A request to plan, as far as it is known.

    Attributes:
        graph: as captured; None before the model is.
        source: further facts of the model file; likewise.
        is_placed: ops are placed as in another plan: no partitioner chooses, and no replicas.
        is_written: a bundle is written, which may do less than a forecast can say.
    """

    options: Options
    cluster: Cluster
    graph: Graph | None = None
    source: Source | None = None
    is_placed: bool = False
    is_written: bool = False


Words: TypeAlias = Callable[[Request], str]


@dataclass(frozen=True)
class Feature:
    """Something that a request may have.

    Attributes:
        name: on the page of compatibility, and in errors.
        found: whether a request has it, or how an error names what has it ("--schedule zb-h1").
    """

    name: str
    found: Callable[[Request], object]

    def words(self, request: Request) -> str:
        """Return how an error names it; "" where the request does not have it."""
        found = self.found(request)
        return found if isinstance(found, str) else self.name * bool(found)


@dataclass(frozen=True)
class Rule:
    """Two features that do not go together.

    Attributes:
        when: that an error begins with, and the first that its remedy leaves out.
        other: what it does not go with.
        why: a clause; "" where nothing but work stands in the way.
        instead: what to do; "" is to leave out either.
        code: of the error.
    """

    when: Feature
    other: Feature
    why: str
    instead: str | Words = ""
    code: str = ""

    def applies(self, request: Request) -> bool:
        """Whether a request has both features."""
        return bool(self.when.words(request) and self.other.words(request))

    def error(self, request: Request) -> InputError:
        """Return how a request is refused that has both features."""
        when, other = self.when.words(request), self.other.words(request)
        instead = self.instead if isinstance(self.instead, str) else self.instead(request)
        return InputError(
            self.sentence(when, other),
            code=self.code,
            at=when.split(" ")[0] if when.startswith("--") else None,
            help=f"{instead or f'leave {other} out'}, or leave {when} out",
        )

    def sentence(self, when: str, other: str) -> str:
        """Say that they do not go together, and why."""
        return f"{when} does not go with {other}" + (f": {self.why}" if self.why else " yet")


# ------------------------------------------------------------------------------------------------
# What a request may have that something else does not go with, by the name a user knows it by.


def _option(name: str, field: str) -> Feature:
    """Return the feature that an option is given at all."""
    return Feature(name, lambda request: bool(getattr(request.options, field)))


# --------------------------------------------------------------------------- the model

INFERENCE = Feature(
    "inference",
    lambda r: r.options.mode == "eval" or (r.graph is not None and not r.graph.training),
)
TRAINING = Feature("training", lambda r: r.options.mode != "eval" and _trains(r))
NO_LOSS = Feature(
    "a model that trains without a loss",
    lambda r: r.graph is not None and r.graph.training and r.graph.loss is None,
)
CLIPPING = Feature("clip_norm", lambda r: r.source is not None and r.source.clip_norm is not None)
LOSS_SCALE = Feature(
    "grad_scaler", lambda r: r.source is not None and r.source.grad_scaler is not None
)
SMALLER_BATCHES = Feature(
    "smaller last batches (drop_last = False)",
    lambda r: r.source is not None and r.source.drop_last is False,
)
ONE_LENGTH = "say lengths = () and pad = {...} in the model file: all are as long as the example"
LENGTHS = Feature(
    "batches of several lengths",
    lambda r: r.source is not None and bool(r.source.lengths),
)


def _trains(request: Request) -> bool:
    return request.graph is None or request.graph.training


def _drawing(request: Request) -> str:
    op = _first_draw(request.graph) if request.graph is not None else None
    return f"random numbers ({', '.join(filter(None, (op.name, op.source)))})" if op else ""


def _first_draw(graph: Graph) -> Op | None:
    """Return the first op that draws random numbers, those in regions, too."""
    for op in graph.ops:
        inner = _first_draw(op.body) if op.body is not None else None
        if op.random or inner:
            return op if op.random else inner
    return None


def _written(request: Request) -> str:
    names = written(request.graph) if request.graph is not None else ()
    return f"'{names[0]}', which the forward writes" if names else ""


def _state(request: Request) -> str:
    ops = request.graph.ops if request.graph is not None else ()
    op = next((op for op in ops if op.state), None)
    return f"what '{op.target.removeprefix(OPAQUE_MODULE)}' keeps in attributes" if op else ""


STATE = Feature("opaque modules with state in attributes", _state)
RANDOM = Feature("random numbers", _drawing)
WRITTEN = Feature("buffers that the forward writes", _written)

# --------------------------------------------------------------------------- the partitioner

SEARCHED = Feature(
    "--partitioner auto", lambda r: not r.is_placed and r.options.partitioner == AUTO
)
LIKE = Feature("--like", lambda r: r.is_placed)
CUT_AT = Feature("--cut-at", lambda r: r.options.cut_at is not None)


def _without_cut_at(request: Request) -> str:
    method = request.options.partitioner
    known = method == AUTO or "block_gap" in options_of("partitioner", method)
    return "" if known else f"--partitioner {label(method)}"


WITHOUT_CUT_AT = Feature("a partitioner that has no such option", _without_cut_at)
BY_HAND = Feature(
    "--pin or --place",
    lambda r: "--place" if r.options.place else "--pin" if r.options.pins else "",
)
PLACE = _option("--place", "place")

# --------------------------------------------------------------------------- the schedule


def _schedule(name: str, *schedules: str) -> Feature:
    return Feature(name, lambda r: _named(r) if r.options.schedule in schedules else "")


def _named(request: Request) -> str:
    return f"--schedule {request.options.schedule}"


GEMS = _schedule("--schedule gems", Gems.name)
_FOLDED = [name for name, each in SCHEDULES.items() if each.fold]
VIRTUAL_STAGES = _schedule("a schedule of virtual stages", *_FOLDED)
NOT_1F1B = Feature(
    "another schedule than 1f1b",
    lambda r: _named(r) if r.options.schedule not in (None, "1f1b") else "",
)
NOT_GPIPE = Feature(
    "another schedule than gpipe",
    lambda r: _named(r) if r.options.schedule not in (None, GPipe.name) else "",
)
OWN_IN_FLIGHT = Feature(
    "a schedule that says what is in flight",
    lambda r: "" if traits(r.options.schedule).takes_in_flight else _named(r),
)
IN_FLIGHT = Feature("in_flight", lambda r: r.options.in_flight is not None)
DEFER = _option("--delay-weight-gradients", "defer")


def _split_backward(request: Request) -> str:
    options = request.options
    if options.defer:
        return "--delay-weight-gradients"
    return _named(request) if traits(options.schedule).splits and options.defer != () else ""


SPLIT_BACKWARD = Feature("split backwards", _split_backward)


def _divided_backward(request: Request) -> str:
    """Name what may divide a backward, or make single ops of it again."""
    options = request.options
    if traits(options.schedule).splits:
        return _named(request)
    return SEARCHED.words(request) or DEFER.words(request) or RECOMPUTE_OPS.words(request)


DIVIDED_BACKWARD = Feature("what may divide a backward", _divided_backward)
PIECES = Feature(
    "--virtual-stages", lambda r: f"--virtual-stages {r.options.pieces}" * _has_pieces(r)
)


def _has_pieces(request: Request) -> bool:
    return request.options.pieces is not None


def _takes_no_such_pieces(request: Request) -> str:
    pieces, schedule = request.options.pieces or 0, request.options.schedule
    fold = traits(schedule).fold
    if fold is not None and (pieces == 2 or (pieces > 2 and fold.any_pieces)):  # a V has two
        return ""
    return f"--schedule {schedule}" if schedule else "a schedule of one piece a device"


NO_SUCH_PIECES = Feature("a schedule of another number of pieces", _takes_no_such_pieces)

# --------------------------------------------------------------------------- memory

RECOMPUTE = _option("--activation-checkpointing", "recompute")


def _recompute(request: Request) -> str:
    asked = request.options.recompute
    words = asked if isinstance(asked, str) else ",".join(map(str, asked or ("none",)))
    return f"--activation-checkpointing {words}"


RECOMPUTE_OPS = Feature(
    "--activation-checkpointing of single ops",
    lambda r: _recompute(r) if r.options.recompute in ("ops", "auto") else "",
)
RECOMPUTE_SOME = Feature(
    "--activation-checkpointing of some stages",
    lambda r: _recompute(r) if r.options.recompute not in (None, "all") else "",
)
OFFLOAD = _option("--offload", "offload")
OFFLOAD_WEIGHTS = Feature("--offload weights", lambda r: "weights" in r.options.offload)
OFFLOAD_SAVED = Feature(
    "--offload of weights or activations",
    lambda r: bool({"weights", "activations"} & set(r.options.offload)),
)


def without_store(request: Request) -> str:
    """Return the first device that has no store; "" where all have one."""
    cluster = request.cluster
    return next((d.name for d in cluster.devices if d.name not in cluster.store), "")


NO_STORE = Feature(
    "a device without a store",
    lambda r: f"device {name}, which has no store" if (name := without_store(r)) else "",
)
GPUS = Feature("GPUs", lambda r: any(d.kind != "cpu" for d in r.cluster.devices))

# --------------------------------------------------------------------------- replicas and groups


def _has_replicas(request: Request) -> bool:
    options = request.options
    asked = options.replicas not in (None, 1) or options.replica_shares
    return bool(asked or (options.replicas is None and request.cluster.replicas))


def _wants_replicas(request: Request) -> bool:
    if request.is_placed:
        return False
    trains = request.options.mode != "eval" and _trains(request)
    return request.options.wants_replicas(request.cluster, trains=trains)


def _has_one_replica(request: Request) -> bool:
    return not (request.is_placed or _wants_replicas(request))


REPLICAS = Feature("replicas", _has_replicas)
WANTED_REPLICAS = Feature("--replicas", _wants_replicas)
ONE_REPLICA = Feature("a single replica", _has_one_replica)
OPEN_REPLICAS = Feature("--replicas auto", lambda r: r.options.replicas == 0)
REPLICA_SHARES = _option("--replica-ratio", "replica_shares")
OTHER_REPLICAS = Feature(
    "another number of replicas",
    lambda r: (
        f"--replicas {r.options.replicas}"
        if r.options.replicas not in (None, 0, 1, len(r.options.replica_shares))
        else ""
    ),
)


def _zero(name: str, *stages: int) -> Feature:
    def words(request: Request) -> str:
        stage = request.options.zero_stage
        return f"--zero {stage}" if stage in stages and not request.is_placed else ""

    return Feature(name, words)


ZERO = _zero("--zero", 1, 2, 3)
NO_ZERO = _zero("--zero 0", 0)
SHARD_GROUP = Feature(
    "--shard-group",
    lambda r: f"--shard-group {r.options.shard_group}" if r.options.shard_group else "",
)
ZERO_2_OR_3 = _zero("--zero 2 or 3", 2, 3)
ZERO_3 = _zero("--zero 3", 3)
SUM_BY_REPLICA = Feature("--all-reduce-order replica", lambda r: r.options.sum_order == "replica")
SUM_BY_BACKEND = Feature("--all-reduce-order backend", lambda r: r.options.sum_order == "backend")
WRITTEN_BACKEND = Feature(
    "--all-reduce-order backend of a bundle",
    lambda r: SUM_BY_BACKEND.words(r) if r.is_written else "",
)
SUM_ORDER = Feature(
    "--zero or --all-reduce-order",
    lambda r: bool(r.options.zero_stage) or r.options.all_reduce_order != "replica",
)
GROUPS = Feature(
    "--tensor-parallel", lambda r: r.options.wants_groups or bool(r.options.tensor_shares)
)
OPEN_GROUPS = Feature("--tensor-parallel auto", lambda r: r.options.tensor == 0)
NO_GROUPS = Feature("stages of one device each", lambda r: not r.options.wants_groups)
GROUP_SHARES = _option("--tp-ratio", "tensor_shares")
GROUP_AXES = _option("--tp-axes", "tensor_axes")

# --------------------------------------------------------------------------- how stages compute

ASYNCHRONOUS = _option("--asynchronous", "asynchronous")
STASH = Feature("--asynchronous stash", lambda r: r.options.asynchronous == "stash")
COMPILE = _option("--compile", "compiled")
QUANTIZE = _option("--quantize", "quantize")
QUANTIZE_TRAINING = Feature(
    "--quantize of a base that is trained on",
    lambda r: "--quantize" if r.options.quantize and r.options.mode != "eval" else "",
)
CACHE = _option("--kv-cache", "cache")

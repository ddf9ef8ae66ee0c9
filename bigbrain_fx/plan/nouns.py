"""Options of a user, the source of a model, and the plan, with the text of plan.json."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import MISSING, Field as DataField, dataclass, field, fields, replace
from functools import cached_property, lru_cache
from typing import Annotated, Any, Literal, Self, TypeAlias

from pydantic import BeforeValidator, Field, TypeAdapter

from bigbrain_fx.core import (
    Asynchronous,
    Axis,
    Cluster,
    Forecast,
    Graph,
    LossCount,
    Offloaded,
    OptimizerData,
    Placement,
    Program,
    Sharded,
    Shown,
    Stage,
    Stages,
    SumOrder,
    ZeroStage,
    micro_text,
    quantised_weights,
)
from bigbrain_fx.plan.offloading import offload_text
from bigbrain_fx.plan.recompute import Defer, Wanted, defer_text, recompute_text
from bigbrain_fx.plan.replica_text import replicas_text
from bigbrain_fx.plan.search import Compared, CutAt, Effort, Objective, Search
from bigbrain_fx.plan.search.nouns import Goals, Offer
from bigbrain_fx.plan.shard import sharded
from bigbrain_fx.planning import Choice, Given

FORMAT = 2
AUTO = "auto"
"""The partitioner that tries the others, with every choice that was left open."""

Quantize: TypeAlias = Literal["int8"]
ShardGroup: TypeAlias = int | Literal["host"] | None

Open: TypeAlias = Annotated[
    int | None, Field(ge=0), BeforeValidator(lambda given: 0 if given == AUTO else given)
]
"""How many; 0, or "auto", lets the planner choose."""


def asynchronous_text(stages: Stages) -> str:
    """Say whose weights a step computes with; nothing, where it is its own."""
    if stages.asynchronous is None:
        return ""
    held = ", ".join(f"{s.device} {stages.versions(s.index)}" for s in stages.stages)
    whose = {
        "2bw": "each step computes with the weights of one step before",
        "stash": "each micro-batch is an update, of weights that a stage had at its forward",
    }
    return f"asynchronous, {stages.asynchronous}: {whose[stages.asynchronous]}; versions: {held}"


def compiled_text(stages: Stages) -> str:
    """Say that stages are compiled; nothing, where they are not."""
    if not stages.compiled:
        return ""
    return (
        "compiled: each stage runs under torch.compile with fixed shapes, equal to rounding; a "
        "device compiles in its first step; the forecast is of stages that are not compiled"
    )


@dataclass(frozen=True)
class Options:
    """Choices of a user; None means: let the planner choose.

    `partitioner` is a name, "mine.py:Class", or an object with `name` and `partition`;
    `partitioner_options` are its fields, as `--set` gives them.
    `rows` of a micro-batch are for a model whose trace cannot leave the batch size free. `mode`
    "eval" captures the model as `model.eval()` computes, for inference: there is no backward;
    None is "train", and "eval" for an ONNX file.
    `assume` says for places ("model.py:31") whether the condition there holds, where a tensor's
    value decides. `leaves` are opaque modules, by path or class name. `recompute` are the stages
    (by number, or "all") that save no activations and run forward again before backward. It may be
    "ops" or "auto": see `plan.lightening`. `defer` are the stages that delay gradients of weights.
    `objective` and `effort` are for the partitioner "auto": what is best, and how long to look.
    `replicas` of the model divide the batch's micro-batches in proportion to `replica_shares`, or
    to their speed; 0 tries every number, None takes the cluster file's. `zero_stage` says what they
    divide besides, and `sum_order` how gradients are added; see `core.Placement`. None is "micro"
    where gradients are divided, as no replica has a sum of its own then, and else "replica".
    `shard_group` is how many replicas divide that, "host" those on one host; None: all of them.
    `pins` are (modules, device) pairs that hold whatever the partitioner would do, `place` is a
    file that says where all modules go; see `plan.by_hand`. `pieces` are the virtual stages of each
    device, for the schedule "interleaved"; None is two. `tensor` devices compute each stage
    together, each with a part of its tensors in proportion to `tensor_shares`. They divide the axes
    `tensor_axes`, by kind or by name; all that are found where none is named. 0 lets the planner
    choose how many, and so does None with the partitioner "auto" where nothing else fits.
    `tensor_whole` are pairs (axis, op) that stay whole, since a rule was tried there and failed.
    `tensor_tried` are the axes of an earlier plan, whose rules were tried: these are divided.
    `offload` is what every device keeps in its store instead of its memory. `asynchronous` steps
    overlap, and compute with older weights: see docs/explanation/asynchronous.md. `compiled` stages
    run under torch.compile, equal to rounding. `cache` rows of keys and values are kept for
    generation, one position a step; 0 computes whole rows: see tools/studies/serving. `cut_at` says
    whether cuts may go through a layer of the model; None: where that gains more than forecasts are
    off. `quantize` puts frozen weights into int8. `strict` refuses a model of which a trace
    cannot hold all; else its whole step runs on one device, as the user wrote it. With `goals`, or
    the objective "cost", a plan may leave devices out: see `plan.renting`.
    """

    partitioner: Given = "chain-dp"
    estimator: str = "analytical"
    schedule: str | None = None
    micro_batches: int | None = None
    seed: int = 0
    in_flight: tuple[int, ...] | None = None
    rows: int | None = None
    partitioner_options: tuple[tuple[str, Choice], ...] = ()
    mode: Literal["train", "eval"] | None = None
    assume: tuple[tuple[str, bool], ...] = ()
    leaves: tuple[str, ...] = ()
    recompute: Wanted = None
    defer: Defer = None
    objective: Objective = "throughput"
    effort: Effort = "normal"
    replicas: Open = None
    replica_shares: tuple[int, ...] = ()
    zero_stage: ZeroStage = 0
    shard_group: ShardGroup = None
    sum_order: SumOrder | None = None
    pins: tuple[tuple[str, str], ...] = ()
    place: str | None = None
    pieces: int | None = None
    tensor: Open = None
    tensor_shares: tuple[int, ...] = ()
    tensor_axes: tuple[str, ...] = ()
    tensor_whole: tuple[tuple[str, str], ...] = ()
    tensor_tried: tuple[Axis, ...] = ()
    offload: tuple[Offloaded, ...] = ()
    asynchronous: Asynchronous | None = None
    compiled: bool = False
    cache: int = 0
    cut_at: CutAt | None = None
    quantize: Quantize | None = None
    strict: bool = False
    goals: Goals | None = None

    @property
    def all_reduce_order(self) -> SumOrder:
        """The order in which replicas add gradients, as asked for or chosen."""
        return self.sum_order or ("micro" if self.zero_stage >= 2 else "replica")

    @property
    def chooses_devices(self) -> bool:
        """Whether a plan may leave devices out for money's sake, or has limits to keep to."""
        return self.objective == "cost" or (self.goals is not None and self.goals.limits)

    @property
    def wants_groups(self) -> bool:
        """Whether groups of devices were asked for that compute together, of a number or of any."""
        return self.tensor not in (None, 1)

    def wants_replicas(self, cluster: Cluster, *, trains: bool) -> bool:
        """Whether replicas were asked for: by option, or for training by the cluster file."""
        if self.all_reduce_order == "tree":
            return True  # of one replica, too: it has the bits of any number of them
        named = (cluster.replicas and trains) or len(self.replica_shares) > 1
        return bool(named) if self.replicas is None else self.replicas != 1


@dataclass(frozen=True)
class Source:
    """Origin of the model, so that `verify` can ask it again.

    A module in memory has no `path`; `module` is the model file's name as a module. The optimizer
    keeps `optimizer_state` bytes per byte of parameters; `optimizer_states` has other numbers, by
    name. For a moment it has `optimizer_temporaries` tensors of a parameter's size and
    `optimizer_leftover` of the parameter before; AdamW's are 2, 2 and 1. On a GPU it updates all at
    once (`optimizer_at_once`) or, as on a CPU, one by one. `batch_dims` are those other than 0, by
    model input. `offsets` are the positions of a row that entries of offsets count; `pad` has the
    number that fills shorter entries. `fixed` is what
    else the model goes by in a batch: its place and value, of a list its length. With a `cache` of
    so many rows, of `positions` each, the graph computes one position and keeps keys and values.
    `quantize` is what frozen weights were put into, `quantize_error` the most that one is off,
    where the weights are known. Micro-batches weigh by the model file's `loss_weight` where it
    `has_loss_weight`, else by `loss_count` where that was found, else by their rows. Each has its
    part of inputs that are counts of the batch, `divided`. Batches may be shorter in the
    dimensions `lengths` of an input, its rows first, each of a name. They are filled up to the next
    of `buckets`, if any. With `has_micro` the file's `micro` cuts batches. `marks` are the user's
    own attributes of parameters, by name, which its optimizer may read. `optimizer` is that
    optimizer as data, where a device could not make its own by the file's function. A bundle
    `ships_file`, the whole model file, where a copy of the lines that it needs would have other
    values.
    """

    path: str
    has_batches: bool = False
    has_optimizer: bool = False
    has_loss: bool = False
    has_lr_scale: bool = False
    clip_norm: float | None = None
    module: str = ""
    optimizer_state: float = 2.0
    optimizer_temporaries: float = 2.0
    has_scheduler: bool = False
    grad_scaler: dict[str, int | float] | None = None
    optimizer_leftover: float = 0.0
    optimizer_states: dict[str, float] = field(default_factory=dict)
    optimizer_at_once: bool = True
    drop_last: bool | None = None
    batch_dims: dict[str, int] = field(default_factory=dict)
    pad: dict[str, int | float] = field(default_factory=dict)
    fixed: tuple[tuple[tuple[str | int, ...], bool | int | float | str | None], ...] = ()
    cache: int = 0
    positions: int = 0
    quantize: Quantize | None = None
    quantize_error: float | None = None
    ships_file: bool = False
    has_loss_weight: bool = False
    loss_count: LossCount | None = None
    offsets: dict[str, int] = field(default_factory=dict)
    divided: tuple[str, ...] = ()
    lengths: dict[str, tuple[tuple[int, str], ...]] = field(default_factory=dict)
    buckets: tuple[int, ...] = ()
    has_micro: bool = False
    marks: dict[str, dict[str, bool | int | float | str | None]] = field(default_factory=dict)
    optimizer: OptimizerData | None = None

    @property
    def weighs(self) -> bool:
        """Whether micro-batches weigh by a count of the loss's elements."""
        return self.has_loss_weight or self.loss_count is not None

    @property
    def splits_evenly(self) -> bool:
        """Whether it says nothing of how a batch is split, padded or left out, or must be."""
        said = self.batch_dims or self.pad or self.fixed or self.weighs or self.offsets
        cut = self.divided or self.has_micro or self.lengths
        return self.drop_last is None and not (said or cut)

    @property
    def varies(self) -> bool:
        """Whether micro-batches have unequal shapes: fewer rows, or shorter ones."""
        return self.drop_last is False or bool(self.lengths)


@dataclass(frozen=True)
class Case:
    """A model to plan, the devices that there are, and what was asked for."""

    graph: Graph
    cluster: Cluster
    source: Source
    options: Options

    @property
    def wants_replicas(self) -> bool:
        """Whether replicas were asked for: see `Options.wants_replicas`."""
        return self.options.wants_replicas(self.cluster, trains=self.graph.training)

    def asking(self, **choices: Any) -> Self:  # noqa: ANN401  # fields of Options
        """Return the same with other choices."""
        return replace(self, options=replace(self.options, **choices))


def quantised_text(graph: Graph, source: Source) -> str:
    """Say what is int8, what that spares, and how far a weight is off; nothing, where none is."""
    if not source.quantize:
        return ""
    names = quantised_weights(graph)
    param = graph.param
    wide = sum(param[n].spec.numel * _itemsize(graph, f"{n}_scale") for n in names)
    held = sum(param[m].spec.nbytes for n in names for m in (n, f"{n}_scale"))
    error = source.quantize_error
    off = "" if error is None else f"; a weight is at most {error:.2g} off"
    return (
        f"quantised: {len(names)} frozen weights are int8 with a scale for each output, "
        f"{held / 2**20:.1f} MiB instead of {wide / 2**20:.1f} MiB{off}"
    )


def _itemsize(graph: Graph, scale: str) -> int:
    spec = graph.param[scale].spec
    return spec.nbytes // spec.numel


@dataclass(frozen=True, repr=False)
class Plan(Shown):
    """A model, a cluster, and who does what when.

    Attributes:
        rows: of a micro-batch.
        trained: stages that have a backward pass.
        forecast: of one step, without its timeline (`timeline(plan)` simulates it again).
        in_flight: as in `schedule.build`; None is the schedule's own choice.
        search: what the partitioner "auto" tried; None for the others.
        compared: where replicas or tensor groups were left open, what was compared.
        rented: where devices were to be chosen, what plans on some of them take; its own first.
    """

    graph: Graph
    cluster: Cluster
    source: Source
    partitioner: str
    estimator: str
    schedule: str
    micro_batches: int
    rows: int
    seed: int
    placement: Placement
    stages: Stages
    trained: tuple[int, ...]
    programs: tuple[Program, ...]
    forecast: Forecast
    format: int = FORMAT
    in_flight: tuple[int, ...] | None = None
    search: Search | None = None
    compared: tuple[Compared, ...] = ()
    rented: tuple[Offer, ...] = ()

    @property
    def mode(self) -> Literal["train", "eval"]:
        """Return the purpose of the plan: training, or inference as `model.eval()` computes."""
        return "train" if self.graph.training else "eval"

    @cached_property
    def sharded(self) -> Sharded:
        """The graph that each rank of a tensor group runs; without groups, the graph itself."""
        tensor = self.placement.tensor
        if tensor is None:
            return Sharded((self.graph,), ())
        about = self.graph, tensor.axes, tensor.shares
        return sharded(*about, scatters=tensor.scatters, crossed=tensor.crossed)

    def graph_of(self, stage: Stage) -> Graph:
        """Return the graph that a stage's ops are of."""
        return self.sharded.members[stage.member]

    @property
    def said(self) -> Mapping[str, str]:
        """Return a sentence for each feature of stages besides computing their ops."""
        every = {
            "recompute": recompute_text(self.stages),
            "split": defer_text(self.stages),
            "offload": offload_text(self.stages, self.forecast, self.cluster),
            "asynchronous": asynchronous_text(self.stages),
            "compiled": compiled_text(self.stages),
            "quantised": quantised_text(self.graph, self.source),
            "replicas": replicas_text(self.stages),
        }
        return {feature: text for feature, text in every.items() if text}

    @cached_property
    def key(self) -> str:
        """A short hash of the plan; a process that runs another plan is refused."""
        return hashlib.sha256(to_json(self)).hexdigest()[:16]

    def __str__(self) -> str:
        """Show the plan as plain text, a line per device."""
        stages, devices = len(self.stages.stages), len(self.stages.devices)
        lines = [
            f"{self.graph.name}: {stages} stage{'s' * (stages != 1)} on {devices} "
            f"device{'s' * (devices != 1)}, "
            f"{self.schedule}, {micro_text(self.micro_batches)} of {self.rows} rows, "
            f"forecast {self.forecast.step_s:.3f} s a step"
        ]
        lines += [f"  {text}" for text in self.said.values()]
        for entry in self.forecast.devices:
            numbers = ", ".join(str(stage.index) for stage in self.stages.of(entry.device))
            peak = f"peak {entry.peak_bytes / 2**20:.0f} MiB"
            lines.append(f"  {entry.device}: stages {numbers}; busy {entry.busy_s:.3f} s; {peak}")
        return "\n".join(lines)


@lru_cache(maxsize=1)
def plan_adapter() -> TypeAdapter[Plan]:
    """Return what writes and reads plans, field by field."""
    return TypeAdapter(Plan)


def _left_out_of(cluster: Cluster) -> dict[str, Any]:
    """Return the fields of a cluster that plan.json leaves out, as none of them says anything."""
    found: dict[str, Any] = {
        name: True for name in ("stores", "prices", "zones") if not getattr(cluster, name)
    }
    links = (cluster.default_link, *(link for _, _, link in cluster.links))
    plain = {n for n in ("by_size", "usd_per_gb") if not any(getattr(link, n) for link in links)}
    return {**found, "default_link": plain, "links": {"__all__": {2: plain}}} if plain else found


_LEFT_OUT: Mapping[str, str] = {
    "source": "cache+positions quantize+quantize_error has_loss_weight+loss_count "
    "offsets divided has_micro marks optimizer_at_once optimizer",
    "stages": "asynchronous compiled shard_group offload+saves",
    "placement": "shard_group",
}
"""Fields that plan.json has where they, or one beside them, say something: others came later."""


def _silent(part: object, names: str) -> set[str]:
    """Return those of some fields that have their default, with all beside them."""
    first = {each.name: _default(each) for each in fields(part)}  # type: ignore[arg-type]
    groups = (group.split("+") for group in names.split())
    return {n for own in groups if all(getattr(part, f) == first[f] for f in own) for n in own}


def _default(entry: DataField[Any]) -> object:
    return entry.default if entry.default_factory is MISSING else entry.default_factory()


def to_json(plan: Plan) -> bytes:
    """Return the plan as JSON: the same bytes for the same plan."""
    left_out: dict[str, Any] = {
        part: dict.fromkeys(_silent(getattr(plan, part), names), True)
        for part, names in _LEFT_OUT.items()
    }
    left_out["cluster"] = _left_out_of(plan.cluster)
    if plan.placement.tensor is not None:
        of_groups = _silent(plan.placement.tensor, "scatters crossed")
        left_out["placement"]["tensor"] = of_groups
    moves = set() if plan.stages.offload else {"stored_bytes", "moved_s"}
    left_out["forecast"] = {"devices": {"__all__": {"held", *moves}}}
    if not plan.rented:
        left_out["rented"] = True
    if not any(entry.varies for entry in plan.graph.inputs):
        left_out["graph"] = {"inputs": {"__all__": {"varies"}}}
    return plan_adapter().dump_json(plan, indent=None, exclude=left_out) + b"\n"

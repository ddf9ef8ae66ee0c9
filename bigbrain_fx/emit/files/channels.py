"""The channels of a device file: a constant for each, named by the variable that it carries.

This module knows which messages a device sends and receives, and not when. The device of the last
stage collects the outputs of a model without a loss. It makes them, receives them for a stage of
its own, or receives them only to collect them (`cut.gathered`).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from bigbrain_fx.core import DeviceStore, Dim, Edge, Graph, Program, Stage, Stages, TensorSpec
from bigbrain_fx.emit.modules.classes import StageText
from bigbrain_fx.emit.modules.layout import WIDTH, wrapped
from bigbrain_fx.emit.modules.names import DeviceNames, Names, device_names, identifier
from bigbrain_fx.plan import PartChannel, may_be_ungiven

_LISTED = ("reduce", "gather", "across", "statistics")  # buckets.json has channels of these
_LEGEND = "# Messages: tag, kind, the value's name in plan.json; from where to where; one's form."


@dataclass(frozen=True)
class DeviceFile:
    """Contents of one device file, besides its classes."""

    graph: Graph
    stages: Stages
    program: Program
    schedule: str
    micro_batches: int
    rows: int
    title: str
    varies: bool = False  # micro-batches may have fewer rows than `rows`, or shorter ones
    own_module: str = ""  # the model file's module name: its functions are shipped in functions.py
    parts: tuple[PartChannel, ...] = ()  # between ranks of all groups
    norms: Mapping[str, TensorSpec] = field(default_factory=dict)  # by device: what it sends
    store: DeviceStore | None = None  # where it keeps what it offloads
    store_bytes: int = 0

    @property
    def members(self) -> tuple[str, ...]:
        """The devices of its group, in order; none, where it is in none."""
        if self.stages.members == 1:
            return ()
        own = self.stages.of(self.program.device)[0]
        return tuple(stage.device for stage in self.stages.group_of(own))

    @property
    def names(self) -> DeviceNames:
        """Return the names of this file and of its device's class."""
        return device_names(self.stages.devices)[self.program.device]


class Channels:
    """The channels that start or end at a device, each with a constant's name."""

    def __init__(self, file: DeviceFile, own: Mapping[int, StageText]) -> None:
        self.file = file
        self.own = own
        device = file.program.device
        at = {stage.index: stage.device for stage in file.stages.stages}
        edges = [e for e in file.stages.edges if device in (at[e.source], at[e.target])]
        self.edges = [edge for edge in edges if edge.kind not in _LISTED]
        self.has_buckets = len(self.edges) < len(edges)
        self.device_of = at
        self.hints = value_hints(own.values())
        self.ungiven = may_be_ungiven(file.graph)
        names = Names()
        self.names = {edge: names.fresh(self._base(edge)) for edge in self.edges}

    def lines(self) -> list[str]:
        """Return one constant per channel."""
        tags = {edge: tag for tag, edge in enumerate(self.file.stages.edges)}
        lines: list[str] = []
        for edge in self.edges:
            lines += self._constant(edge, tags[edge])
        lines += self._parts()
        if self.has_buckets:
            lines.append("# Sums of gradients over replicas: buckets.json says which channels.")
            lines.append(f"BUCKETS = bucket_channels(__file__, {self.file.program.device!r})")
        return [_LEGEND, *lines] if lines else ["# This device neither sends nor receives."]

    def all_names(self) -> list[str]:
        """Return what a class lists as its channels."""
        more = ["*PARTS"] if self.file.members else []
        return [*self.names.values(), *more, *(["*BUCKETS"] if self.has_buckets else [])]

    def _parts(self) -> list[str]:
        """Return the channels between this device and the other ranks of its group."""
        if not self.file.members:
            return []
        device, first = self.file.program.device, len(self.file.stages.edges)
        lines = [
            "# Exchanges of the tensor group's ranks: a channel for each size.",
            "PARTS = (",
        ]
        for tag, part in enumerate(self.file.parts, start=first):
            if device in (part.sender, part.receiver):
                what = repr(tag), repr("part"), repr(f"{part.numel} x {part.dtype}")
                ends = part.source, part.target, part.sender, part.receiver
                form = [*_form((part.numel,), part.dtype), f"per_step={part.per_step}"]
                lines += _channel("", [*what, *_ends(*ends)], form, 4)
        return [*lines, ")"]

    def _constant(self, edge: Edge, tag: int) -> list[str]:
        """Return `X_TO_1 = Channel(...)`: what goes from where to where, then its form."""
        shape, dtype, wants = self._spec(edge)
        ends = edge.source, edge.target, self.device_of[edge.source], self.device_of[edge.target]
        form = [*_form(shape, dtype), *["requires_grad=True"] * wants]
        form += ["varies=True"] * self._varies(edge)
        what = [repr(part) for part in (tag, edge.kind, edge.value)]
        return _channel(f"{self.names[edge]} = ", [*what, *_ends(*ends)], form, 0)

    def _varies(self, edge: Edge) -> bool:
        """Whether its messages have unequal shapes, or there may be nothing to send."""
        if edge.kind in ("gradient", "tied") and edge.value in self.ungiven:
            return True
        return self.file.varies and edge.kind in ("activation", "gradient")

    def _spec(self, edge: Edge) -> tuple[tuple[Dim, ...], str, bool]:
        """Return the shape and element type of a message, and whether its gradient comes back."""
        if edge.kind == "norm":
            spec = self.file.norms[self.device_of[edge.source]]
            return spec.shape, spec.dtype, False
        if edge.kind == "tied":
            spec = self.file.graph.param[edge.value].spec
            return spec.shape, spec.dtype, False
        spec = self.file.graph.op[edge.value].outputs[0].at(self.file.rows)
        if edge.kind == "loss":
            return (len(self.file.stages.micros_of(edge.source, 0)),), spec.dtype, False
        relayed = {e.value for e in self.file.stages.out_of(edge.target, "gradient")}
        wants = edge.kind == "activation" and edge.value in relayed
        return spec.shape, spec.dtype, wants

    def _base(self, edge: Edge) -> str:
        outward = self.device_of[edge.source] == self.file.program.device
        here, far = (edge.source, edge.target) if outward else (edge.target, edge.source)
        words = {"norm": "norms", "loss": "losses"}
        what = words.get(edge.kind) or self.hints.get(edge.value) or identifier(edge.value)
        what = f"{what}_grad" if edge.kind in ("gradient", "tied") else what
        where = f"to_{far}" if outward else f"from_{far}"
        several = len(self.own) > 1
        return f"{what}_{where}_at_{here}".upper() if several else f"{what}_{where}".upper()


def value_hints(own: Iterable[StageText]) -> dict[str, str]:
    """Return what these stages call the values that they receive and give."""
    hints: dict[str, str] = {}
    for text in own:
        hints.update({**text.arguments, **text.results})
    return hints


def _ends(source: int, target: int, sender: str, receiver: str) -> list[str]:
    return [f"source={source}", f"target={target}", f"sender={sender!r}", f"receiver={receiver!r}"]


def _form(shape: Sequence[Dim], dtype: str) -> list[str]:
    return [f"shape={tuple(shape)!r}", f"dtype=torch.{dtype}"]


def _channel(start: str, what: Sequence[str], form: Sequence[str], indent: int) -> list[str]:
    """Return a call on one line, or what it is on one and its form on the next."""
    pad, end = " " * indent, "" if start else ","
    rows = [f"{pad}    {', '.join(part)}," for part in (what, form)]
    whole = f"{pad}{start}Channel({', '.join((*what, *form))}){end}"
    if len(whole) <= WIDTH or any(len(row) > WIDTH for row in rows):
        return wrapped(whole.strip(), indent)
    return [f"{pad}{start}Channel(", *rows, f"{pad}){end}"]


def collected(graph: Graph, stages: Stages, stage: Stage) -> list[tuple[str, str]]:
    """Return (name, value) of the outputs that are collected when a stage has run.

    Each is collected once, at the first stage of the device that has it. Values that are received
    only to be collected, and entries of the batch, are collected at the last.
    """
    if graph.training or stage.device != stages.stages[-1].device:
        return []
    own = stages.of(stage.device)
    first = {value: s.index for s in reversed(own) for value in (*s.receives, *_made(s))}
    last = stages.stages[-1].index
    return [
        (name, value) for name, value in graph.output_names if first.get(value, last) == stage.index
    ]


def _made(stage: Stage) -> frozenset[str]:
    return frozenset(stage.ops) - frozenset(stage.recomputed)

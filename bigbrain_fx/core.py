"""The frozen types that travel along the road, and the two plug-in protocols.

This room imports no torch and nothing of ours: a plan can be read, compared and simulated on a
machine that has neither a model nor a GPU.

    Graph ──▶ Costs ──▶ Placement ──▶ Stages ──▶ Programs ──▶ Forecast        (together: a Plan)
"""

from __future__ import annotations

import ast
import math
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache
from typing import Literal, Protocol, TypeAlias, Union, runtime_checkable

from typing_extensions import TypeAliasType

# --------------------------------------------------------------------------- sizes

Dim: TypeAlias = int | str
"""One size: a number, or Python arithmetic over the batch size, such as "B" or "32*B"."""

DTYPE_BYTES: Mapping[str, int] = {
    **dict.fromkeys(("float64", "int64", "uint64", "complex64"), 8),
    **dict.fromkeys(("float32", "int32", "uint32"), 4),
    **dict.fromkeys(("float16", "bfloat16", "int16", "uint16"), 2),
    **dict.fromkeys(("int8", "uint8", "bool", "float8_e4m3fn", "float8_e5m2"), 1),
    "complex128": 16,
}


def size_of(dim: Dim, batch: int) -> int:
    """Return the number that `dim` stands for when the batch has `batch` rows."""
    return dim if isinstance(dim, int) else _evaluate(dim, batch)


@lru_cache(maxsize=65536)
def _evaluate(expression: str, batch: int) -> int:
    return _evaluate_node(ast.parse(expression, mode="eval").body, batch)


def _evaluate_node(node: ast.expr, batch: int) -> int:
    match node:
        case ast.Constant(value=int(value)):
            return value
        case ast.Name(id="B"):
            return batch
        case ast.UnaryOp(op=ast.USub(), operand=operand):
            return -_evaluate_node(operand, batch)
        case ast.BinOp(left=left, op=op, right=right):
            a, b = _evaluate_node(left, batch), _evaluate_node(right, batch)
            return _apply(op, a, b)
        case ast.Call(func=ast.Name(id="Max" | "Min" as name), args=args):
            values = [_evaluate_node(arg, batch) for arg in args]
            return max(values) if name == "Max" else min(values)
    raise ValueError(f"not a size: {ast.unparse(node)}")


def _apply(op: ast.operator, a: int, b: int) -> int:
    match op:
        case ast.Add():
            return a + b
        case ast.Sub():
            return a - b
        case ast.Mult():
            return a * b
        case ast.FloorDiv():
            return a // b
        case ast.Mod():
            return a % b
        case ast.Pow():
            return int(a**b)
    raise ValueError(f"not an operator of sizes: {type(op).__name__}")


# --------------------------------------------------------------------------- the graph


@dataclass(frozen=True, slots=True)
class TensorSpec:
    """Describe one tensor.

    Attributes:
        strides: in elements, like torch's.
        requires_grad: whether a gradient is wanted.
    """

    shape: tuple[Dim, ...]
    dtype: str
    strides: tuple[Dim, ...]
    requires_grad: bool = False

    @property
    def numel(self) -> int:
        """Number of elements; the spec must be concrete (`at`)."""
        return math.prod(int(dim) for dim in self.shape)

    @property
    def nbytes(self) -> int:
        """Bytes of a dense copy; the spec must be concrete (`at`)."""
        return self.numel * DTYPE_BYTES[self.dtype]

    def at(self, batch: int) -> TensorSpec:
        """Return this spec with every size a number, for a batch of `batch` rows."""
        shape = tuple(size_of(dim, batch) for dim in self.shape)
        strides = tuple(size_of(dim, batch) for dim in self.strides)
        return replace(self, shape=shape, strides=strides)

    def __str__(self) -> str:
        return f"{self.dtype}[{', '.join(str(dim) for dim in self.shape)}]"


@dataclass(frozen=True, slots=True)
class Ref:
    """An argument that is the output of an op, or a model input."""

    value: str


@dataclass(frozen=True, slots=True)
class ParamRef:
    """An argument that is a parameter, a buffer or a constant, by its name in the user's model."""

    param: str


@dataclass(frozen=True, slots=True)
class Const:
    """An argument that JSON has no word for.

    One of: "torch.float32" (dtypes, layouts and memory formats by their torch name), "device" (the
    stage's own device), "inf", "-inf", "nan".
    """

    const: str


Arg = TypeAliasType(  # a literal, a reference, or a list of arguments
    "Arg", Union[bool, int, float, str, Ref, ParamRef, Const, "tuple[Arg, ...]", None]
)


@dataclass(frozen=True, slots=True)
class ModuleCall:
    """One entry of an op's module stack: which call of which module the op belongs to.

    `path` is the module's name in the user's model ("" is the model itself), `type` its qualified
    class name, `call` tells several calls of one module apart (0, 1, ...).
    """

    path: str
    type: str
    call: int = 0


@dataclass(frozen=True, slots=True)
class Op:
    """One call in the graph; its name is also the name of its value.

    Attributes:
        target: `aten.linear.default`, `operator.getitem`, `operator.mul`, ...; a region kept whole
            is `region.no_grad`, `region.enable_grad` or `region.autocast` (args: the region's
            arguments, `body`: its ops); a user's custom function is `opaque.<qualified name>`.
        outputs: specs of its tensors, in order; empty for an op whose value is a number (a size).
        is_tuple: whether the value is a tuple or list (then `operator.getitem` ops take it apart).
        modules: the module calls it belongs to, outermost first.
        source: the user's line, "gpt.py:31"; empty when unknown.
        code: the text of that line, stripped; empty when unknown.
        random: draws random numbers (tagged nondeterministic_seeded).
        mutates: names of params or values that it writes into, in place.
        view_of: name of the value or param whose storage its output shares; None for a fresh one.
        flops: floating point operations of the forward call.
        reads_bytes: bytes of its tensor inputs. writes_bytes: bytes of its outputs (0 for a view).
    """

    name: str
    target: str
    args: tuple[Arg, ...]
    kwargs: tuple[tuple[str, Arg], ...] = ()
    outputs: tuple[TensorSpec, ...] = ()
    is_tuple: bool = False
    modules: tuple[ModuleCall, ...] = ()
    source: str = ""
    code: str = ""
    random: bool = False
    mutates: tuple[str, ...] = ()
    view_of: str | None = None
    flops: Dim = 0
    reads_bytes: Dim = 0
    writes_bytes: Dim = 0
    body: Graph | None = None

    @property
    def module_path(self) -> str:
        """Path of the innermost module the op belongs to."""
        return self.modules[-1].path if self.modules else ""

    @property
    def refs(self) -> tuple[str, ...]:
        """Names of the values (ops and inputs) it reads, in order, each once."""
        return tuple(
            dict.fromkeys(ref.value for ref in leaves(self._all_args()) if isinstance(ref, Ref))
        )

    @property
    def params(self) -> tuple[str, ...]:
        """Names of the parameters and buffers it reads, in order, each once; its body's too."""
        own = [ref.param for ref in leaves(self._all_args()) if isinstance(ref, ParamRef)]
        inner = [name for op in self.body.ops for name in op.params] if self.body else []
        return tuple(dict.fromkeys(own + inner))

    @property
    def requires_grad(self) -> bool:
        """Whether a gradient flows through it."""
        return any(spec.requires_grad for spec in self.outputs)

    def at(self, batch: int) -> Op:
        """Return this op with every size a number."""
        return replace(
            self,
            outputs=tuple(spec.at(batch) for spec in self.outputs),
            flops=size_of(self.flops, batch),
            reads_bytes=size_of(self.reads_bytes, batch),
            writes_bytes=size_of(self.writes_bytes, batch),
            body=self.body.at(batch) if self.body else None,
        )

    def _all_args(self) -> tuple[Arg, ...]:
        return (*self.args, *(value for _, value in self.kwargs))


def leaves(args: tuple[Arg, ...]) -> Iterator[Arg]:
    """Yield every argument that is no list, in order, through any nesting."""
    for arg in args:
        if isinstance(arg, tuple):
            yield from leaves(arg)
        else:
            yield arg


@dataclass(frozen=True, slots=True)
class Input:
    """One entry of the user's batch.

    `name` is its name in the graph; `key` is how to reach it in the batch: a path of dict keys and
    tuple positions. `batched` entries are split on dimension 0 into micro-batches, others are
    passed whole.
    """

    name: str
    key: tuple[str | int, ...]
    spec: TensorSpec
    batched: bool = True


@dataclass(frozen=True, slots=True)
class Param:
    """One parameter, buffer or constant of the model.

    `canonical` is the name under which `named_parameters()` lists it: tied names share one. `kind`
    is "parameter", "buffer" (in the state dict) or "constant" (a buffer outside the state dict, or
    a tensor made by the trace).
    """

    name: str
    spec: TensorSpec
    canonical: str
    kind: Literal["parameter", "buffer", "constant"] = "parameter"


@dataclass(frozen=True)
class Graph:
    """A model as a list of calls, in topological order.

    Sizes may be arithmetic over the batch ("B"); `at(rows)` gives the same graph in numbers.

    Attributes:
        outputs: names of the values the model returns, the loss left out.
        loss: name of the scalar to train on; None for inference.
        batch: rows of the example batch.
        static_batch: rows of the one micro-batch size for which the trace holds; None when any do.
        params: every parameter and buffer, in the order of the user's model.
        training: whether the model was traced in training mode.
        autocast: "bfloat16" when the whole step runs under torch.autocast.
    """

    name: str
    ops: tuple[Op, ...]
    inputs: tuple[Input, ...]
    params: tuple[Param, ...]
    outputs: tuple[str, ...]
    loss: str | None
    batch: int = 1
    static_batch: int | None = None
    training: bool = True
    autocast: str | None = None

    @cached_property
    def op(self) -> Mapping[str, Op]:
        """Op by name."""
        return {op.name: op for op in self.ops}

    @cached_property
    def param(self) -> Mapping[str, Param]:
        """Param by name."""
        return {param.name: param for param in self.params}

    @cached_property
    def input(self) -> Mapping[str, Input]:
        """Model input by name."""
        return {entry.name: entry for entry in self.inputs}

    @cached_property
    def consumers(self) -> Mapping[str, tuple[str, ...]]:
        """Names of the ops that read a value (an op or an input), in graph order."""
        found: dict[str, list[str]] = {name: [] for name in (*self.op, *self.input)}
        for op in self.ops:
            for ref in op.refs:
                found[ref].append(op.name)
        return {name: tuple(readers) for name, readers in found.items()}

    def at(self, batch: int) -> Graph:
        """Return the graph for a (micro-)batch of `batch` rows, every size a number."""
        return replace(
            self,
            ops=tuple(op.at(batch) for op in self.ops),
            inputs=tuple(replace(entry, spec=entry.spec.at(batch)) for entry in self.inputs),
            batch=batch,
        )

    def __str__(self) -> str:
        lines = [f"graph {self.name}: {len(self.ops)} ops, {len(self.params)} tensors"]
        for op in self.ops:
            specs = ", ".join(str(spec) for spec in op.outputs)
            lines.append(
                f"  {op.name} = {op.target}({', '.join(op.refs)}) -> {specs}  # {op.source}"
            )
        return "\n".join(lines)


# --------------------------------------------------------------------------- the cluster


@dataclass(frozen=True, slots=True)
class Device:
    """One device of the cluster; rates are what it sustains, not what its datasheet promises.

    `launch_s` is what starting one op costs; `threads` are CPU threads its process computes with.
    """

    name: str
    host: str
    kind: Literal["cpu", "cuda"]
    memory_bytes: int
    flops_per_s: float
    memory_bytes_per_s: float
    launch_s: float = 5e-6
    threads: int = 1


@dataclass(frozen=True, slots=True)
class Link:
    """A one-way connection: a message of n bytes takes latency_s + n / bytes_per_s."""

    latency_s: float
    bytes_per_s: float

    def transfer_s(self, nbytes: int) -> float:
        """Seconds for one message of `nbytes` bytes."""
        return self.latency_s + nbytes / self.bytes_per_s


@dataclass(frozen=True)
class Cluster:
    """The devices, in pipeline order unless a planner finds a better one, and their links."""

    devices: tuple[Device, ...]
    default_link: Link
    links: tuple[tuple[str, str, Link], ...] = ()

    @cached_property
    def device(self) -> Mapping[str, Device]:
        """Device by name."""
        return {device.name: device for device in self.devices}

    @cached_property
    def _link(self) -> Mapping[tuple[str, str], Link]:
        pairs = {}
        for a, b, link in self.links:
            pairs[a, b] = pairs[b, a] = link
        return pairs

    def link(self, a: str, b: str) -> Link:
        """Return the link between devices `a` and `b`; within one device moving data is free."""
        if a == b:
            return Link(0.0, float("inf"))
        return self._link.get((a, b), self.default_link)


# --------------------------------------------------------------------------- costs and plans


@dataclass(frozen=True, slots=True)
class OpCost:
    """What one op costs on one device, for one micro-batch.

    `backward_s` is the whole backward, `backward_input_s` the part that the previous stage waits
    for. `saved_bytes` stay from forward to backward; `workspace_bytes` are gone when the op is.
    """

    forward_s: float
    backward_s: float = 0.0
    backward_input_s: float = 0.0
    saved_bytes: int = 0
    workspace_bytes: int = 0


@dataclass(frozen=True)
class Costs:
    """What every op costs on every device, and what moving bytes costs.

    `ops[device][op]`; `optimizer_s_per_byte[device]` is per byte of parameters.
    """

    ops: Mapping[str, Mapping[str, OpCost]]
    cluster: Cluster
    optimizer_s_per_byte: Mapping[str, float]
    optimizer_state_per_byte: float = 2.0  # Adam keeps two moments

    def op_cost(self, op: str, device: str) -> OpCost:
        """Return the cost of the op named `op` on the device named `device`."""
        return self.ops[device][op]

    def transfer_s(self, nbytes: int, a: str, b: str) -> float:
        """Seconds to move `nbytes` bytes from device `a` to device `b`."""
        return self.cluster.link(a, b).transfer_s(nbytes)


@dataclass(frozen=True)
class Placement:
    """Which device runs which op: anything, contiguous pipelines and scattered ops alike."""

    device_of: Mapping[str, str]
    reason: str = ""


@dataclass(frozen=True, slots=True)
class Stage:
    """A set of ops that one device runs in one go, once a micro-batch.

    Attributes:
        ops: in execution order, cheap ones that other stages run too included.
        recomputed: those of `ops` that are copies: run here instead of received.
        params: parameters and buffers that its ops touch.
        inputs: model inputs that it takes from its device's own data loader.
        receives: values of earlier stages that it reads. sends: its values that later stages read.
    """

    index: int
    device: str
    ops: tuple[str, ...]
    recomputed: tuple[str, ...] = ()
    params: tuple[str, ...] = ()
    inputs: tuple[str, ...] = ()
    receives: tuple[str, ...] = ()
    sends: tuple[str, ...] = ()


EdgeKind: TypeAlias = Literal["activation", "gradient", "tied", "norm"]


@dataclass(frozen=True, slots=True)
class Edge:
    """One channel of messages from stage `source` to stage `target`, in a fixed order.

    Both ends on one device: no message, the tensor is handed over. The kinds:

    - "activation" goes to a later stage.
    - "gradient" goes back: from the last stage that reads the value to the one before it, and so on
      to the stage that made it (the relay).
    - "tied", once a step, carries stage `source`'s gradient of a parameter that stage `target`'s
      device holds too.
    - "norm", once a step, carries the norms of one device's gradients, for clipping.
    """

    value: str
    source: int
    target: int
    kind: EdgeKind
    nbytes: int = 0

    def __str__(self) -> str:
        return f"{self.kind} {self.value} {self.source}->{self.target}"


@dataclass(frozen=True)
class Stages:
    """The cut graph: stages in topological order, and everything that crosses between them.

    `moved` lists ops that run elsewhere than placed, because they must stay together with others.
    """

    stages: tuple[Stage, ...]
    edges: tuple[Edge, ...]
    moved: tuple[str, ...] = ()

    @cached_property
    def devices(self) -> tuple[str, ...]:
        """Names of the devices in use, in order of their first stage."""
        return tuple(dict.fromkeys(stage.device for stage in self.stages))

    @property
    def is_chain(self) -> bool:
        """Whether every device has exactly one stage."""
        return len(self.devices) == len(self.stages)

    def of(self, device: str) -> tuple[Stage, ...]:
        """Return the stages of one device, in order."""
        return tuple(stage for stage in self.stages if stage.device == device)

    def is_local(self, edge: Edge) -> bool:
        """Whether both ends of the edge are on one device."""
        return self.stages[edge.source].device == self.stages[edge.target].device

    def into(self, stage: int, kind: EdgeKind) -> tuple[Edge, ...]:
        """Return the edges of one kind that end at a stage, in the order they are received."""
        return self._into.get((stage, kind), ())

    def out_of(self, stage: int, kind: EdgeKind) -> tuple[Edge, ...]:
        """Return the edges of one kind that start at a stage, in the order they are sent."""
        return self._out_of.get((stage, kind), ())

    @cached_property
    def _into(self) -> Mapping[tuple[int, EdgeKind], tuple[Edge, ...]]:
        return _grouped((edge.target, edge) for edge in self.edges)

    @cached_property
    def _out_of(self) -> Mapping[tuple[int, EdgeKind], tuple[Edge, ...]]:
        return _grouped((edge.source, edge) for edge in self.edges)


def _grouped(ends: Iterable[tuple[int, Edge]]) -> Mapping[tuple[int, EdgeKind], tuple[Edge, ...]]:
    groups: dict[tuple[int, EdgeKind], list[Edge]] = {}
    for stage, edge in ends:
        groups.setdefault((stage, edge.kind), []).append(edge)
    return {key: tuple(group) for key, group in groups.items()}


# --------------------------------------------------------------------------- programs


@dataclass(frozen=True, slots=True)
class Forward:
    """Run the forward pass of a stage on one micro-batch."""

    stage: int
    micro: int
    do: Literal["forward"] = "forward"


@dataclass(frozen=True, slots=True)
class Backward:
    """Run a stage's backward pass on one micro-batch: gradients of its inputs and parameters."""

    stage: int
    micro: int
    do: Literal["backward"] = "backward"


@dataclass(frozen=True, slots=True)
class Send:
    """Start sending one message; `micro` is None for messages that go once a step."""

    edge: Edge
    micro: int | None
    do: Literal["send"] = "send"


@dataclass(frozen=True, slots=True)
class Recv:
    """Wait for one message; `micro` is None for messages that go once a step."""

    edge: Edge
    micro: int | None
    do: Literal["recv"] = "recv"


@dataclass(frozen=True, slots=True)
class OptimizerStep:
    """Sum tied gradients, clip, and update the device's parameters."""

    do: Literal["optimizer_step"] = "optimizer_step"


Instruction: TypeAlias = Forward | Backward | Send | Recv | OptimizerStep


@dataclass(frozen=True)
class Program:
    """What one device does in one step, in order; simulator and runtime execute the same list.

    Around each Forward stand the Recv of its activations and the Send of its results, around each
    Backward those of gradients; local edges (both ends on this device) have no instruction.
    """

    device: str
    instructions: tuple[Instruction, ...]


@dataclass(frozen=True, slots=True)
class Slice:
    """One bar of a timeline: `what` ran on `device` (or on a link "a->b") from start_s to end_s."""

    device: str
    what: str
    start_s: float
    end_s: float


@dataclass(frozen=True, slots=True)
class DeviceForecast:
    """What one device will do and hold in one step."""

    device: str
    busy_s: float
    idle_s: float
    peak_bytes: int
    weights_bytes: int
    gradients_bytes: int
    optimizer_bytes: int
    activations_bytes: int
    messages_bytes: int


@dataclass(frozen=True)
class Forecast:
    """What one step will take: seconds, and for each device time and memory."""

    step_s: float
    devices: tuple[DeviceForecast, ...]
    timeline: tuple[Slice, ...] = ()

    def of(self, device: str) -> DeviceForecast:
        """Return one device's forecast."""
        return next(entry for entry in self.devices if entry.device == device)


# --------------------------------------------------------------------------- plug-ins


@runtime_checkable
class Partitioner(Protocol):
    """Decide which device runs which op."""

    name: str

    def partition(self, graph: Graph, cluster: Cluster, costs: Costs) -> Placement:
        """Place every op of a concrete graph (`graph.at(rows)`).

        Raises:
            NoPlanError: nothing fits.
        """
        ...


@runtime_checkable
class Estimator(Protocol):
    """Say what each op costs on each device."""

    name: str

    def estimate(self, graph: Graph, cluster: Cluster) -> Costs:
        """Estimate every op of a concrete graph (`graph.at(rows)`) on every device."""
        ...

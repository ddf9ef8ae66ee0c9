"""The model as data: ops in topological order, their sizes and places in the source."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Literal

from bigbrain_fx.core.arguments import Arg, ParamRef, Ref, leaves
from bigbrain_fx.core.sizes import Dim, is_length, size_of
from bigbrain_fx.core.tensor_spec import TensorSpec

OPAQUE_STEP = "user.step"
"""Target of the op that is a whole training step of the user's own Python, see `frontend`."""
OPAQUE_MODULE = "leaf."
"""Begins the target of an op that calls an opaque module, before its path."""


@dataclass(frozen=True, slots=True)
class ModuleCall:
    """One entry of an op's module stack: which call of which module the op belongs to.

    `path` is the module's name in the user's model ("" is the model itself). `type` is its
    qualified class name, `call` tells several calls of one module apart (0, 1, ...).
    """

    path: str
    type: str
    call: int = 0


@dataclass(frozen=True, slots=True)
class CallArguments:
    """Arguments of a call of a module: (parameter of its `forward`, value), tensors only.

    `results` are the values that it returned, in order.
    """

    path: str
    call: int
    names: tuple[tuple[str, str], ...]
    results: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Saves:
    """Saved activations of one op, which capture measures with the CPU's kernels.

    Places are positions in `Op.refs`; -1 is the op's own result.

    Attributes:
        values: places of the tensors whose storage it keeps for its backward; parameters left out.
        own_bytes: what it keeps besides: masks, statistics, copies.
        forward_bytes: the most that its forward holds at once, its result and `own_bytes` included,
            what it reads not.
        backward_bytes: the most that its backward adds to what is kept and the gradients of its
            result; gradients of what it reads included.
        passed: places of the values whose gradient is the result's own, in the same storage.
        cuda_own_bytes: `own_bytes` on "cuda", by rule, where other kernels run there. Its forward
            and backward then hold no more than these, the result and the gradients.
        cuda_values: likewise `values`.
    """

    values: tuple[int, ...] = ()
    own_bytes: Dim = 0
    forward_bytes: Dim = 0
    backward_bytes: Dim = 0
    passed: tuple[int, ...] = ()
    cuda_own_bytes: Dim | None = None
    cuda_values: tuple[int, ...] | None = None

    def at(self, batch: int) -> Saves:
        """Return the same with every size a number."""
        cuda = self.cuda_own_bytes
        return replace(
            self,
            own_bytes=size_of(self.own_bytes, batch),
            forward_bytes=size_of(self.forward_bytes, batch),
            backward_bytes=size_of(self.backward_bytes, batch),
            cuda_own_bytes=None if cuda is None else size_of(cuda, batch),
        )


@dataclass(frozen=True)  # no slots: what it reads is asked for again and again, and remembered
class Op:
    """One call in the graph; its name is also the name of its value.

    Attributes:
        target: `aten.linear.default`, `operator.getitem`, `operator.mul`, ... An undivided region
            is `region.no_grad`, `region.enable_grad` or `region.autocast` (args: the region's
            arguments, `body`: its ops). A user's custom function is `opaque.<qualified name>`.
            `assume.true` and `assume.false` check their argument's truth and compute nothing.
        outputs: specs of its tensors, in order; empty for an op whose value is a number (a size).
        is_tuple: whether the value is a tuple or list (then `operator.getitem` ops take it apart).
        modules: the module calls it belongs to, outermost first.
        source: the user's line, "gpt.py:31"; empty when unknown.
        code: the text of that line, stripped; empty when unknown.
        lines: the user's lines that led here, outermost first; empty when unknown. One list is of
            calls outside of all modules, then follows one for each of `modules`.
        random: draws random numbers (tagged nondeterministic_seeded).
        mutates: names of params or values that it writes into, in place.
        view_of: name of the value or param whose storage its output shares; None for a fresh one.
        flops: floating point operations of the forward call.
        reads_bytes: bytes of its tensor inputs. writes_bytes: bytes of its outputs (0 for a view).
        saves: what it keeps for its backward; None when nobody has measured it.
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
    lines: tuple[tuple[str, ...], ...] = ()
    saves: Saves | None = None

    @property
    def module_path(self) -> str:
        """Path of the innermost module the op belongs to."""
        return self.modules[-1].path if self.modules else ""

    @property
    def storage_of(self) -> str | None:
        """The value whose storage its result is; None for one of its own.

        That of a view; and a tensor group's copies are what was there before, in their forward.
        """
        if self.view_of is not None or self.target != "shard.copy_to_group":
            return self.view_of
        return self.refs[0] if self.refs else self.params[0]

    @cached_property
    def refs(self) -> tuple[str, ...]:
        """Names of the values (ops and inputs) it reads, in order, each once."""
        return tuple(
            dict.fromkeys(ref.value for ref in leaves(self._all_args()) if isinstance(ref, Ref))
        )

    @cached_property
    def params(self) -> tuple[str, ...]:
        """Names of the parameters and buffers it reads, in order, each once; its body's too."""
        own = [ref.param for ref in leaves(self._all_args()) if isinstance(ref, ParamRef)]
        inner = [name for op in self.body.ops for name in op.params] if self.body else []
        return tuple(dict.fromkeys(own + inner))

    @property
    def state(self) -> tuple[str, ...]:
        """Plain attributes that a call of an opaque module goes by, as the call before left them.

        They stand behind what the call is given, and behind the attributes that it gives.
        """
        if not self.target.startswith(OPAQUE_MODULE):
            return ()
        match self.args[0]:
            case (_, (_, _, _, (_, names))):
                return tuple(map(str, names))  # type: ignore[arg-type]  # a nest of texts
        return ()

    @property
    def layer(self) -> str:
        """The numbered layer that it is in, "m.blocks.3" of "m.blocks.3.up"; "" of none."""
        parts = self.module_path.split(".")
        ends = (end for end, part in enumerate(parts, start=1) if part.isdigit())
        return ".".join(parts[: next(ends, 0)])

    @cached_property
    def checks(self) -> bool:
        """Whether it (or its body) checks an assumption, so that it runs though nobody reads it."""
        inner = self.body.ops if self.body else ()
        return self.target.startswith("assume.") or any(op.checks for op in inner)

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
            saves=self.saves.at(batch) if self.saves else None,
        )

    def _all_args(self) -> tuple[Arg, ...]:
        return (*self.args, *(value for _, value in self.kwargs))


@dataclass(frozen=True, slots=True)
class Input:
    """One entry of the user's batch.

    `name` is its name in the graph; `key` is how to reach it in the batch: a path of dict keys and
    tuple positions. `batched` entries are split on dimension 0 into micro-batches, others are
    passed whole. Each batch has another shape of those that `varies`: only an opaque loss reads
    them.
    """

    name: str
    key: tuple[str | int, ...]
    spec: TensorSpec
    batched: bool = True
    varies: bool = False


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

    @property
    def is_trained(self) -> bool:
        """Whether it is a parameter that wants a gradient."""
        return self.kind == "parameter" and self.spec.requires_grad


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
        arguments: what calls of the user's modules were given.
        statements: (line as in `Op.lines`, the statement there); hints for names, nothing more.
        output_names: (name, value) for each tensor that the model returns, the loss left out. The
            name joins its keys ("logits", "hidden_states.2"); a lone tensor is "output".
        rows_apart: whether no output's row depends on other rows of its batch, as far as a run of
            the model showed; asked of inference only.
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
    arguments: tuple[CallArguments, ...] = ()
    statements: tuple[tuple[str, str], ...] = ()
    output_names: tuple[tuple[str, str], ...] = ()
    rows_apart: bool = True

    @cached_property
    def op(self) -> Mapping[str, Op]:
        """Op by name."""
        return {op.name: op for op in self.ops}

    @cached_property
    def place(self) -> Mapping[str, int]:
        """Place of an op among all, by name."""
        return {op.name: place for place, op in enumerate(self.ops)}

    @cached_property
    def is_opaque_step(self) -> bool:
        """Whether it is one op: the user's own training step, not traced."""
        return any(op.target == OPAQUE_STEP for op in self.ops)

    @cached_property
    def param(self) -> Mapping[str, Param]:
        """Param by name."""
        return {param.name: param for param in self.params}

    @cached_property
    def trained(self) -> Mapping[str, Param]:
        """The trained parameters by canonical name, in order; tied names are one."""
        return {param.canonical: param for param in self.params if param.is_trained}

    @cached_property
    def input(self) -> Mapping[str, Input]:
        """Model input by name."""
        return {entry.name: entry for entry in self.inputs}

    @cached_property
    def lengths(self) -> Mapping[str, tuple[tuple[int, str], ...]]:
        """Model input -> (dimension, free length there), where batches may be of any length."""
        found = {
            entry.name: tuple((i, str(n)) for i, n in enumerate(entry.spec.shape) if is_length(n))
            for entry in self.inputs
        }
        return {name: free for name, free in found.items() if free}

    @cached_property
    def output_dims(self) -> Mapping[str, int | None]:
        """Dimension along which an output has the batch's rows, by its name.

        None where no size depends on the batch (a mean): it has one value a micro-batch.
        """
        return {name: self._batch_dim(self._spec(value)) for name, value in self.output_names}

    def _spec(self, value: str) -> TensorSpec:
        return self.input[value].spec if value in self.input else self.op[value].outputs[0]

    def _batch_dim(self, spec: TensorSpec) -> int | None:
        """A trace of fixed size has numbers only: the first dimension of as many rows is it."""
        fixed, dims = self.static_batch, enumerate(spec.shape)
        return next((i for i, n in dims if (n == fixed if fixed else isinstance(n, str))), None)

    @cached_property
    def graded(self) -> frozenset[str]:
        """Values and ops that the loss's gradient reaches; what others made is detached.

        Of a value that is written into, and of its views, all are reached when one of them is.
        """
        written = {name for op in self.ops for name in op.mutates}
        root: dict[str, str] = {}
        for op in self.ops:
            root[op.name] = root.get(op.view_of, op.view_of) if op.view_of else op.name

        def family(name: str) -> str:
            return root.get(name, name) if root.get(name, name) in written else name

        reached, found = {family(self.loss)} if self.loss else set(), set()
        for op in reversed(self.ops):
            if op.requires_grad and not reached.isdisjoint(map(family, (op.name, *op.mutates))):
                found.add(op.name)
                reached.update(family(ref) for ref in op.refs)
        return frozenset(found)

    @cached_property
    def consumers(self) -> Mapping[str, tuple[str, ...]]:
        """Names of the ops that read a value (an op or an input), in graph order."""
        found: dict[str, list[str]] = {name: [] for name in (*self.op, *self.input)}
        for op in self.ops:
            for ref in op.refs:
                found[ref].append(op.name)
        return {name: tuple(readers) for name, readers in found.items()}

    @cached_property
    def param_readers(self) -> Mapping[str, tuple[str, ...]]:
        """Names of the ops that read a parameter or buffer, in graph order."""
        found: dict[str, list[str]] = {param.name: [] for param in self.params}
        for op in self.ops:
            for name in op.params:
                found.setdefault(name, []).append(op.name)
        return {name: tuple(readers) for name, readers in found.items()}

    def at(self, batch: int) -> Graph:
        """Return the graph for a (micro-)batch of `batch` rows, every size a number."""
        if batch not in self._sized:
            self._sized[batch] = replace(
                self,
                ops=tuple(op.at(batch) for op in self.ops),
                inputs=tuple(replace(entry, spec=entry.spec.at(batch)) for entry in self.inputs),
                batch=batch,
            )
        return self._sized[batch]

    def of_batch(self, batch: int) -> Graph:
        """Return the graph for an example batch of so many rows; what was worked out is kept."""
        found = replace(self, batch=batch)
        kept = ("op", "place", "param", "input", "graded", "consumers")
        found.__dict__.update((name, self.__dict__[name]) for name in kept if name in self.__dict__)
        found.__dict__["_sized"] = self._sized  # of these rows, whatever the batch is
        return found

    @cached_property
    def _sized(self) -> dict[int, Graph]:
        """Results of `at`, by rows: planning asks for the same few sizes again and again."""
        return {}

    def __str__(self) -> str:
        lines = [f"graph {self.name}: {len(self.ops)} ops, {len(self.params)} tensors"]
        for op in self.ops:
            specs = ", ".join(str(spec) for spec in op.outputs)
            lines.append(
                f"  {op.name} = {op.target}({', '.join(op.refs)}) -> {specs}  # {op.source}"
            )
        return "\n".join(lines)


INT8_MOST = 127  # a weight in int8 is symmetric about zero


def quantised_weights(graph: Graph) -> tuple[str, ...]:
    """Return the buffers that are weights in int8: each has a buffer of scales beside it."""
    buffers = {p.name for p in graph.params if p.kind == "buffer"}
    return tuple(
        p.name
        for p in graph.params
        if p.kind == "buffer" and p.spec.dtype == "int8" and f"{p.name}_scale" in buffers
    )

"""Signatures of ops, read off the graph: ops of one signature take the same time.

This file knows graphs as data; it knows no times and no files.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass

from bigbrain_fx.core import Arg, Const, Graph, Op, ParamRef, Ref, TensorSpec

_LONGEST_LITERAL = 200  # a table of numbers written into a call says nothing beyond its start


@dataclass(frozen=True, slots=True)
class TensorArg:
    """One tensor argument, as far as it decides how long the op takes.

    Attributes:
        layout: "dense"; "permuted 0,2,1" (dense, its dimensions from the largest stride down);
            "expanded" (a stride of 0); "strided" (with gaps).
        wants_grad: whether the backward makes a gradient of it.
        is_parameter: whether it is a parameter of the model.
    """

    shape: tuple[int, ...]
    dtype: str
    layout: str = "dense"
    wants_grad: bool = False
    is_parameter: bool = False

    @property
    def numel(self) -> int:
        """Number of elements."""
        count = 1
        for size in self.shape:
            count *= size
        return count

    def __str__(self) -> str:
        marks = [self.layout] if self.layout != "dense" else []
        marks += ["parameter"] if self.is_parameter else []
        marks += ["grad"] if self.wants_grad else []
        return " ".join([f"{self.dtype}[{','.join(map(str, self.shape))}]", *marks])


@dataclass(frozen=True, slots=True)
class Signature:
    """Signature of an op: ops of one signature take the same time on the same machine.

    Attributes:
        target: as in `core.Op`.
        tensors: its tensor arguments in order, those in lists and keyword arguments too.
        literals: the call with tensors left out: "%" stands for one, "#" for a computed size.
        outputs: "float32[8, 512]" for each tensor it makes.
        mode: "" as usual; "no_grad" where nothing is recorded for a backward; "autocast bfloat16".
    """

    target: str
    tensors: tuple[TensorArg, ...]
    literals: str = ""
    outputs: tuple[str, ...] = ()
    mode: str = ""

    @property
    def key(self) -> str:
        """A stable text, equal for equal signatures only."""
        tensors = "; ".join(str(tensor) for tensor in self.tensors)
        mode = f" in {self.mode}" if self.mode else ""
        return f"{self.target}{self.literals} <- {tensors} -> {'; '.join(self.outputs)}{mode}"

    @property
    def wants_backward(self) -> bool:
        """Whether it has a backward at all."""
        return any(tensor.wants_grad for tensor in self.tensors)


def signature(graph: Graph, op: Op, outer: tuple[Graph, ...] = (), mode: str = "") -> Signature:
    """Return the signature of an op of a concrete graph (`graph.at(rows)`).

    Args:
        graph: what `op` stands in; the body of a region, for an op of a region.
        op: one of its ops.
        outer: the graphs around that body, innermost first.
        mode: of the region; the graph's own when left out.
    """
    graphs = (graph, *outer)
    mode = mode or mode_of(graph)
    backward = _has_backward(graphs, op, mode)
    found = tuple(_tensors(graphs, (op.args, tuple(v for _, v in op.kwargs)), backward))
    shown = [_shown(graphs, arg) for arg in op.args]
    shown += [f"{name}={_shown(graphs, value)}" for name, value in op.kwargs]
    return Signature(
        target=op.target,
        tensors=found,
        literals=f"({', '.join(shown)})",
        outputs=tuple(str(spec) for spec in op.outputs),
        mode=mode,
    )


def signatures(graph: Graph) -> Iterator[tuple[Op, Signature]]:
    """Yield every op of a concrete graph with its signature; a region's ops instead of itself."""
    yield from _signatures(graph, (), mode_of(graph))


def region_mode(op: Op, mode: str) -> str:
    """Return the mode of the body of a region that stands in `mode`."""
    if op.target == "region.no_grad":
        return "no_grad"
    if op.target == "region.autocast":
        options = dict(op.kwargs)
        dtype = options.get("dtype")
        on = options.get("enabled", True)
        name = dtype.const.removeprefix("torch.") if isinstance(dtype, Const) else "bfloat16"
        return f"autocast {name}" if on else ""
    return "" if mode == "no_grad" else mode


def mode_of(graph: Graph) -> str:
    """Return the mode in which the ops of a whole graph run."""
    return f"autocast {graph.autocast}" if graph.autocast else ""


def _signatures(
    graph: Graph, outer: tuple[Graph, ...], mode: str
) -> Iterator[tuple[Op, Signature]]:
    for op in graph.ops:
        if op.body is None:
            yield op, signature(graph, op, outer, mode)
        else:
            yield from _signatures(op.body, (graph, *outer), region_mode(op, mode))


def _has_backward(graphs: tuple[Graph, ...], op: Op, mode: str) -> bool:
    """Whether the loss's gradient goes through an op; in a region, whether its own backward may."""
    if not op.requires_grad or mode == "no_grad" or graphs[-1].loss is None:
        return False
    return len(graphs) > 1 or op.name in graphs[0].graded


def _tensors(graphs: tuple[Graph, ...], arg: Arg, backward: bool) -> Iterator[TensorArg]:
    match arg:
        case tuple():
            for item in arg:
                yield from _tensors(graphs, item, backward)
        case Ref(value):
            for spec in _value_specs(graphs[0], value):
                yield _tensor(spec, backward, is_parameter=False)
        case ParamRef(name):
            param = next((g.param[name] for g in graphs if name in g.param), None)
            if param is not None:
                yield _tensor(param.spec, backward, is_parameter=param.kind == "parameter")


def _tensor(spec: TensorSpec, backward: bool, is_parameter: bool) -> TensorArg:
    return TensorArg(
        shape=tuple(_number(dim) for dim in spec.shape),
        dtype=spec.dtype,
        layout=layout(spec),
        wants_grad=backward and spec.requires_grad,
        is_parameter=is_parameter,
    )


def _value_specs(graph: Graph, name: str) -> tuple[TensorSpec, ...]:
    """Return the tensors of a value; none for a size."""
    if name in graph.input:
        return (graph.input[name].spec,)
    return graph.op[name].outputs


def layout(spec: TensorSpec) -> str:
    """Return the class of a concrete tensor's strides; see `TensorArg.layout`."""
    sized = [(_number(stride), i) for i, stride in enumerate(spec.strides) if spec.shape[i] != 1]
    if any(stride == 0 for stride, _ in sized):
        return "expanded"
    order = [i for _, i in sorted(sized, key=lambda entry: (-entry[0], entry[1]))]
    expected = 1
    for i in reversed(order):
        if spec.strides[i] != expected:
            return "strided"
        expected *= _number(spec.shape[i])
    if order == sorted(order):
        return "dense"
    return f"permuted {','.join(map(str, order))}"


def _shown(graphs: tuple[Graph, ...], arg: Arg) -> str:
    match arg:
        case tuple():
            return f"[{', '.join(_shown(graphs, item) for item in arg)}]"
        case ParamRef():
            return "%"
        case Ref(value):
            return "%" if _value_specs(graphs[0], value) else "#"
        case Const(const):
            return const
    return json.dumps(arg)[:_LONGEST_LITERAL]


def _number(dim: int | str) -> int:
    assert isinstance(dim, int), f"expected graph.at(rows), found the size {dim}"
    return dim

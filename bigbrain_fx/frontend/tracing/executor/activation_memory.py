"""Saved activations and memory of kernels, op by op: each distinct call once, without numbers.

A call runs forward and backward on tensors without numbers, under `saved_tensors_hooks` and a count
of live bytes. It runs at two batch sizes: sizes are affine in the batch, so two points give the
formula. Calls that are equal up to names are measured once: a model of equal layers has few
distinct ones.

The module runs nothing of the user's own Python: custom functions, opaque modules and opaque losses
stay unknown.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field, replace
from typing import TypeAlias, cast

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

from bigbrain_fx.core import (
    Arg,
    Dim,
    Graph,
    Op,
    ParamRef,
    Ref,
    Saves,
    TensorSpec,
    leaves,
    plus,
    size_of,
    times,
)
from bigbrain_fx.frontend.tracing.executor.allocations import LiveBytes
from bigbrain_fx.frontend.tracing.executor.graph_executor import resolve, run_graph
from bigbrain_fx.frontend.translation import rules

ROWS = (2, 3)  # not 1: torch treats a dimension of one row as it treats no other
OWN = -1  # the place of an op's own result
_ATEN = ("aten.", "region.")
_CURVED = ("**", "//", "%", "Max", "Min")
_CHOOSES = ("scaled_dot_product_attention",)
"""Calls that look at the device to choose a kernel; they run on fake tensors, ten times dearer."""
_KEEPS = ("lstm",)
"""Calls whose kernel alone knows what it keeps (oneDNN's workspace): they run on real tensors."""
_Key: TypeAlias = tuple[object, ...]


@dataclass(frozen=True, slots=True)
class _FoundSaves:
    """Bytes held by one run of one call."""

    values: tuple[int, ...]
    own: int
    forward: int
    backward: int
    passed: tuple[int, ...]


def with_saves(graph: Graph) -> Graph:
    """Return the graph with `saves` on every op that runs alone; others keep None."""
    sizes = (graph.static_batch,) if graph.static_batch else ROWS
    fake = FakeTensorMode()
    with torch.random.fork_rng(devices=[]):
        benches = [_Bench(graph, rows, fake) for rows in sizes]
        known: dict[_Key, Saves | None] = {}
        ops = tuple(_measured(op, benches, known) for op in graph.ops)
    return replace(graph, ops=ops)


def _measured(op: Op, benches: Sequence[_Bench], known: dict[_Key, Saves | None]) -> Op:
    if not op.outputs or not op.target.startswith(_ATEN) or _is_curved(op, benches[0]):
        return op
    key = benches[0].key(op)
    if key not in known:
        known[key] = _saves(op, benches)
    return replace(op, saves=known[key])


def _saves(op: Op, benches: Sequence[_Bench]) -> Saves | None:
    found = [bench.run(op) for bench in benches]
    runs = [run for run in found if run is not None]
    if len(runs) < len(found) or any(run.values != runs[0].values for run in runs):
        return None
    rows = [bench.rows for bench in benches]
    measured = Saves(
        values=runs[0].values,
        own_bytes=_line(rows, [run.own for run in runs]),
        forward_bytes=_line(rows, [run.forward for run in runs]),
        backward_bytes=_line(rows, [run.backward for run in runs]),
        passed=tuple(place for place in runs[0].passed if place in runs[-1].passed),
    )
    return _with_cuda(op, measured, benches[0]) if op.requires_grad else measured


def _line(rows: Sequence[int], nbytes: Sequence[int]) -> Dim:
    """Return the line through one or two points, as text over the batch "B"."""
    if len(rows) == 1:
        return nbytes[0]
    slope = (nbytes[1] - nbytes[0]) // (rows[1] - rows[0])
    if slope <= 0:
        return max(nbytes)
    return plus(times(slope, "B"), nbytes[0] - slope * rows[0])


def _is_curved(op: Op, bench: _Bench) -> bool:
    """Whether a size of the call is no plain multiple of the batch."""
    specs = [*op.outputs, *(spec for ref in op.refs for spec in bench.specs.get(ref, ()))]
    dims = [dim for spec in specs for dim in (*spec.shape, *spec.strides)]
    return any(isinstance(dim, str) and any(sign in dim for sign in _CURVED) for dim in dims)


# --------------------------------------------------------------------------- other kernels

_ROWS_ON_CUDA = frozenset({"scaled_dot_product_attention", "rms_norm"})


def _with_cuda(op: Op, measured: Saves, bench: _Bench) -> Saves:
    """Add tensors that only CUDA's kernels save: by rule, from torch's derivatives.yaml.

    Fused attention saves its inputs, its result and a float per row, with dropout too. Fused RMS
    norm saves its input and a float per row; fused dropout a byte per element.
    """
    kind = rules.family(resolve(op.target)) if op.body is None else ""
    if kind == "dropout":
        return replace(measured, cuda_own_bytes=times(*op.outputs[0].shape), cuda_values=())
    if kind not in _ROWS_ON_CUDA:
        return measured
    places = tuple(i for i, ref in enumerate(op.refs) if bench.wants_gradient(ref))
    values = (OWN, *places) if kind != "rms_norm" else places
    return replace(measured, cuda_own_bytes=times(4, *op.outputs[0].shape[:-1]), cuda_values=values)


# --------------------------------------------------------------------------- one run


@dataclass
class _Bench:
    """A graph at one batch size, and the fake tensors that its calls are tried on."""

    graph: Graph
    rows: int
    fake: FakeTensorMode
    specs: dict[str, tuple[TensorSpec, ...]] = field(init=False)
    numbers: dict[str, object] = field(init=False)

    def __post_init__(self) -> None:
        self.specs = {entry.name: (entry.spec,) for entry in self.graph.inputs}
        self.specs |= {op.name: op.outputs for op in self.graph.ops}
        self.numbers = dict(numbers_of(self.graph, self.specs, self.rows))

    def wants_gradient(self, name: str) -> bool:
        """Whether a gradient flows through a value."""
        return any(spec.requires_grad for spec in self.specs.get(name, ()))

    def key(self, op: Op) -> _Key:
        """Return a key that is equal for calls that are the same up to names."""
        names: dict[str, int] = {}

        def plain(arg: Arg) -> object:
            match arg:
                case Ref(value):
                    known = self.numbers.get(value, self.specs.get(value))
                    return "value", names.setdefault(value, len(names)), known
                case ParamRef(param):
                    return "param", names.setdefault(param, len(names)), self._param(param)
                case tuple():
                    return tuple(plain(item) for item in arg)
            return type(arg), arg

        body = tuple((o.name, o.target, o.args, o.kwargs) for o in op.body.ops) if op.body else ()
        return op.target, plain(op.args), plain(tuple(v for _, v in op.kwargs)), op.kwargs, body

    def run(self, op: Op) -> _FoundSaves | None:
        """Run a call forward and, where a gradient flows, backward; None where it cannot be."""
        try:
            with self._mode(op), torch.set_grad_enabled(self.graph.training):
                return self._run(op)
        except Exception:  # a kernel without shapes, a value that a call reads: stays unknown
            return None

    def _mode(self, op: Op) -> AbstractContextManager[object]:
        if any(f"aten.{name}." in op.target for name in _KEEPS):
            return torch.device("cpu")
        chooses = any(f"aten.{name}." in op.target for name in _CHOOSES)
        return self.fake if chooses or op.body is not None else torch.device("meta")

    def _run(self, op: Op) -> _FoundSaves:
        values = {ref: self._value(ref, bool(op.mutates)) for ref in op.refs}
        params = {name: blank(self._param(name), self.rows) for name in op.params}
        given = [t for t in (*values.values(), *params.values()) if isinstance(t, Tensor)]
        alone = replace(self.graph, ops=(op,), inputs=())
        live, saved = LiveBytes(), dict[int, int]()
        live.ignore(given)

        def keep(tensor: Tensor) -> Tensor:
            storage = tensor.untyped_storage()
            saved[storage._cdata] = storage.nbytes()
            return tensor.detach()

        hooks = torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor)
        with live, hooks:
            result = run_graph(
                alone,
                params,
                cast("Mapping[str, Tensor]", values),
                values=(op.name,),
                device=torch.empty(0).device,
            )[op.name]
        places = {_storage(values[ref]): i for i, ref in enumerate(op.refs)}
        made = [t for t in _tensors(result) if _storage(t) not in places]
        places |= dict.fromkeys(map(_storage, made), OWN)
        known = {*places, *map(_storage, params.values())}
        kept = tuple(sorted({places[s] for s in saved if s in places}))
        own = sum(nbytes for storage, nbytes in saved.items() if storage not in known)
        forward = live.peak
        backward, passed = self._backward(op, _tensors(result), values, params, live)
        return _FoundSaves(kept, own, forward, backward, passed)

    def _backward(
        self,
        op: Op,
        results: Sequence[Tensor],
        values: Mapping[str, object],
        params: Mapping[str, Tensor],
        live: LiveBytes,
    ) -> tuple[int, tuple[int, ...]]:
        roots = [t for t in results if t.requires_grad]
        wanted = [(i, values[ref]) for i, ref in enumerate(op.refs)]
        inputs = [(i, t) for i, t in wanted if isinstance(t, Tensor) and t.requires_grad]
        weights = [t for t in params.values() if t.requires_grad]
        if not roots or not (inputs or weights):
            return 0, ()
        seeds = [torch.empty_like(t) for t in roots]
        live.ignore(seeds)
        before = live.reset_peak()
        tensors = [*(t for _, t in inputs), *weights]
        with live:
            found: tuple[Tensor | None, ...] = torch.autograd.grad(
                roots, tensors, seeds, allow_unused=True
            )
        handed = set(map(_storage, seeds))
        gradients = zip(inputs, found, strict=False)
        passed = (i for (i, _), g in gradients if g is None or _storage(g) in handed)
        return live.peak - before, tuple(passed)

    def _value(self, name: str, is_written: bool) -> object:
        if name in self.numbers:
            return self.numbers[name]
        (spec,) = self.specs[name]
        made = blank(spec, self.rows)
        return made.clone() if is_written else made  # a leaf that wants a gradient is not written

    def _param(self, name: str) -> TensorSpec:
        param = self.graph.param[name]
        wants = param.spec.requires_grad and param.kind == "parameter"
        return replace(param.spec, requires_grad=wants)


def blank(spec: TensorSpec, rows: int) -> Tensor:
    """Make a tensor like `spec`; inside a FakeTensorMode it has no numbers."""
    spec = spec.at(rows)
    shape, strides = cast("tuple[int, ...]", spec.shape), cast("tuple[int, ...]", spec.strides)
    made = torch.empty_strided(shape, strides, dtype=getattr(torch, spec.dtype))
    return made.requires_grad_(spec.requires_grad)


def _storage(value: object) -> int:
    return value.untyped_storage()._cdata if isinstance(value, Tensor) else 0


def _tensors(result: object) -> list[Tensor]:
    found = result if isinstance(result, list | tuple) else [result]
    return [item for item in found if isinstance(item, Tensor)]


def numbers_of(
    graph: Graph, specs: Mapping[str, tuple[TensorSpec, ...]], rows: int
) -> Iterator[tuple[str, object]]:
    """Yield the values that are numbers: sizes, and values computed from sizes."""
    known: dict[str, object] = {}
    for op in graph.ops:
        number = _number(op, known, specs, rows)
        if number is not None:
            known[op.name] = number
            yield op.name, number


def _number(
    op: Op, known: Mapping[str, object], specs: Mapping[str, tuple[TensorSpec, ...]], rows: int
) -> object:
    if op.target == "aten.sym_size.int":
        source, dim = op.args
        if not isinstance(source, Ref) or not isinstance(dim, int) or not specs.get(source.value):
            return None
        return size_of(specs[source.value][0].shape[dim], rows)
    if op.outputs or op.body is not None or not op.target.startswith(("operator.", "math.")):
        return None
    args = [known.get(arg.value) if isinstance(arg, Ref) else arg for arg in op.args]
    if any(not isinstance(arg, int | float) for arg in leaves(tuple(cast("list[Arg]", args)))):
        return None
    return resolve(op.target)(*args)

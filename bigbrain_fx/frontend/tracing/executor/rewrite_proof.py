"""Rewritten graphs: how their tensors lie, and whether a rewritten place computes the same.

    laid_out   ops that were put in, and what reads their results, run without numbers
    prove      one place both ways, forward and backward, on random numbers

It knows graphs; it knows nothing of how a place is found or what it gains.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import cast

import torch
from pydantic import TypeAdapter
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

from bigbrain_fx.core import Dim, Graph, Op, RewriteProof, RewriteTrial, TensorSpec, plus, times
from bigbrain_fx.errors import CaptureError
from bigbrain_fx.frontend.tracing.executor.activation_memory import (
    ROWS,
    blank,
    numbers_of,
    with_saves,
)
from bigbrain_fx.frontend.tracing.executor.graph_executor import Interpreter, autocast, run_graph
from bigbrain_fx.frontend.tracing.executor.shard_rule_trial import in_float64, widened

_ALLOWED = {"float64": 1e-12, "float32": 1e-5}
"""How far apart two ways may be, of the largest number."""
_HALF = 2e-2  # in sixteen bits: what is no rounding, float64 finds
_SEED = 11

Tensors = Mapping[str, Tensor]


# --------------------------------------------------------------------------- how tensors lie


def laid_out(graph: Graph, fresh: Collection[str]) -> Graph:
    """Return a graph whose ops say how their results lie, and what autograd keeps.

    Args:
        graph: with ops of which that is not known yet.
        fresh: their names.

    Raises:
        CaptureError: an op does not go with what it reads now, or gives another shape or type.
    """
    sizes = (graph.static_batch,) if graph.static_batch else ROWS
    runs = [_Run(graph, rows) for rows in sizes]
    touched, ops = set(fresh), []
    for op in graph.ops:
        if op.name in touched or touched.intersection(op.refs):
            made = replace(op, outputs=_laid(op, runs))
            if op.name in fresh or made.outputs != op.outputs:
                touched.add(op.name)
            ops.append(made)
        else:
            ops.append(op)
    return with_saves(replace(graph, ops=tuple(ops)))


@dataclass
class _Run:
    """A graph at one batch size, of which some ops are run on tensors without numbers."""

    graph: Graph
    rows: int
    env: dict[str, object] = field(default_factory=dict)

    def __post_init__(self) -> None:
        specs = {entry.name: (entry.spec,) for entry in self.graph.inputs}
        self.specs = specs | {op.name: op.outputs for op in self.graph.ops}
        self.numbers = dict(numbers_of(self.graph, self.specs, self.rows))
        self.mode = FakeTensorMode(allow_non_fake_inputs=True)
        self.machine = Interpreter({}, self._param, {}, torch.device("cpu"), None)

    def results(self, op: Op) -> list[Tensor]:
        """Run one op; keep what it gives for those that read it."""
        cpu = torch.device("cpu")
        with self.mode, torch.no_grad(), autocast(self.graph.autocast, cpu, casts_once=False):
            given = {name: self._value(name) for name in op.refs}
            result = self.machine.call(op, given, op.name)
        self.env[op.name] = result
        found = result if isinstance(result, list | tuple) else [result]
        return [each for each in found if isinstance(each, Tensor)]

    def _value(self, name: str) -> object:
        if name in self.env:
            return self.env[name]
        if name in self.numbers:
            return self.numbers[name]
        made = [blank(replace(spec, requires_grad=False), self.rows) for spec in self.specs[name]]
        is_tuple = name in self.graph.op and self.graph.op[name].is_tuple
        return made if is_tuple else made[0]

    def _param(self, name: str, _op: str) -> Tensor:
        return blank(replace(self.graph.param[name].spec, requires_grad=False), self.rows)


def _laid(op: Op, runs: Sequence[_Run]) -> tuple[TensorSpec, ...]:
    """Return the specs of what an op gives, strides as they are where it is run.

    Raises:
        CaptureError: it cannot be run so, or gives something else.
    """
    if not op.target.startswith(("aten.", "operator.", "region.")):
        raise CaptureError(
            f"{op.target}, no op of torch, would get a tensor that lies otherwise", code="BX2143"
        )
    try:
        found = [run.results(op) for run in runs]
    except Exception as error:  # whatever an op raises of tensors that lie otherwise
        first = (str(error).splitlines() or [""])[0]
        raise CaptureError(
            f"{op.name} ({op.target}) fails on it: {first[:160]}", code="BX2144"
        ) from error
    return tuple(_spec(op, i, spec, runs, found) for i, spec in enumerate(op.outputs))


def _spec(
    op: Op, index: int, spec: TensorSpec, runs: Sequence[_Run], found: Sequence[Sequence[Tensor]]
) -> TensorSpec:
    made = [results[index] for results in found]
    for run, tensor in zip(runs, made, strict=True):
        known = spec.at(run.rows)
        if tuple(tensor.shape) != known.shape or str(tensor.dtype) != f"torch.{spec.dtype}":
            raise CaptureError(
                f"{op.name} would be {tuple(tensor.shape)} of {tensor.dtype}", code="BX2145"
            )
    rows = [run.rows for run in runs]
    known_at = list(zip(*(spec.at(n).strides for n in rows), strict=True))
    laid = tuple(
        old if new == was else _line(rows, new)
        for old, was, new in zip(spec.strides, known_at, _strides(made), strict=True)
    )
    return replace(spec, strides=laid)


def _strides(made: Sequence[Tensor]) -> Iterator[tuple[int, ...]]:
    """Yield the strides of each dimension, of every run."""
    yield from zip(*(tensor.stride() for tensor in made), strict=True)


def _line(rows: Sequence[int], sizes: Sequence[int]) -> Dim:
    """Return the line through one or two points, as text over the batch "B"."""
    if len(rows) == 1 or sizes[0] == sizes[1]:
        return sizes[0]
    slope = (sizes[1] - sizes[0]) // (rows[1] - rows[0])
    return plus(times(slope, "B"), sizes[0] - slope * rows[0])


# --------------------------------------------------------------------------- proof by running


def prove(trial: RewriteTrial) -> RewriteProof:
    """Run a place both ways, in its own types and in float64; say how far they are apart."""
    try:
        want, have = _both(trial)
        with in_float64():
            exact = _both(RewriteTrial(widened(trial.before), widened(trial.after)))
    except (RuntimeError, ValueError, IndexError, TypeError) as error:
        return RewriteProof(1.0, False, str(error).splitlines()[0])
    if not all(bool(t.isfinite().any()) for t in want.values() if t.numel()):
        return RewriteProof(1.0, False, "it makes no numbers to compare")
    rounding = _HALF if trial.before.autocast else None
    for problem in (*_unlike(want, have, rounding), *_unlike(*exact)):
        return RewriteProof(1.0, False, problem)
    apart = max((_apart(t, have[name]) for name, t in want.items()), default=0.0)
    same = all(torch.equal(t, have[name]) for name, t in want.items())
    return RewriteProof(apart, same)


def _both(trial: RewriteTrial) -> tuple[Tensors, Tensors]:
    return _run(trial.before, trial.before), _run(trial.after, trial.before)


def laid_file(path: Path) -> str | None:
    """Lay out the graph that a file has, in the same file; return why it cannot be, or None."""
    adapter = TypeAdapter(tuple[Graph, tuple[str, ...]])
    graph, fresh = adapter.validate_json(path.read_bytes())
    try:
        path.write_bytes(adapter.dump_json((laid_out(graph, fresh), fresh)))
    except CaptureError as error:
        return error.what
    return None


def proofs(path: Path) -> list[RewriteProof]:
    """Run the trials that a file has."""
    trials = TypeAdapter(tuple[RewriteTrial, ...]).validate_json(path.read_bytes())
    return [prove(trial) for trial in trials]


def _run(graph: Graph, like: Graph) -> dict[str, Tensor]:
    """Run a graph forward and backward on numbers that are the same for graphs like this one."""
    dice = torch.Generator().manual_seed(_SEED)
    inputs = {e.name: _filled(e.spec, dice, like.training) for e in like.inputs}
    tensors = {p.name: _filled(p.spec, dice, like.training) for p in like.params}
    for param in like.params:
        if param.kind != "parameter" and tensors[param.name].is_floating_point():
            tensors[param.name] = tensors[param.name].abs() + 0.5  # variances
    with torch.set_grad_enabled(like.training):
        values = cast("dict[str, Tensor]", run_graph(graph, tensors, inputs))
    found = {f"result {name}": value.detach() for name, value in values.items()}
    wanted = {n: t for n, t in (*inputs.items(), *tensors.items()) if t.requires_grad}
    ends = [value for _, value in sorted(values.items()) if value.requires_grad]
    if wanted and ends:
        seeds = [torch.randn(t.shape, generator=dice, dtype=t.dtype) for t in ends]
        gradients = torch.autograd.grad(ends, list(wanted.values()), seeds)
        found |= {f"gradient of {n}": g for n, g in zip(wanted, gradients, strict=True)}
    return found


def _filled(spec: TensorSpec, dice: torch.Generator, trains: bool) -> Tensor:
    shape, dtype = [int(n) for n in spec.shape], getattr(torch, spec.dtype)
    if not dtype.is_floating_point:
        return torch.randint(2, shape, generator=dice).to(dtype)
    made = torch.empty_strided(shape, [int(n) for n in spec.strides], dtype=dtype)
    made.copy_(torch.randn(shape, generator=dice, dtype=torch.float64))
    return made.requires_grad_(spec.requires_grad and trains)


def _unlike(want: Tensors, have: Tensors, limit: float | None = None) -> Iterator[str]:
    for name, tensor in want.items():
        dtype = str(tensor.dtype).removeprefix("torch.")
        allowed = limit or _ALLOWED.get(dtype, _HALF)
        apart = _apart(tensor, have[name])
        if not apart <= allowed:
            yield f"{name} differs by {apart:.1e} of the largest, {allowed:g} is allowed ({dtype})"


def _apart(want: Tensor, have: Tensor) -> float:
    if want.shape != have.shape or want.dtype != have.dtype:
        return float("inf")
    if not want.numel() or torch.equal(want, have):
        return 0.0
    a, b = want.double(), have.double()
    return float((a - b).abs().max() / a.abs().max().clamp_min(1e-300))

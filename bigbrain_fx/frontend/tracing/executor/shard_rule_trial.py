"""Trial of a shard rule: one op unsplit and in shards, forward and backward, in random float64.

A wrong rule is not rounding: results, gradients and written buffers must agree within 1e-12 of the
largest. In its own types a part is run as well: torch has other kernels there, and picks some by
width. The module knows graphs and shards, not rules.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import cast

import torch
from pydantic import TypeAdapter
from torch import Tensor

from bigbrain_fx.core import (
    Arg,
    Const,
    Graph,
    Op,
    ParamRef,
    Ref,
    RuleTrial,
    Shard,
    Sharded,
    TensorSpec,
    memory_order,
)
from bigbrain_fx.frontend.tracing.executor.graph_executor import run_graph
from bigbrain_fx.frontend.tracing.executor.tensor_parallel import run_members, taken

_ALLOWED = 1e-12  # of the largest number
_SEED = 7
_FLOATS = ("float32", "bfloat16", "float16")
_NOTHING = "it makes no numbers to compare"
_OTHERS = 4  # integers that no table is asked for stay below this

Tensors = Mapping[str, Tensor]


@dataclass(frozen=True)
class TrialTensors:
    """Numbers for one run: the tensors of the model and the batch, and the incoming gradients."""

    tensors: Tensors
    inputs: Tensors


@dataclass(frozen=True)
class Made:
    """Results of a run: values, gradients of tensors and of inputs, and buffers after it."""

    values: Tensors
    gradients: Tensors
    buffers: Tensors


def widened(graph: Graph) -> Graph:
    """Return a graph that computes in float64: types that are named in arguments, too."""
    return replace(
        graph,
        ops=tuple(map(_wide, graph.ops)),
        params=tuple(replace(p, spec=_wide_spec(p.spec)) for p in graph.params),
        inputs=tuple(replace(e, spec=_wide_spec(e.spec)) for e in graph.inputs),
    )


@contextmanager
def in_float64(exact: bool = True) -> Iterator[None]:
    """Let new tensors without a given type be float64, as others of a widened graph are."""
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64 if exact else before)
    try:
        yield
    finally:
        torch.set_default_dtype(before)


def try_rule(trial: RuleTrial) -> str | None:
    """Return how the TP ranks' results differ from the unsplit op's; None if they agree.

    An op without a result for some of the drawn numbers, such as a logarithm, is tried on positive
    ones.
    """
    trial = _at_small_sizes(trial)
    given = _given(trial.whole)
    problem = _tried(trial, given)
    return _tried(trial, _positive(given)) if problem == _NOTHING else problem


def _tried(trial: RuleTrial, given: TrialTensors) -> str | None:
    try:
        with in_float64():
            want = _whole(trial.whole, given)
            found = _members(trial.sharded, given)
        other = _other_type(trial, given) if trial.whole.autocast else None
    except (RuntimeError, ValueError, IndexError, TypeError) as error:
        return str(error).splitlines()[0]
    if other is not None:
        return other
    if not all(_says_something(value) for value in want.values.values()):
        return _NOTHING
    for member, made in enumerate(found):
        own = {s.param: s for s in trial.sharded.shards if s.member == member}
        for problem in _unlike(want, made, own):
            return f"{problem} on TP rank {member}"
    return None


def failed_rules(path: Path) -> list[str | None]:
    """Run the trials that a file has; say of each why it failed."""
    trials = TypeAdapter(tuple[RuleTrial, ...]).validate_json(path.read_bytes())
    failed = []
    for number, trial in enumerate(trials):
        trial_note(path).write_text(str(number))  # a kernel may end this process
        tried = _at_small_sizes(trial)
        failed.append(try_rule(tried) or _fails_in_own_types(tried))
    return failed


def _at_small_sizes(trial: RuleTrial) -> RuleTrial:
    """Return a trial at its smaller sizes, where the op's results there have the expected sizes."""
    if trial.reduced is None:
        return trial
    whole, sharded = trial.reduced
    is_same = _makes_its_sizes(whole)
    return replace(trial, whole=whole, sharded=sharded, reduced=None) if is_same else trial


def _makes_its_sizes(graph: Graph) -> bool:
    with suppress(RuntimeError, ValueError, IndexError, TypeError), in_float64():
        values = _whole(graph, _given(graph)).values
        want = [tuple(map(int, graph.op[name].outputs[0].shape)) for name in graph.outputs]
        return [tuple(value.shape) for value in values.values()] == want
    return False


def trial_note(path: Path) -> Path:
    """Return the file that names the running trial of a file of trials."""
    return path.with_suffix(".number")


def _fails_in_own_types(trial: RuleTrial) -> str | None:
    """Run the ranks' ops forward and backward; return why they fail where the unsplit op runs.

    Results are not compared: they are rounded.
    """
    given = _narrow(trial.whole, _given(trial.whole))
    try:
        leaves, inputs = _of_members(trial.sharded, given)
        values = run_members(trial.sharded.members, leaves, list(map(_cloned, inputs)), key=_keyed)
        _made(trial.sharded.members, values, leaves, inputs)
    except (RuntimeError, ValueError, IndexError, TypeError) as error:
        return str(error).splitlines()[0] if _runs_whole(trial.whole, given) else None
    return None


def _runs_whole(graph: Graph, given: TrialTensors) -> bool:
    leaves, inputs = _leaves(graph, given.tensors), _leaves(graph, given.inputs)
    with suppress(RuntimeError, ValueError, IndexError, TypeError), torch.enable_grad():
        values = run_graph(graph, leaves, _cloned(inputs), key=_keyed)
        _made([graph], [values], [leaves], [inputs])
        return True
    return False


def _whole(graph: Graph, given: TrialTensors) -> Made:
    leaves = _leaves(graph, given.tensors)
    inputs = _leaves(graph, given.inputs)
    with torch.enable_grad():
        values = run_graph(widened(graph), leaves, _cloned(inputs), key=_keyed)
    return _made([graph], [values], [leaves], [inputs])[0]


def _members(sharded: Sharded, given: TrialTensors) -> list[Made]:
    graphs = sharded.members
    leaves, inputs = _of_members(sharded, given)
    wide = [widened(graph) for graph in graphs]
    batches = [_cloned(each) for each in inputs]
    values = run_members(wide, leaves, batches, key=_keyed)
    return _made(graphs, values, leaves, inputs)


def _of_members(
    sharded: Sharded, given: TrialTensors
) -> tuple[list[dict[str, Tensor]], list[dict[str, Tensor]]]:
    """Return each rank's tensors of the model, and of the batch."""
    leaves, inputs = [], []
    for member, graph in enumerate(sharded.members):
        own = {shard.param: shard for shard in sharded.shards if shard.member == member}
        mine = {n: taken(t, own[n]) if n in own else t for n, t in given.tensors.items()}
        leaves.append(_leaves(graph, mine))
        inputs.append(_leaves(graph, given.inputs))
    return leaves, inputs


def _other_type(trial: RuleTrial, given: TrialTensors) -> str | None:
    """Run forward under autocast; name a value of another type than planned for messages."""
    graph = trial.sharded.members[0]
    leaves, inputs = _of_members(trial.sharded, _narrow(trial.whole, given))
    made = {op.name: op.outputs[0].dtype for op in graph.ops if op.outputs and not op.is_tuple}
    (values, *_) = run_members(
        trial.sharded.members, leaves, list(map(_cloned, inputs)), key=_keyed, values=made
    )
    for name, planned in made.items():
        found = str(cast("Tensor", values[name]).dtype).removeprefix("torch.")
        if found != planned:
            return f"{name} is {found} under autocast, expected {planned}"
    return None


def _narrow(graph: Graph, given: TrialTensors) -> TrialTensors:
    """Return the tensors in the types that the model has."""
    tensors = {n: t.to(getattr(torch, graph.param[n].spec.dtype)) for n, t in given.tensors.items()}
    inputs = {n: t.to(getattr(torch, graph.input[n].spec.dtype)) for n, t in given.inputs.items()}
    return TrialTensors(tensors, inputs)


def _made(
    graphs: Sequence[Graph],
    values: Sequence[Mapping[str, object]],
    leaves: Sequence[Tensors],
    inputs: Sequence[Tensors],
) -> list[Made]:
    """Take the gradients of all ranks at once, from the same random ones of each result."""
    outs = [dict(zip(_names(graphs[0]), _tensors(v), strict=True)) for v in values]
    graded = [{n: t for n, t in own.items() if t.requires_grad} for own in outs]
    dice = torch.Generator().manual_seed(_SEED)
    into = {n: _random(t, dice) for n, t in graded[0].items()}
    wanted = [
        {n: t for n, t in (*own.items(), *batch.items()) if t.requires_grad}
        for own, batch in zip(leaves, inputs, strict=True)
    ]
    flat = [t for own in wanted for t in own.values()]
    found: list[Tensor | None] = [None] * len(flat)
    if into and flat:
        ends = [t for own in graded for t in own.values()]
        seeds = [into[name] for own in graded for name in own]
        found = list(torch.autograd.grad(ends, flat, seeds, allow_unused=True))
    rest = iter(found)
    gradients = [{n: _or_zero(next(rest), t) for n, t in own.items()} for own in wanted]
    kept = [{n: t for n, t in own.items() if not t.requires_grad} for own in leaves]
    return [Made(*each) for each in zip(outs, gradients, kept, strict=True)]


def _names(graph: Graph) -> list[str]:
    return [str(place) for place in range(len(graph.outputs))]


def _tensors(values: Mapping[str, object]) -> list[Tensor]:
    return [cast("Tensor", value) for value in values.values()]


def _or_zero(gradient: Tensor | None, of: Tensor) -> Tensor:
    return torch.zeros_like(of) if gradient is None else gradient


def _says_something(value: Tensor) -> bool:
    """Whether there is a finite number: NaN equals NaN, which would prove nothing.

    Of an empty tensor there is no more to say than its shape.
    """
    return not value.numel() or bool(value.detach().isfinite().any())


def _unlike(want: Made, made: Made, own: Mapping[str, Shard]) -> Iterator[str]:
    for what, one, other in (
        ("result", want.values, made.values),
        ("gradient of", want.gradients, made.gradients),
        ("buffer", want.buffers, made.buffers),
    ):
        for name, tensor in one.items():
            mine = taken(tensor, own[name]) if name in own else tensor
            apart = _apart(mine, other[name], tensor)
            if apart > _ALLOWED:
                yield f"{what} {name} differs by {apart:.1e} of the largest"


def _apart(want: Tensor, have: Tensor, whole: Tensor) -> float:
    """Return the largest difference, of the largest number; NaN equals NaN."""
    if want.shape != have.shape:
        return float("inf")
    a, b = want.detach().double(), have.detach().double()
    same = (a == b) | (a.isnan() & b.isnan())
    apart = torch.where(same, 0.0, (a - b).abs()).nan_to_num(nan=float("inf"))
    if not apart.numel() or not bool(apart.any()):
        return 0.0
    largest = whole.detach().double().abs().nan_to_num(0.0, 0.0, 0.0).max()
    return float(apart.max() / largest.clamp_min(1e-300))


def _given(graph: Graph) -> TrialTensors:
    dice = torch.Generator().manual_seed(_SEED)
    sized, bound = graph.at(graph.batch), _bound(graph.at(graph.batch))
    tensors = {p.name: _filled(p.spec, dice, bound) for p in sized.params}
    for param in sized.params:
        if param.kind != "parameter" and tensors[param.name].is_floating_point():
            tensors[param.name] = tensors[param.name].abs() + 0.5  # variances
    return TrialTensors(tensors, {e.name: _filled(e.spec, dice, bound) for e in sized.inputs})


def _bound(graph: Graph) -> int:
    """Return how many rows or classes integers choose from."""
    op = next(op for op in graph.ops if op.outputs)
    if op.target.startswith("aten.one_hot"):
        return int(op.outputs[0].shape[-1])
    dim = {"aten.embedding": 0, "aten.cross_entropy_loss": 1}.get(op.target.rpartition(".")[0])
    if "grouped_mm" in op.target:
        dim = 0  # offsets of rows
    if dim is None:
        return _OTHERS
    first = op.args[0]
    if isinstance(first, ParamRef):
        spec = graph.param[first.param].spec
    else:
        spec = graph.input[cast("Ref", first).value].spec
    return int(spec.shape[dim])


def _filled(spec: TensorSpec, dice: torch.Generator, bound: int) -> Tensor:
    shape = [int(n) for n in spec.shape]
    if spec.dtype == "bool":
        return _mixed(torch.rand(shape, generator=dice) < 0.8)
    if "int" in spec.dtype:
        chosen = torch.randint(bound, shape, generator=dice).to(getattr(torch, spec.dtype))
        return chosen.sort().values if len(shape) == 1 else chosen  # offsets ascend
    return _laid(torch.randn(shape, generator=dice, dtype=torch.float64), spec)


def _mixed(chosen: Tensor) -> Tensor:
    """Let a mask hide some entries and show others: a few equal draws would prove nothing."""
    if chosen.numel() > 1 and bool((chosen == chosen.flatten()[0]).all()):
        chosen.view(-1)[-1] ^= True
    return chosen


def _positive(given: TrialTensors) -> TrialTensors:
    def above_zero(tensors: Tensors) -> dict[str, Tensor]:
        return {n: t.abs() + 0.5 if t.is_floating_point() else t for n, t in tensors.items()}

    return TrialTensors(above_zero(given.tensors), above_zero(given.inputs))


def _laid(numbers: Tensor, spec: TensorSpec) -> Tensor:
    """Give numbers the value's strides: random ops depend on them."""
    strides = [int(n) for n in spec.strides]
    order = memory_order(numbers.shape, strides) if strides else tuple(range(numbers.dim()))
    back = [order.index(dim) for dim in range(len(order))]
    return numbers.permute(order).contiguous().permute(back)


def _random(like: Tensor, dice: torch.Generator) -> Tensor:
    return torch.randn(like.shape, generator=dice, dtype=like.dtype)


def _leaves(graph: Graph, tensors: Tensors) -> dict[str, Tensor]:
    """Return copies of tensors as autograd leaves, with gradients where the graph requires them."""
    specs = {n: p.spec for n, p in graph.param.items()} | {
        n: e.spec for n, e in graph.input.items()
    }
    return {
        n: t.detach().clone().requires_grad_(specs[n].requires_grad and t.is_floating_point())
        for n, t in tensors.items()
    }


def _cloned(tensors: Tensors) -> dict[str, Tensor]:
    """Return copies of the tensors that an op may write into."""
    return {name: tensor.clone() for name, tensor in tensors.items()}


@contextmanager
def _keyed(_op: Op) -> Iterator[None]:
    torch.manual_seed(_SEED)
    yield


def _wide(op: Op) -> Op:
    return replace(
        op,
        args=tuple(map(_wide_arg, op.args)),
        kwargs=tuple((key, _wide_arg(value)) for key, value in op.kwargs),
        outputs=tuple(map(_wide_spec, op.outputs)),
        body=widened(op.body) if op.body else None,
    )


def _wide_arg(arg: Arg) -> Arg:
    if isinstance(arg, tuple):
        return tuple(map(_wide_arg, arg))
    named = isinstance(arg, Const) and arg.const.removeprefix("torch.") in _FLOATS
    return Const("torch.float64") if named else arg


def _wide_spec(spec: TensorSpec) -> TensorSpec:
    return replace(spec, dtype="float64") if spec.dtype in _FLOATS else spec

"""A bundle for inference against `model.eval()`: output by output, micro-batch by micro-batch.

    your module after eval() = captured graph = bundle

The captured graph runs whole, in one process, without any of the bundle's stages. This module knows
nothing of emitted text or of messages.
"""

from __future__ import annotations

import importlib
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any

import torch
from safetensors.torch import load_file
from torch import Tensor

from bigbrain_fx.core import Graph
from bigbrain_fx.errors import CaptureError
from bigbrain_fx.frontend import (
    Cached,
    Captured,
    CheckRun,
    ModelFile,
    Plain,
    Step,
    graph_inputs,
    modes_kept,
    require_same,
    route,
    rows_mixed,
    run_graph,
    run_members,
    same_numbers,
    taken,
    unit_of,
    without_fast_path,
)
from bigbrain_fx.plan import Plan, live_ops
from bigbrain_fx.runtime import left_alone
from bigbrain_fx.verification.members import same_outputs
from bigbrain_fx.verification.reference import keyed
from bigbrain_fx.verification.trace import link, outputs_to_rounding
from bigbrain_fx.weights import part_name

if TYPE_CHECKING:  # what runs is the bundle's own copy
    from bigbrain_fx.runtime import RowStream

Values = Mapping[str, Tensor]


def inference_checks(
    file: ModelFile,
    captured: Captured,
    plan: Plan,
    bundle: ModuleType,
    weights: Values,
    steps: int,
    outputs: Path | None = None,
) -> list[dict[str, object]]:
    """Compare module, captured graph and bundle; all have the bundle's weights.

    Args:
        file: the model file, loaded here; its module gets the bundle's weights.
        captured: its capture, of which the plan was made.
        plan: what the bundle runs.
        bundle: its infer.py, imported here.
        weights: of the bundle, by the model's names.
        steps: batches.
        outputs: what real processes wrote; else the bundle is run in this process.
    """
    _put(weights, captured, plan)
    grouped = plan.placement.tensor is not None
    one = (_Lockstep if grouped else _OneProcess)(plan, captured, weights)
    stream = _stream(bundle, plan)
    expected = [one.batch(_micro_batches(stream, step, plan), step) for step in range(steps)]
    here, state = _run_here(bundle, plan, steps)
    actual = here if outputs is None else _read(outputs)
    unit = unit_of(plan.graph, weights)
    return [
        _same_module(file, captured, plan),
        *([same_outputs(captured, plan)] if grouped else []),
        _same_outputs(f"{one.what} = bundle, outputs", expected, actual, plan, unit),
        *(_of_rows(file, captured, one, bundle, unit) if plan.graph.rows_apart else []),
        _unchanged(state, weights, plan),
        *_whole_rows(file, bundle),
    ]


def _put(weights: Values, captured: Captured, plan: Plan) -> None:
    """Give the module the weights that the bundle has: they may have been trained since."""
    used = {name for stage in plan.stages.stages for name in stage.params}
    with torch.no_grad():
        for name in sorted(used):
            captured.tensors[name].copy_(weights[name])


# --------------------------------------------------------------------------- module = graph


SEEDS = (0, 1)


def _same_module(file: ModelFile, captured: Captured, plan: Plan) -> dict[str, object]:
    """Compare on batches and seeds, as a capture does.

    Raises:
        Exception: whatever the module raises on one of them.
    """
    step, found = _step_of(file, captured), []
    with _in_eval(file):
        batches = _module_batches(file, captured, plan)
        for number, inputs in enumerate(batches):
            given = {entry.name: inputs[entry.name] for entry in captured.graph.inputs}
            for seed in SEEDS:
                run = CheckRun(step, captured.graph, captured.tensors, captured.functions)
                line = run.first_difference(given, seed, gradients=False)
                found += [f"batch {number}, seed {seed}: {line}"] if line else []
                if not run.ran:  # the module refuses it: there was nothing to compare
                    Plain(step, file.model, file.autocast).run([*given.values()], seed)
    what = f"{len(batches)} micro-batches, {len(SEEDS)} seeds: outputs, buffers bitwise"
    return link("your module after eval() = captured graph", found, what)


def _step_of(file: ModelFile, captured: Captured) -> Step:
    how = route(file.model, file.example_batch, file.loss is not None)
    step = Step(file.model, None, captured.batch, how, training=False)
    step.casts_itself = captured.graph.autocast != file.autocast
    return step


@contextmanager
def _in_eval(file: ModelFile) -> Iterator[None]:
    """Put a module into the mode of its capture; its own modes come back."""
    with modes_kept(file.model), without_fast_path():
        file.model.eval()
        yield


def _module_batches(file: ModelFile, captured: Captured, plan: Plan) -> list[Values]:
    """Return the example and, where there are, the micro-batches of a batch of the user's data."""
    rows = captured.graph.static_batch or plan.rows
    batches: list[Values] = [captured.inputs(rows)]
    if captured.graph.static_batch is None:
        batches += _another_size(file, captured, rows)
    if file.batches is not None:
        with left_alone(file.batches):
            batch = next(iter(file.batches(plan.seed + 1)))
        inputs = graph_inputs(captured.graph, batch)
        batches += [
            {e.name: _part(inputs[e.name], m, rows, e.batched) for e in captured.graph.inputs}
            for m in range(plan.micro_batches)
        ]
    return batches


def _another_size(file: ModelFile, captured: Captured, rows: int) -> list[Values]:
    """Return a batch of other rows, where the module runs on one: pairs of rows want twice as many.

    `rows` is the number to leave.
    """
    plain = Plain(_step_of(file, captured), file.model, file.autocast)
    for count in (rows + 1, 2 * rows):
        inputs = captured.inputs(count)
        with suppress(Exception):  # the user's own code, in a way it may not know
            plain.run([*inputs.values()], SEEDS[0])
            return [inputs]
    return []


def _part(value: Tensor, micro: int, rows: int, batched: bool) -> Tensor:
    return value[micro * rows : (micro + 1) * rows].clone() if batched else value


def _of_rows(
    file: ModelFile, captured: Captured, one: _OneProcess, bundle: ModuleType, unit: float
) -> list[dict[str, object]]:
    """Compare what a short batch and another cut are taken for with what they give.

    `split` has asked the module for that, too, where it was small enough to run.
    """
    short, graph = _same_short_batch(one, bundle, one.plan, unit), captured.graph
    if isinstance(file.model, Cached):  # positions of one row go by each other
        return [short]
    step = _step_of(file, captured)
    with _in_eval(file):
        mixed = rows_mixed(step, captured.batch, graph.output_dims, file.autocast)
    found = [f"{name}: a row of it depends on the others in its batch" for name in mixed]
    apart = link("rows of your module stand alone", found, f"of batches of {captured.batch.rows}")
    return [apart, short]


# --------------------------------------------------------------------------- graph = bundle


@dataclass(frozen=True)
class _OneProcess:
    """The captured graph, run whole with the bundle's weights and the bundle's dice."""

    plan: Plan
    captured: Captured
    weights: Values

    @property
    def what(self) -> str:
        """Name of the side that the bundle is compared with."""
        return "captured graph"

    def batch(self, micro_batches: Sequence[Values], step: int) -> dict[str, Tensor]:
        """Return the outputs of a batch by name, all rows of it."""
        parts = [self._micro_batch(inputs, step, m) for m, inputs in enumerate(micro_batches)]
        return {
            name: torch.stack([p[name] for p in parts])
            if dim is None
            else torch.cat([p[name] for p in parts], dim)
            for name, dim in self.plan.graph.output_dims.items()
        }

    def _micro_batch(self, inputs: Values, step: int, micro: int) -> dict[str, Tensor]:
        graph = self._graph()
        live = live_ops(graph)

        with torch.no_grad():
            found = self._run(
                {**self._labels(), **inputs},
                order=[op.name for op in graph.ops if op.name in live],  # not what only labels feed
                key=keyed(graph, (self.plan.seed, step, micro)),
                values=[v for v in graph.outputs if v in graph.op],
                functions=self.captured.functions,
            )
        values = {**inputs, **{n: v for n, v in found.items() if isinstance(v, Tensor)}}
        return {name: values[value] for name, value in graph.output_names}

    def _graph(self) -> Graph:
        return self.plan.graph

    def _run(self, inputs: Values, **how: Any) -> Mapping[str, object]:  # noqa: ANN401  # run_graph's
        return run_graph(self._graph(), self._tensors(), dict(inputs), **how)

    def _tensors(self) -> dict[str, Tensor]:
        """Return the weights as a module has them: kernels (matmul) look at `requires_grad`."""
        wanted = {p.name for p in self.plan.graph.params if p.spec.requires_grad}
        return {
            name: tensor.detach().requires_grad_(name in wanted)
            for name, tensor in self.weights.items()
        }

    def _labels(self) -> dict[str, Tensor]:
        """Return stand-ins for entries that the bundle does not read: only their sizes count."""
        specs = {e.name: e.spec.at(self.plan.rows) for e in self.plan.graph.inputs}
        return {
            name: torch.zeros([int(dim) for dim in spec.shape], dtype=getattr(torch, spec.dtype))
            for name, spec in specs.items()
        }


class _Lockstep(_OneProcess):
    """The graphs of a tensor group's ranks, run in lockstep: outputs are the last rank's."""

    what = "TP ranks' graphs"

    def _graph(self) -> Graph:
        return self.plan.sharded.members[-1]

    def _run(self, inputs: Values, **how: Any) -> Mapping[str, object]:  # noqa: ANN401
        graphs, shards = self.plan.sharded.members, self.plan.sharded.shards
        whole = self._tensors()
        each = [{s.param: s for s in shards if s.member == m} for m in range(len(graphs))]
        tensors = [
            {n: taken(t, own[n]) if n in own else t for n, t in whole.items()} for own in each
        ]
        return run_members(graphs, tensors, [inputs for _ in graphs], **how)[-1]


def _stream(bundle: ModuleType, plan: Plan) -> RowStream:
    rows = importlib.import_module("runtime.rows")  # the bundle's own copy
    b, here = bundle.INFERENCE, torch.device("cpu")
    made: RowStream = rows.RowStream(
        b.batches, plan.seed, b.inputs, b.whole, plan.micro_batches, here, b.specs
    )
    return made


def _micro_batches(stream: RowStream, step: int, plan: Plan) -> list[Values]:
    stream.advance(step)
    return [
        {name: stream.get(name, m).clone() for name in stream.inputs}
        for m in range(plan.micro_batches)
    ]


def _run_here(bundle: ModuleType, plan: Plan, steps: int) -> tuple[list[Values], Values]:
    """Return what the bundle gives in this process, and its tensors afterwards."""
    runtime, b = importlib.import_module("runtime.infer"), bundle.INFERENCE
    found: list[Values] = []

    def keep(_: int, rows: int, outputs: dict[str, Tensor], batch_s: float) -> None:
        found.append(outputs)

    devices = runtime.run_here(b, b.batches, b.inputs, steps, plan.seed, keep)
    state = {name: tensor for device in devices for name, tensor in device.state().items()}
    return found, state


def _read(folder: Path) -> list[Values]:
    return [load_file(path) for path in sorted(folder.glob("*.safetensors"))]


def _same_outputs(
    title: str, expected: Sequence[Values], actual: Sequence[Values], plan: Plan, unit: float
) -> dict[str, object]:
    found = [
        f"batch {step}: {name}"
        for step, outputs in enumerate(expected)
        for name, want in outputs.items()
        if step >= len(actual) or not same_numbers(actual[step].get(name), want)
    ]
    rows = plan.micro_batches * plan.rows
    names = ", ".join(plan.graph.output_dims)
    if plan.stages.compiled:
        return outputs_to_rounding(title, expected, actual, unit)
    return link(title, found, f"{names}: {len(expected)} batches of {rows} rows bitwise")


def _same_short_batch(
    one: _OneProcess, bundle: ModuleType, plan: Plan, unit: float
) -> dict[str, object]:
    """Compare a batch that lacks a row with the same rows filled up."""
    stream = _stream(bundle, plan)
    parts = _micro_batches(stream, 0, plan)
    room, whole = stream.room, bundle.INFERENCE.whole
    rows = max(1, room - 1)
    inputs = {n: _without_end([p[n] for p in parts], rows, n in whole) for n in stream.inputs}
    actual = bundle.infer(inputs)
    filled = {n: _filled_up(t, room, n in whole) for n, t in inputs.items()}
    again = [
        {n: _part(t, m, room // plan.micro_batches, n not in whole) for n, t in filled.items()}
        for m in range(plan.micro_batches)
    ]
    expected = one.batch(again, 0)
    dims = plan.graph.output_dims
    title = "a short batch = its rows, filled up"
    wanted = {name: _first(want, dims[name], rows, room) for name, want in expected.items()}
    if plan.stages.compiled:
        return outputs_to_rounding(title, [wanted], [actual], unit)
    found = [name for name, want in wanted.items() if not same_numbers(actual[name], want)]
    return link(title, found, f"{rows} of {room} rows bitwise")


def _without_end(parts: Sequence[Tensor], rows: int, whole: bool) -> Tensor:
    return parts[0] if whole else torch.cat(list(parts))[:rows]


def _filled_up(value: Tensor, room: int, whole: bool) -> Tensor:
    if whole or value.shape[0] == room:
        return value
    return torch.cat([value, *[value[-1:]] * (room - value.shape[0])])


def _first(value: Tensor, dim: int | None, rows: int, room: int) -> Tensor:
    if dim is None:
        return value[: -(-rows * value.shape[0] // room)]
    return value.narrow(dim, 0, value.shape[dim] * rows // room)


def _whole_rows(file: ModelFile, bundle: ModuleType) -> list[dict[str, object]]:
    """Compare a bundle that keeps keys and values, step by step, with the model on whole rows."""
    if not isinstance(file.model, Cached):
        return []

    def run(tokens: Tensor, row: Tensor, position: Tensor) -> Tensor:
        (scores,) = bundle.infer({"tokens": tokens, "row": row, "position": position}).values()
        found: Tensor = scores
        return found

    name = "your module on whole rows = bundle, one position a step"
    try:
        worst = require_same(file.model.row, file.model, run)
    except CaptureError as error:
        return [link(name, [error.what], "")]
    return [link(name, [], f"to {worst:.1e} of the largest score")]


def _unchanged(state: Values, weights: Values, plan: Plan) -> dict[str, object]:
    used = {name for stage in plan.stages.stages for name in stage.params}
    parts = {shard.param for shard in plan.sharded.shards}
    wanted = {name: weights[name] for name in sorted(used - parts)}
    own = [shard for shard in plan.sharded.shards if shard.param in used]
    wanted |= {part_name(s.param, s.member): taken(weights[s.param], s) for s in own}
    found = [
        f"{n} was written" for n, want in wanted.items() if not same_numbers(state.get(n), want)
    ]
    return link("weights and buffers stay as they are", found, f"{len(wanted)} tensors bitwise")

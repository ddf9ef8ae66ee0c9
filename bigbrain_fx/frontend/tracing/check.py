"""Compare a captured graph with the module it came from: two batch sizes, two seeds, gradients too.

If they differ, the results of module calls show where the two part. This module runs both; it knows
nothing of tracing.
"""

from __future__ import annotations

import contextlib
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from bigbrain_fx.core import CallArguments, Dim, Graph, Op, size_of
from bigbrain_fx.errors import InputError
from bigbrain_fx.frontend.tracing.captured import Captured
from bigbrain_fx.frontend.tracing.executor.graph_executor import run_graph
from bigbrain_fx.frontend.tracing.executor.tolerance import (
    Gradients,
    coarsest,
    differences,
    exact_gradients,
)
from bigbrain_fx.frontend.tracing.export import ambient, quiet
from bigbrain_fx.frontend.tracing.plain import gradients_of, same_numbers, seed_python, state_kept
from bigbrain_fx.frontend.tracing.step import Step
from bigbrain_fx.frontend.translation.batch import Batch
from bigbrain_fx.frontend.translation.leaf import apart_from_here
from bigbrain_fx.frontend.translation.oracle import WrongAnswerError

CHECK_FLOPS = 3e10  # above this a check would take seconds; `verify` compares the real thing anyway
BACKWARD = 3.0  # what a forward and a backward pass cost, in forward passes
_WRITTEN = "modified by an inplace operation"  # as autograd says it
_REFUSALS = (RuntimeError, ValueError, IndexError)


@dataclass(frozen=True)
class StepOutcome:
    """Results of one run: values in order, gradients and buffers by name.

    `gradients` is None where the model has none. `late` is a buffer that backward wrote.
    """

    values: tuple[object, ...]
    gradients: Mapping[str, Tensor | None] | None
    buffers: Mapping[str, Tensor]
    late: str = ""


@dataclass(frozen=True)
class CheckRun:
    """Inputs of a comparison: the module as a step, the graph, and the tensors of both.

    `ran` has the seeds under which the module could be run at all.
    """

    step: Step
    graph: Graph
    tensors: Mapping[str, Tensor]
    functions: Mapping[str, object]
    ran: list[int] = field(default_factory=list)

    def first_difference(
        self, inputs: Mapping[str, Tensor], seed: int, gradients: bool
    ) -> str | None:
        """Run both on one batch under one seed; describe the first difference, or return None.

        Every buffer and every random state is put back afterwards.

        Raises:
            AssumptionError: the data contradict an assumption of the trace.
        """
        asked = gradients and self.graph.loss is not None
        try:
            with self.kept(seed):
                expected = self.eager(inputs, asked)
        except _REFUSALS:
            return None  # the module itself refuses this size: nothing to compare
        self.ran.append(seed)
        try:
            with self.kept(seed):
                found = self._captured(inputs, asked and expected.gradients is not None)
        except WrongAnswerError:
            raise
        except (*_REFUSALS, TypeError) as error:
            return f"{type(error).__name__}: {(str(error).splitlines() or [''])[0]}"
        names, tensors = list(expected.gradients or {}), list(inputs.values())
        exact = partial(exact_gradients, self.step, self.step.model, tensors, names, seed)
        return self._compare(expected, found, exact)

    def _compare(
        self, expected: StepOutcome, found: StepOutcome, exact: Callable[[], Gradients | None]
    ) -> str | None:
        if expected.late:
            return f"backward writes into the buffer {expected.late}"
        for name, want, have in zip(self._names(), expected.values, found.values, strict=True):
            if not same_numbers(have, want):
                return f"value {name} differs"
        for name, buffer in expected.buffers.items():
            if not same_numbers(found.buffers.get(name), buffer):
                return f"buffer {name} differs"
        if expected.gradients is None or found.gradients is None:
            return None
        unit = unit_of(self.graph, self.tensors)
        return next(differences(expected.gradients, found.gradients, unit, exact), None)

    def _names(self) -> list[str]:
        """Name the values that the step returns; one that is returned twice is named twice."""
        outputs = [value for _, value in self.graph.output_names] or self.graph.outputs
        return [*([self.graph.loss] if self.graph.loss else []), *outputs]

    def eager(self, inputs: Mapping[str, Tensor], asked: bool) -> StepOutcome:
        """Run the module on a batch, with its gradients on request."""
        tensors = [tensor.clone() for tensor in inputs.values()]
        with torch.set_grad_enabled(asked), ambient(self._around(), tensors):
            values = self.step(*tensors)
        buffers = {n: b.detach().clone() for n, b in self.step.model.named_buffers()}
        buffers |= {n: self.tensors[n].detach().clone() for n in self._written()}
        gradients = None
        if asked:
            try:
                gradients = self._backward(values[0])
            except RuntimeError as error:  # a kernel that this processor lacks, say
                _require_unwritten(error)
        held = dict(self.step.model.named_buffers()) if gradients else {}
        late = [n for n, b in held.items() if not same_numbers(b, buffers[n])]
        found = tuple(value.detach() for value in values)
        return StepOutcome(found, gradients, buffers, late[0] if late else "")

    def _around(self) -> str | None:
        """Return the autocast that the user's own loop has around the step."""
        return None if self.step.casts_itself else self.graph.autocast

    def _captured(self, inputs: Mapping[str, Tensor], asked: bool) -> StepOutcome:
        cloned = {name: tensor.clone() for name, tensor in inputs.items()}
        tensors = self._without_hooks()
        with torch.set_grad_enabled(asked):
            functions = apart_from_here(self.functions)
            found = run_graph(self.graph, tensors, cloned, functions=functions)
        buffers = {
            p.name: self.tensors[p.name].detach().clone()
            for p in self.graph.params
            if p.kind != "parameter" or p.name in self._written()
        }
        loss = found.get(self.graph.loss or "")
        gradients = None
        if asked and isinstance(loss, Tensor):
            gradients = self._gradients(loss, tensors)
        return StepOutcome(tuple(found[name] for name in self._names()), gradients, buffers)

    def _backward(self, loss: Tensor) -> dict[str, Tensor | None]:
        """Return the gradients of `loss.backward()`, as the user would call it."""
        wanted = self._trained(self.tensors)
        if not wanted or not loss.requires_grad:
            return {}
        return dict(zip(wanted, gradients_of(loss, list(wanted.values())), strict=True))

    def _without_hooks(self) -> dict[str, Tensor]:
        """Return the tensors as a bundle has them: the same numbers, without the user's hooks."""
        twins: dict[int, Tensor] = {}
        for tensor in self.tensors.values():
            if id(tensor) not in twins and tensor.is_leaf:
                twins[id(tensor)] = tensor.detach().requires_grad_(tensor.requires_grad)
        return {name: twins.get(id(t), t) for name, t in self.tensors.items()}

    def _gradients(self, loss: Tensor, tensors: Mapping[str, Tensor]) -> dict[str, Tensor | None]:
        wanted = self._trained(tensors)
        if not wanted or not loss.requires_grad:
            return {}
        found = torch.autograd.grad(loss, list(wanted.values()), allow_unused=True)
        return dict(zip(wanted, found, strict=True))

    def _written(self) -> set[str]:
        """Name the frozen parameters that forward writes into, as a momentum encoder's."""
        frozen = {p.name for p in self.graph.params if p.kind == "parameter"}
        return {name for op in self.graph.ops for name in mutated(op) if name in frozen}

    def _trained(self, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        return {
            param.name: tensors[param.name]
            for param in self.graph.params
            if param.spec.requires_grad and param.name == param.canonical
        }

    @contextlib.contextmanager
    def _put_back(self, numbers: Mapping[str, Tensor]) -> Iterator[None]:
        try:
            yield
        finally:
            with torch.no_grad():
                for name, tensor in numbers.items():
                    self.tensors[name].copy_(tensor)

    @contextlib.contextmanager
    def kept(self, seed: int) -> Iterator[None]:
        """Seed all generators; put every buffer and every random state back at the end."""
        written = {name: self.tensors[name].detach().clone() for name in self._written()}
        with state_kept(self.step.model), _one_thread(), quiet(), self._put_back(written):
            torch.default_generator.manual_seed(seed)
            seed_python(seed)  # a trace that kept one draw differs under another seed
            yield


def module_apart(step: Step, found: Captured, batch: Batch) -> str:
    """Return the path of the module that first gives another result; empty: none is known.

    The path is empty where other modules draw random numbers: the draws that moved the generator
    are unknown.
    """
    graph, results, values = found.graph, Results(), dict[str, object]()

    def note(op: Op, value: object) -> None:
        values[op.name] = copied(value)

    run = CheckRun(step, graph, found.tensors, found.functions)
    inputs = batch.sized(graph.static_batch or batch.rows)
    cloned = {name: tensor.clone() for name, tensor in inputs.items()}
    with contextlib.suppress(Exception), torch.no_grad():  # the user's code, which fails here
        with run.kept(0), results.noted(step.model):
            run.eager(inputs, asked=False)
        with run.kept(0):
            functions = apart_from_here(found.functions)
            run_graph(graph, found.tensors, cloned, functions=functions, watch=note)
    path = results.first_apart(graph, values)
    draws = any(op.random and not f"{op.module_path}.".startswith(f"{path}.") for op in graph.ops)
    return "" if draws else path


def _require_unwritten(error: RuntimeError) -> None:
    """Refuse a model that plain PyTorch cannot train either; a bundle might, by other lines."""
    if _WRITTEN not in str(error):
        return
    raise InputError(
        f"the model's backward fails on its example batch: {str(error).partition(' Hint:')[0]}",
        code="BX2106",
        help="make loss(...).backward() run in plain PyTorch first: write into a copy, as "
        "h = h * 0.5 for h.mul_(0.5), where a layer before has read h "
        "(torch.autograd.set_detect_anomaly(True) there names the layer)",
    )


def mutated(op: Op) -> Iterator[str]:
    """Yield the tensors that an op, or the op's body, writes into."""
    yield from op.mutates
    if op.body is not None:
        for inner in op.body.ops:
            yield from mutated(inner)


def unit_of(graph: Graph, tensors: Mapping[str, Tensor]) -> float:
    """Return the rounding unit of the coarsest type that takes part in a graph."""
    cast = [getattr(torch, graph.autocast)] if graph.autocast else []
    return coarsest([*cast, *(tensor.dtype for tensor in tensors.values()), *_computed(graph)])


def _computed(graph: Graph) -> Iterator[torch.dtype]:
    """Yield the types of all results, results in regions too."""
    for op in graph.ops:
        yield from (getattr(torch, spec.dtype) for spec in op.outputs)
        if op.body is not None:
            yield from _computed(op.body)


def affordable(graph: Graph, rows: Sequence[int], share: float = 1.0) -> bool:
    """Whether a check at these batch sizes takes about a second; `share` scales the work."""
    return share * sum(work_of(graph, count) for count in rows) <= CHECK_FLOPS


def work_of(graph: Graph, rows: int) -> int:
    """Return the floating point operations of a forward pass of so many rows.

    The number is doubled: small ops take longer than their operations.
    """
    return 2 * sum(_size(op.flops, rows) for op in graph.ops)


def _size(dim: Dim, rows: int) -> int:
    """Return a size; nothing where there is none of so few rows: B // (B // 2) of one."""
    try:
        return size_of(dim, rows)
    except ZeroDivisionError:
        return 0


@contextlib.contextmanager
def _one_thread() -> Iterator[None]:
    """Compute with one thread: the numbers are few, and threads wait long for a busy core."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)


# --------------------------------------------------------------------------- results of modules

_Call = tuple[str, int]


@dataclass(frozen=True)
class Results:
    """The tensors that calls of modules gave, by path and number of the call."""

    of: dict[_Call, list[Tensor]] = field(default_factory=dict)

    @contextlib.contextmanager
    def noted(self, model: nn.Module) -> Iterator[None]:
        """Record the results of a model's modules in the meantime."""
        paths = {id(part): path for path, part in model.named_modules()}
        calls: Counter[str] = Counter()

        def note(part: nn.Module, _args: object, result: object) -> None:
            path = paths.get(id(part), "")
            tensors = (leaf for leaf in tree_leaves(result) if isinstance(leaf, Tensor))
            self.of[path, calls[path]] = [copied(tensor) for tensor in tensors]
            calls[path] += 1

        with (
            contextlib.ExitStack() as hooks
        ):  # the last of each: what the user's hooks change counts
            for part in model.modules():
                hooks.callback(part.register_forward_hook(note).remove)
            yield

    def first_apart(self, graph: Graph, values: Mapping[str, object]) -> str:
        """Return the path of the module that first gives other tensors than the graph.

        Empty: none is known.

        Args:
            graph: of the model.
            values: of its ops, by name.
        """
        calls = _calls(graph)
        return next((call.path for call in calls if self._is_apart(call, values)), "")

    def _is_apart(self, call: CallArguments, values: Mapping[str, object]) -> bool:
        """Whether a call gives other tensors in the graph; one that is not known does not."""
        want = self.of.get((call.path, call.call), [])
        have = [values.get(name) for name in call.results]
        known = len(have) == len(want) and all(isinstance(tensor, Tensor) for tensor in have)
        return known and not all(map(same_numbers, have, want))


def _calls(graph: Graph) -> list[CallArguments]:
    """Return the calls of the model's modules, in the order in which they end."""
    place = {op.name: number for number, op in enumerate(graph.ops)}
    found = (call for call in graph.arguments if call.path and call.results)
    return sorted(found, key=lambda call: max(place.get(name, -1) for name in call.results))


def copied(value: object) -> Any:  # noqa: ANN401  # a tensor, or what an op gives besides
    """Return a copy of a tensor; anything else as it is."""
    return value.detach().clone() if isinstance(value, Tensor) else value

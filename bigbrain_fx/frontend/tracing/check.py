"""Compare a captured graph with the module it came from: two batch sizes, two seeds, gradients too.

This file runs both; it knows nothing of tracing.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from bigbrain_fx.capture.export import ambient, quiet
from bigbrain_fx.capture.interpret import run_graph
from bigbrain_fx.capture.oracle import AssumptionError
from bigbrain_fx.capture.plain import seed_python, state_kept
from bigbrain_fx.capture.rounding import Gradients, coarsest, differences, exact_gradients
from bigbrain_fx.capture.step import Step
from bigbrain_fx.core import Graph, size_of

CHECK_FLOPS = 3e10  # above this a check would take seconds; `verify` compares the real thing anyway
BACKWARD = 3.0  # what a forward and a backward pass cost, in forward passes
_REFUSALS = (RuntimeError, ValueError, IndexError)


@dataclass(frozen=True)
class Outcome:
    """What one run leaves: values in order, gradients and buffers by name.

    `gradients` is None where none can be asked for.
    """

    values: tuple[object, ...]
    gradients: Mapping[str, Tensor | None] | None
    buffers: Mapping[str, Tensor]


@dataclass(frozen=True)
class Trial:
    """What a comparison needs: the module as a step, the graph, and both one's tensors."""

    step: Step
    graph: Graph
    tensors: Mapping[str, Tensor]
    functions: Mapping[str, object]

    def first_difference(
        self, inputs: Mapping[str, Tensor], seed: int, gradients: bool
    ) -> str | None:
        """Run both on one batch under one seed; say what differs first, None when nothing does.

        Every buffer and every random state is put back afterwards.

        Args:
            inputs: the batch by input name.
            seed: of torch.
            gradients: compare the loss's gradients as well.

        Raises:
            AssumptionError: the data are not such as the trace assumes.
        """
        asked = gradients and self.graph.loss is not None
        try:
            with self._kept(seed):
                expected = self._eager(inputs, asked)
        except _REFUSALS:
            return None  # the module itself refuses this size: nothing to compare
        try:
            with self._kept(seed):
                found = self._captured(inputs, asked and expected.gradients is not None)
        except AssumptionError:
            raise
        except (*_REFUSALS, TypeError) as error:
            return f"{type(error).__name__}: {(str(error).splitlines() or [''])[0]}"
        names, tensors = list(expected.gradients or {}), list(inputs.values())
        exact = partial(exact_gradients, self.step, self.step.model, tensors, names, seed)
        return self._compare(expected, found, exact)

    def _compare(
        self, expected: Outcome, found: Outcome, exact: Callable[[], Gradients | None]
    ) -> str | None:
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

    def _eager(self, inputs: Mapping[str, Tensor], asked: bool) -> Outcome:
        tensors = [tensor.clone() for tensor in inputs.values()]
        with torch.set_grad_enabled(asked), ambient(self.graph.autocast, tensors):
            values = self.step(*tensors)
        buffers = {n: b.detach().clone() for n, b in self.step.model.named_buffers()}
        gradients = None
        if asked:
            with contextlib.suppress(RuntimeError):  # a reentrant checkpoint refuses to be asked
                gradients = self._gradients(values[0])
        return Outcome(tuple(value.detach() for value in values), gradients, buffers)

    def _captured(self, inputs: Mapping[str, Tensor], asked: bool) -> Outcome:
        cloned = {name: tensor.clone() for name, tensor in inputs.items()}
        with torch.set_grad_enabled(asked):
            found = run_graph(self.graph, self.tensors, cloned, functions=self.functions)
        buffers = {
            p.name: self.tensors[p.name].detach().clone()
            for p in self.graph.params
            if p.kind != "parameter"
        }
        loss = found.get(self.graph.loss or "")
        gradients = self._gradients(loss) if asked and isinstance(loss, Tensor) else None
        return Outcome(tuple(found[name] for name in self._names()), gradients, buffers)

    def _gradients(self, loss: Tensor) -> dict[str, Tensor | None]:
        wanted = {
            param.name: self.tensors[param.name]
            for param in self.graph.params
            if param.spec.requires_grad and param.name == param.canonical
        }
        if not wanted or not loss.requires_grad:
            return {}
        found = torch.autograd.grad(loss, list(wanted.values()), allow_unused=True)
        return dict(zip(wanted, found, strict=True))

    @contextlib.contextmanager
    def _kept(self, seed: int) -> Iterator[None]:
        with state_kept(self.step.model), _one_thread(), quiet():
            torch.default_generator.manual_seed(seed)
            seed_python(seed)  # a trace that kept one draw differs under another seed
            yield


def unit_of(graph: Graph, tensors: Mapping[str, Tensor]) -> float:
    """Return the rounding unit of the coarsest type that takes part in a graph."""
    cast = [getattr(torch, graph.autocast)] if graph.autocast else []
    return coarsest([*cast, *(tensor.dtype for tensor in tensors.values()), *_computed(graph)])


def _computed(graph: Graph) -> Iterator[torch.dtype]:
    """Yield the types of all results, those in regions, too."""
    for op in graph.ops:
        yield from (getattr(torch, spec.dtype) for spec in op.outputs)
        if op.body is not None:
            yield from _computed(op.body)


def affordable(graph: Graph, rows: Sequence[int], share: float = 1.0) -> bool:
    """Whether checking at these batch sizes takes about a second at most; `share` for a forward."""
    work = 2 * sum(size_of(op.flops, count) for op in graph.ops for count in rows)
    return share * work <= CHECK_FLOPS


@contextlib.contextmanager
def _one_thread() -> Iterator[None]:
    """Compute with one thread: the numbers are few, and threads wait long for a busy core."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)


def same_numbers(found: object, want: object) -> bool:
    """Whether two tensors are equal bit by bit (NaN equals NaN)."""
    if not isinstance(found, Tensor) or not isinstance(want, Tensor):
        return found is want
    if found.shape != want.shape or found.dtype != want.dtype:
        return False
    return torch.equal(found, want) or bool(
        ((found == want) | ((found != found) & (want != want))).all()
    )

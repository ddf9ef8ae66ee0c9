"""Compare a captured graph with the module it came from, on real numbers at two batch sizes.

This file runs both; it knows nothing of tracing.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from bigbrain_fx.capture.dice import random_state_kept
from bigbrain_fx.capture.export import ambient, quiet
from bigbrain_fx.capture.interpret import run_graph
from bigbrain_fx.core import Graph, size_of

CHECK_FLOPS = 3e10  # above this a check would take seconds; `verify` compares the real thing anyway
_SEED = 20


@dataclass(frozen=True)
class Trial:
    """What a comparison needs: the module as a step, the graph, and both one's tensors."""

    step: Callable[..., tuple[Tensor, ...]]
    graph: Graph
    tensors: Mapping[str, Tensor]
    functions: Mapping[str, type]

    def first_difference(self, inputs: Mapping[str, Tensor]) -> str | None:
        """Run both on one batch under one seed; say which value differs, None when none does.

        Every buffer and every random state is put back afterwards.
        """
        names = [*([self.graph.loss] if self.graph.loss else []), *self.graph.outputs]
        with self._state_kept():
            expected = self._eager(inputs)
        if expected is None:
            return None  # the module itself refuses this size: nothing to compare
        with self._state_kept():
            try:
                found = self._captured(inputs)
            except (RuntimeError, ValueError, IndexError, TypeError) as error:
                return f"{type(error).__name__}: {str(error).splitlines()[0]}"
        for name, want in zip(names, expected, strict=True):
            if not _same(found[name], want):
                return f"value {name} differs"
        return None

    def _eager(self, inputs: Mapping[str, Tensor]) -> tuple[Tensor, ...] | None:
        tensors = [tensor.clone() for tensor in inputs.values()]
        torch.default_generator.manual_seed(_SEED)
        try:
            with quiet(), torch.no_grad(), ambient(self.graph.autocast, tensors):
                return self.step(*tensors)
        except (RuntimeError, ValueError, IndexError):
            return None

    def _captured(self, inputs: Mapping[str, Tensor]) -> Mapping[str, object]:
        cloned = {name: tensor.clone() for name, tensor in inputs.items()}
        torch.default_generator.manual_seed(_SEED)
        with torch.no_grad():
            return run_graph(self.graph, self.tensors, cloned, functions=self.functions)

    @contextlib.contextmanager
    def _state_kept(self) -> Iterator[None]:
        written = sorted({name for op in self.graph.ops for name in op.mutates})
        kept = {n: self.tensors[n].detach().clone() for n in written if n in self.tensors}
        with random_state_kept(), torch.random.fork_rng(devices=[]), _one_thread():
            yield
        with torch.no_grad():
            for name, value in kept.items():
                self.tensors[name].copy_(value)


def affordable(graph: Graph, rows: Sequence[int]) -> bool:
    """Whether checking at these batch sizes takes about a second at most."""
    return 2 * sum(size_of(op.flops, count) for op in graph.ops for count in rows) <= CHECK_FLOPS


@contextlib.contextmanager
def _one_thread() -> Iterator[None]:
    """Compute with one thread: the numbers are few, and threads wait long for a busy core."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)


def _same(found: object, want: Tensor) -> bool:
    """Whether two tensors are equal bit by bit (NaN equals NaN)."""
    if not isinstance(found, Tensor) or found.shape != want.shape or found.dtype != want.dtype:
        return False
    return torch.equal(found, want) or bool(
        ((found == want) | ((found != found) & (want != want))).all()
    )

"""The graph beside the user's loop: it draws the random numbers that the loop has drawn.

    loop and graph: one seed a micro-batch, and draws in the order of the lines, which a trace keeps
    a plan of another order: forward in the trace's first ─▶ the generator's state before each draw

This file knows graphs; it knows no loop.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager

import torch
from torch import Tensor

from bigbrain_fx.core import Graph, Op, Stages
from bigbrain_fx.frontend import run_graph
from bigbrain_fx.verification.draws import LOOP, Key, reseed
from bigbrain_fx.verification.reference import Draws, Reference, Tensors


class LoopReference(Reference):
    """A reference with one leaf a parameter, as plain training has; its arguments are those."""

    def __init__(
        self, graph: Graph, stages: Stages, tensors: Tensors, functions: Mapping[str, object]
    ) -> None:
        super().__init__(graph, stages, tensors, functions, leaves_per_stage=False)

    def seeded(self, inputs: Tensors, key: Key) -> Draws:
        """Seed as the loop does; return what puts the generator where an op finds it there."""
        traced = [op.name for op in self.graph.ops if op.random]
        orders = ([name for name in cut.order if name in traced] for cut in self.cuts)
        states = {} if all(order == traced for order in orders) else self._states(inputs, key)
        reseed(key, LOOP)

        @contextmanager
        def placed(op: Op) -> Iterator[None]:
            if states:
                torch.default_generator.set_state(states[op.name])
            yield

        return placed

    def _states(self, inputs: Tensors, key: Key) -> dict[str, Tensor]:
        """Return the generator's state before each op that draws, in the order of the trace."""
        states: dict[str, Tensor] = {}
        fixed = {name: tensor.clone() for name, tensor in self.buffers.items()}

        def leaf(param: str, _op: str) -> Tensor:
            canonical = self.graph.param[param].canonical
            own = self.parameters.get(canonical)
            return fixed[param] if own is None else own.detach().requires_grad_()

        @contextmanager
        def noted(op: Op) -> Iterator[None]:
            states[op.name] = torch.default_generator.get_state()
            yield

        reseed(key, LOOP)
        given = {name: tensor.clone() for name, tensor in inputs.items()}
        run_graph(self.graph, fixed, given, leaf=leaf, key=noted, functions=self.functions)
        return states

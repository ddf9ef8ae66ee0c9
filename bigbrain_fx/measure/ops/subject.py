"""A captured graph with numbers in it, which runs a micro-batch as a bundle's device does.

This file knows how the runtime seeds random numbers and adds up gradients; it times nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext

import torch
from torch import Tensor
from torch.utils.hooks import RemovableHandle

from bigbrain_fx.core import Graph, Op
from bigbrain_fx.frontend import draw_places, place_name, run_graph
from bigbrain_fx.runtime import reseed

_SHARE = 0.125  # the loss's seed: some number of micro-batches, which costs the same for all


class Subject:
    """A graph, ready to run again and again.

    Args:
        graph: concrete, for the rows of `inputs`.
        tensors: parameters, buffers and constants by name; buffers go on as in training.
        inputs: the batch's tensors by name.
        functions: the user's own Python, by target.
        device: where it runs; tensors that are elsewhere are copied there.
    """

    def __init__(
        self,
        graph: Graph,
        tensors: Mapping[str, Tensor],
        inputs: Mapping[str, Tensor],
        functions: Mapping[str, object],
        device: torch.device,
    ) -> None:
        self.graph, self.functions, self.device = graph, functions, device
        self.inputs = {name: tensor.to(device) for name, tensor in inputs.items()}
        self._places = draw_places(graph)
        self._tell: Callable[[str], None] | None = None
        self._hooks: list[RemovableHandle] = []
        self._sums: dict[str, Tensor] = {}
        self._plain = _placed(tensors, device)
        leaves = self._make_leaves() if graph.loss else {}
        canonical = {param.name: param.canonical for param in graph.params}
        self._tensors = {
            name: leaves.get(canonical.get(name, name), tensor)
            for name, tensor in self._plain.items()
        }
        self.named = list(leaves.items())
        self.trained = list(leaves.values())

    def _make_leaves(self) -> dict[str, Tensor]:
        leaves: dict[str, Tensor] = {}
        for param in self.graph.params:
            wanted = param.is_trained
            if wanted and param.canonical not in leaves:
                leaf = self._plain[param.name].detach().requires_grad_()
                self._hooks.append(leaf.register_hook(self._adder(param.canonical, leaf)))
                leaves[param.canonical] = leaf
        return leaves

    def forget(self) -> None:
        """Take the hooks off: they hold this subject and are held by it, with all its tensors."""
        for hook in self._hooks:
            hook.remove()

    def _adder(self, name: str, leaf: Tensor) -> Callable[[Tensor], Tensor]:
        """Add up gradients as the runtime does: in memory of their own, while they are warm."""
        nothing = torch.zeros((), dtype=leaf.dtype, device=leaf.device).expand_as(leaf)
        self._sums[name] = torch.zeros_like(leaf)

        def add(gradient: Tensor) -> Tensor:
            if self._tell is not None:
                self._tell(name)
            self._sums[name].add_(gradient)
            return nothing

        return add

    @contextmanager
    def telling(self, tell: Callable[[str], None]) -> Iterator[None]:
        """Call `tell` with each parameter whose gradient is about to be added up."""
        self._tell = tell
        try:
            yield
        finally:
            self._tell = None

    def forward(
        self, watch: Callable[[Op, object], None] | None = None, frozen: bool = False
    ) -> Tensor | None:
        """Run forward; return the loss, if it has a gradient."""
        with nullcontext() if self.graph.loss else torch.no_grad():
            found = run_graph(
                self.graph,
                self._plain if frozen else self._tensors,
                self.inputs,
                key=self._keyed,
                functions=self.functions,
                device=self.device,
                watch=watch,
            )
        loss = found[self.graph.loss] if self.graph.loss else None
        return loss if isinstance(loss, Tensor) and loss.requires_grad else None

    def _keyed(self, op: Op) -> AbstractContextManager[object]:
        return self._seeded(op) if op.name in self._places else nullcontext()

    @contextmanager
    def _seeded(self, op: Op) -> Iterator[None]:
        reseed((0, 0, 0), place_name(*self._places[op.name]), self.device)
        yield

    def backward(self, loss: Tensor, leaves: list[Tensor]) -> None:
        """Make the gradients of some leaves, and add up those of parameters."""
        if leaves:
            torch.autograd.grad([loss], leaves, [torch.full_like(loss, _SHARE)], allow_unused=True)


def _placed(tensors: Mapping[str, Tensor], device: torch.device) -> dict[str, Tensor]:
    """Put tensors on a device, out of autograd's sight; a tensor of two names is copied once."""
    there = {id(tensor): tensor.detach().to(device) for tensor in tensors.values()}
    return {name: there[id(tensor)] for name, tensor in tensors.items()}

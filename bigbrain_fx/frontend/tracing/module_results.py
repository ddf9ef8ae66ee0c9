"""What calls of a model's modules give, beside the same calls in its graph: where the two part.

This file knows modules and graphs; it runs neither.
"""

from __future__ import annotations

import contextlib
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from bigbrain_fx.core import CallArguments, Graph
from bigbrain_fx.frontend.tracing.plain import same_numbers

_Call = tuple[str, int]


@dataclass(frozen=True)
class Results:
    """The tensors that calls of modules gave, by path and number of the call."""

    of: dict[_Call, list[Tensor]] = field(default_factory=dict)

    @contextlib.contextmanager
    def noted(self, model: nn.Module) -> Iterator[None]:
        """Note what calls of a model's modules give meanwhile."""
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

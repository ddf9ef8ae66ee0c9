"""Numbers that a loop changes, as inputs of a trace: tensors stand where they are read.

beta = 0.1  ──▶  tensor(0.1)      beta * kl, beta ** 2     computed by the devices, with any beta
if beta > 0, float(beta) read in Python: a trace has one answer
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_leaves

from bigbrain_fx.frontend.tracing.state.read_names import Place

_IN_PYTHON = ("item", "tolist", "numpy", "__bool__", "__float__", "__int__", "__index__")


def is_number(value: object) -> bool:
    """Whether a value can be an input: a number, and no truth value."""
    return type(value) in (int, float)


def as_input(value: Any, model: nn.Module) -> Tensor:  # noqa: ANN401  # a number
    """Return a number as a tensor that computes the same with those of a model."""
    types = {p.dtype for p in model.parameters()}
    wide = torch.float64 if torch.float64 in types else torch.float32
    return torch.tensor(value, dtype=torch.int64 if isinstance(value, int) else wide)


@contextmanager
def standing_in(places: Mapping[str, Place], inputs: Mapping[str, Tensor]) -> Iterator[None]:
    """Let tensors stand where numbers are read."""
    before = {name: places[name].read() for name in inputs}
    try:
        for name, tensor in inputs.items():
            places[name].write(tensor)
        yield
    finally:
        for name, value in before.items():
            places[name].write(value)


class ReadInPython(TorchFunctionMode):
    """Notes whether Python reads a tensor that is computed from some others.

    Attributes:
        found: it does.

    Args:
        inputs: those.
    """

    def __init__(self, inputs: Sequence[Tensor]) -> None:
        super().__init__()
        self.found = False
        self._computed = list(inputs)  # an id lives as long as its tensor
        self._ids = {id(tensor) for tensor in inputs}

    def __torch_function__(
        self,
        function: Callable[..., Any],
        _kinds: object,
        args: Sequence[Any] = (),
        named: Mapping[str, Any] | None = None,
    ) -> Any:  # noqa: ANN401  # as of torch
        result = function(*args, **(named or {}))
        if not any(id(each) in self._ids for each in tree_leaves((args, named))):
            return result
        self.found |= function.__name__ in _IN_PYTHON
        made = [each for each in tree_leaves(result) if isinstance(each, Tensor)]
        self._computed += made
        self._ids |= {id(tensor) for tensor in made}
        return result

"""What a part that is kept whole asks autograd: never past the tensors that it is given.

    loss(output, batch) asks for d(a)/d(b), and a was computed from b outside of it

A plain run knows that; on the device of the part both are only given, and the answer would be
another one. What is computed from b inside the part may be asked about.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from bigbrain_fx.errors import CaptureError

_INPUTS = 3  # of the arguments of torch's engine after the first


@contextmanager
def asks_within(given: Sequence[Tensor], what: str) -> Iterator[None]:
    """Refuse gradients that go through what a part is given to what that was computed from.

    Raises:
        CaptureError: such a gradient was asked for.
    """
    autograd: Any = torch.autograd
    original = autograd._engine_run_backward
    before = [tensor.grad_fn for tensor in given if tensor.grad_fn is not None]

    def run(outputs: Sequence[Any], *args: Any, **named: Any) -> Any:  # noqa: ANN401  # torch's own
        inputs = args[_INPUTS] if len(args) > _INPUTS else named.get("inputs", ())
        if _goes_past(outputs, before, inputs):
            raise CaptureError(
                f"{what} asks autograd for gradients of what it is given, with respect to "
                "what that was computed from outside of it: on its device nobody knows how",
                code="BX0186",
                help="put what asks, with the modules that it asks about, into a module of its own "
                'and keep that whole: --opaque with its class (or leaves = ["Class"] in the model '
                "file)",
            )
        return original(outputs, *args, **named)

    autograd._engine_run_backward = run  # put back
    try:
        yield
    finally:
        autograd._engine_run_backward = original


def _goes_past(outputs: Sequence[Any], given: Sequence[Any], inputs: Sequence[Any]) -> bool:
    """Whether outputs come from a given tensor that comes from an input, or no input is named."""
    reached = behind([tensor.grad_fn for tensor in outputs if isinstance(tensor, Tensor)])
    wanted = [tensor for tensor in inputs if isinstance(tensor, Tensor)]
    for node in given:
        if node not in reached:
            continue
        past = behind([each for each, _ in node.next_functions])
        if not inputs or any(_is_in(tensor, past) for tensor in wanted):
            return True
    return False


def _is_in(tensor: Tensor, nodes: set[Any]) -> bool:
    if tensor.grad_fn is not None:
        return tensor.grad_fn in nodes
    return any(getattr(node, "variable", None) is tensor for node in nodes)


def behind(starts: Sequence[Any]) -> set[Any]:
    """Return the nodes of autograd's graph that some lead to, themselves among them."""
    found: set[Any] = set()
    waiting = [node for node in starts if node is not None]
    while waiting:
        node = waiting.pop()
        if node not in found:
            found.add(node)
            waiting += [each for each, _ in node.next_functions if each is not None]
    return found

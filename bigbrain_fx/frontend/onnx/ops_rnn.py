"""LSTM, GRU and RNN: torch's own kernels, with ONNX's gates put into torch's order."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, cast

import torch
from torch import Tensor

from bigbrain_fx.errors import CaptureError
from bigbrain_fx.frontend.onnx.nodes import Node, operator
from bigbrain_fx.frontend.onnx.values import Value, tensor_of

# Which of ONNX's gates torch has first, second, ...: ONNX iofc, torch ifgo; ONNX zrh, torch rzn.
_GATES = {"LSTM": (0, 2, 3, 1), "GRU": (1, 0, 2), "RNN": (0,)}
_PLAIN = {"LSTM": ["Sigmoid", "Tanh", "Tanh"], "GRU": ["Sigmoid", "Tanh"], "RNN": ["Tanh"]}


@operator("LSTM", "GRU", "RNN")
def _recurrent(
    node: Node,
    x: Value,
    weight: Value,
    recurrent: Value,
    bias: Value = None,
    lengths: Value = None,
    hidden: Value = None,
    cell: Value = None,
    peephole: Value = None,
) -> tuple[Tensor, ...]:
    _require_plain(node, lengths, peephole)
    w, r = tensor_of(weight), tensor_of(recurrent)
    a = tensor_of(x)
    a = a.transpose(0, 1) if node.attribute("layout", 0) else a
    directions, size = w.shape[0], r.shape[-1]
    weights = _weights(node, w, r, None if bias is None else tensor_of(bias))
    state = _state(a, directions, size, hidden)
    both = directions == 2
    if node.op == "LSTM":
        pair = (state, _state(a, directions, size, cell))
        out, *last = torch.lstm(a, pair, weights, bias is not None, 1, 0.0, False, both, False)
    else:
        run: Callable[..., Any] = torch.gru if node.op == "GRU" else _rnn(node)
        out, *last = run(a, state, weights, bias is not None, 1, 0.0, False, both, False)
    split = out.unflatten(-1, (directions, size)).transpose(1, 2)
    return _laid_out(node, split, last)


def _laid_out(node: Node, out: Tensor, last: list[Tensor]) -> tuple[Tensor, ...]:
    """Return the outputs that the node names, in ONNX's layout."""
    if node.attribute("layout", 0):
        out, last = out.permute(2, 0, 1, 3), [state.transpose(0, 1) for state in last]
    return tuple([out, *last][: len(node.outputs)])


def _require_plain(node: Node, lengths: Value, peephole: Value) -> None:
    kinds = node.attribute("activations", cast("list[str]", []))
    plain = _PLAIN[node.op] * (2 if node.attribute("direction", "") == "bidirectional" else 1)
    relu = node.op == "RNN" and set(kinds) == {"Relu"}
    odd = {
        "sequence lengths": lengths is not None,
        "peepholes": peephole is not None,
        "direction reverse": node.attribute("direction", "forward") == "reverse",
        "clip": node.optional("clip") is not None,
        "activations": bool(kinds) and list(kinds) != plain and not relu,
        "input_forget": bool(node.attribute("input_forget", 0)),
        "linear_before_reset=0": node.op == "GRU" and not node.attribute("linear_before_reset", 0),
    }
    found = [what for what, is_there in odd.items() if is_there]
    if found:
        raise CaptureError(
            f"{node.op} with {', '.join(found)} has no counterpart here", code="BX2089", at=node.at
        )


def _rnn(node: Node) -> Callable[..., tuple[Tensor, ...]]:
    kinds = node.attribute("activations", cast("list[str]", []))
    return torch.rnn_relu if "Relu" in kinds else torch.rnn_tanh


def _weights(node: Node, w: Tensor, r: Tensor, bias: Tensor | None) -> list[Tensor]:
    found: list[Tensor] = []
    for direction in range(w.shape[0]):
        parts = [w[direction], r[direction]]
        if bias is not None:
            parts += list(bias[direction].chunk(2))
        found += [_reordered(node, part) for part in parts]
    return found


def _reordered(node: Node, tensor: Tensor) -> Tensor:
    order = _GATES[node.op]
    gates = tensor.chunk(len(order))
    return torch.cat([gates[i] for i in order]) if len(order) > 1 else tensor


def _state(a: Tensor, directions: int, size: int, given: Value) -> Tensor:
    if given is not None:
        return tensor_of(given)
    return torch.zeros(directions, a.shape[1], size, dtype=a.dtype, device=a.device)

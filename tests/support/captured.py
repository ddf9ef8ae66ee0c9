"""How the tests of frontend/ compare a captured graph with its module; holds no tests."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from bigbrain_fx.core import Graph, Op
from bigbrain_fx.frontend import Captured, run_graph


def gradients(loss: Tensor, model: nn.Module) -> dict[str, Tensor | None]:
    names, parameters = zip(*model.named_parameters(), strict=True)
    found = torch.autograd.grad(loss, parameters, allow_unused=True)
    return dict(zip(names, found, strict=True))


def run(found: Captured, inputs: dict[str, Tensor], **options: Any) -> dict[str, Any]:
    torch.manual_seed(7)
    return run_graph(found.graph, found.tensors, inputs, functions=found.functions, **options)


def assert_same(model: nn.Module, found: Captured, eager: Any, rows: int | None = None) -> None:
    """Compare loss, gradients and buffers, bit by bit, under one global seed."""
    inputs = found.inputs(rows)
    state = {name: value.clone() for name, value in model.state_dict().items()}
    torch.manual_seed(7)
    want = eager(*inputs.values())
    want_gradients = gradients(want, model)
    want_state = {name: value.clone() for name, value in model.state_dict().items()}
    model.load_state_dict(state)
    have = run(found, inputs)[found.graph.loss or ""]
    assert torch.equal(have, want)
    for name, gradient in gradients(have, model).items():
        expected = want_gradients[name]
        assert (gradient is None) == (expected is None), name
        if gradient is not None and expected is not None:
            assert torch.equal(gradient, expected), name
    for name, value in model.state_dict().items():
        assert torch.equal(value, want_state[name]), name
    assert_flags(found)


def assert_flags(found: Captured) -> None:
    """Every value's shape, strides, type and need of a gradient is what the graph says."""
    inputs = found.inputs(3) if found.graph.static_batch is None else found.inputs()
    graph = found.graph.at(3) if found.graph.static_batch is None else found.graph
    names = [op.name for op in graph.ops]
    state = {name: tensor.detach().clone() for name, tensor in found.tensors.items()}
    values = run(found, inputs, values=names)
    for op in graph.ops:
        value = values[op.name]
        tensors = [t for t in (value if op.is_tuple else [value]) if isinstance(t, Tensor)]
        assert len(tensors) == len(op.outputs), op
        for tensor, spec in zip(tensors, op.outputs, strict=True):
            assert tuple(tensor.shape) == spec.shape, op
            assert tensor.stride() == spec.strides, op
            assert str(tensor.dtype) == f"torch.{spec.dtype}", op
            assert tensor.requires_grad == spec.requires_grad, op
    with torch.no_grad():
        for name, tensor in found.tensors.items():
            tensor.copy_(state[name])


def ops_of(graph: Graph, family: str) -> list[Op]:
    return [op for op in graph.ops if op.target.split(".")[1] == family]

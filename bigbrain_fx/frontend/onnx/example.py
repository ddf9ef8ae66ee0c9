"""Example inputs for an ONNX module: random tensors that fit the file's shapes and tables."""

from __future__ import annotations

import torch
from torch import Tensor

from bigbrain_fx.frontend.onnx.module import OnnxModule
from bigbrain_fx.frontend.onnx.nodes import Node
from bigbrain_fx.frontend.onnx.reader import InputSpec

_PASSES_ON = ("Cast", "Identity", "Reshape", "Unsqueeze", "Squeeze", "Slice")


def example_inputs(
    module: OnnxModule, rows: int = 8, length: int = 16, seed: int = 0
) -> dict[str, Tensor]:
    """Make one batch: a free first size is `rows`, any other free size is `length`.

    Whole numbers stay within the tables that they index, else they are 0 or 1; floating-point
    numbers are normal, booleans are true.
    """
    generator = torch.Generator().manual_seed(seed)
    found = {}
    for name, spec in zip(module.input_names, module.file.inputs, strict=True):
        given = enumerate(spec.shape)
        shape = [d if isinstance(d, int) else (length if i else rows) for i, d in given]
        found[name] = _random(spec, shape, _bound(module, spec.name), generator)
    return found


def _random(spec: InputSpec, shape: list[int], bound: int, generator: torch.Generator) -> Tensor:
    if spec.dtype.is_floating_point:
        return torch.randn(shape, generator=generator).to(spec.dtype)
    if spec.dtype == torch.bool:
        return torch.ones(shape, dtype=torch.bool)
    return torch.randint(0, bound, shape, generator=generator).to(spec.dtype)


def _bound(module: OnnxModule, name: str) -> int:
    """Return one more than the largest index that every table reached by an input allows."""
    names, bounds = {name}, [module.file.weights[t].shape[0] for t in _tables(module, name)]
    for node in module.file.body.nodes:
        if node.op in _PASSES_ON and node.inputs[0] in names:
            names.add(node.outputs[0])
            bounds += [module.file.weights[t].shape[0] for t in _tables(module, node.outputs[0])]
    return min(bounds, default=2)


def _tables(module: OnnxModule, index: str) -> list[str]:
    return [
        node.inputs[0]
        for node in module.file.body.nodes
        if _looks_up(node, index) and node.inputs[0] in module.file.weights
    ]


def _looks_up(node: Node, index: str) -> bool:
    return node.op == "Gather" and node.inputs[1] == index and not node.attribute("axis", 0)

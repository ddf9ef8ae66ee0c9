"""Names for a file's tensors: its own where they say a module, else after the node that reads them.

Exporters fold and transpose weights and call them "val_67" or "onnx::MatMul_123"; such a number
differs from layer to layer, so that no two layers would look alike. This file knows no torch.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Sequence
from itertools import takewhile

from bigbrain_fx.frontend.onnx.nodes import Node
from bigbrain_fx.frontend.onnx.reader import OnnxFile

_ROLES = {
    "Add": ("bias", "bias"),
    "Conv": ("", "weight", "bias"),
    "ConvTranspose": ("", "weight", "bias"),
    "GRU": ("", "weight", "recurrent", "bias"),
    "Gather": ("weight", "index"),
    "Gemm": ("", "weight", "bias"),
    "LSTM": ("", "weight", "recurrent", "bias"),
    "LayerNormalization": ("", "weight", "bias"),
    "MatMul": ("weight", "weight"),
    "Mul": ("scale", "scale"),
    "RNN": ("", "weight", "recurrent", "bias"),
}


def tensor_names(file: OnnxFile) -> dict[str, str]:
    """Return a dotted name for each weight and constant of a file."""
    readers: dict[str, list[tuple[Node, int]]] = defaultdict(list)
    for node in file.body.nodes:
        for place, name in enumerate(node.inputs):
            readers[name].append((node, place))
    tensors = [*file.weights, *file.constants]
    kept = {name for name in tensors if _says_module(name, readers[name])}
    taken = Counter(kept)
    return {n: n if n in kept else _fresh(_by_reader(n, readers[n]), taken) for n in tensors}


def _says_module(name: str, readers: Sequence[tuple[Node, int]]) -> bool:
    """Whether a name is one that a person gave: it has a dot, or no scope is known to do better."""
    if "/" in name or "::" in name:
        return False
    return "." in name or not any(node.scope for node, _ in readers)


def _by_reader(name: str, readers: Sequence[tuple[Node, int]]) -> str:
    node, place = readers[0]
    path = _common([node.scope for node, _ in readers])
    roles = _ROLES.get(node.op, ())
    role = roles[place] if place < len(roles) else ""
    return ".".join(part for part in (path, role or node.op.lower()) if part)


def _common(scopes: Sequence[tuple[tuple[str, str], ...]]) -> str:
    """Return the path of the innermost module that all these scopes are in."""
    levels = zip(*scopes, strict=False)
    same = list(takewhile(lambda level: len(set(level)) == 1, levels))
    return same[-1][0][0] if same else ""


def _fresh(name: str, taken: Counter[str]) -> str:
    found, number = name, 1
    while found in taken:
        number += 1
        found = f"{name}_{number}"
    taken[found] += 1
    return found

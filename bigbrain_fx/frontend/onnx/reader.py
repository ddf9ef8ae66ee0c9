"""Read an .onnx file: nodes, constants, inputs; check it, and name every operator that is unknown.

This file knows onnx; it computes nothing.
"""

from __future__ import annotations

import ast
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import onnx
import torch
from google.protobuf.message import DecodeError
from onnx import inliner, numpy_helper
from torch import Tensor

from bigbrain_fx.errors import InputError
from bigbrain_fx.frontend.onnx.nodes import OPERATORS, Node, attributes_of
from bigbrain_fx.frontend.onnx.values import torch_dtype

CONTROL = ("If",)  # run by the module, not by the table
_OLDEST = 9
_DOMAINS = ("", "ai.onnx", "com.microsoft")  # the last one for SimplifiedLayerNormalization only
_Scope = tuple[tuple[str, str], ...]


@dataclass(frozen=True)
class NodeBody:
    """Nodes in order, and the names of their inputs and outputs; an If has two bodies."""

    nodes: tuple[Node, ...]
    outputs: tuple[str, ...]


@dataclass(frozen=True)
class InputSpec:
    """One input of the file; a size that is free is a text ("batch") or None (not even named)."""

    name: str
    shape: tuple[int | str | None, ...]
    dtype: torch.dtype


@dataclass(frozen=True)
class OnnxFile:
    """Contents of an .onnx file.

    Attributes:
        weights: initializers by name. constants: values of Constant nodes by name.
    """

    path: Path
    name: str
    body: NodeBody
    inputs: tuple[InputSpec, ...]
    weights: Mapping[str, Tensor]
    constants: Mapping[str, Tensor]


def read_onnx(path: Path) -> OnnxFile:
    """Read and check an .onnx file; external data must lie beside it.

    Raises:
        InputError: no such file, no ONNX, too old, or operators that are not known here: each is
            named with its first node.
    """
    proto = _load(path)
    opset = {entry.domain: entry.version for entry in proto.opset_import}.get("", 0)
    if opset < _OLDEST:
        raise InputError(
            f"expected operator set {_OLDEST} or newer, found {opset}",
            code="BX2091",
            at=path.name,
            help=f"export again with opset_version={_OLDEST} or newer",
        )
    if proto.functions:
        proto = inliner.inline_local_functions(proto)
    graph = proto.graph
    constants: dict[str, Tensor] = {}
    body = _body(graph, opset, constants)
    _require_known(path, body)
    weights = {entry.name: _tensor(entry) for entry in graph.initializer}
    inputs = tuple(_input(entry) for entry in graph.input if entry.name not in weights)
    return OnnxFile(path, graph.name or path.stem, body, inputs, weights, constants)


def _load(path: Path) -> onnx.ModelProto:
    if not path.is_file():
        raise InputError(
            f"expected an ONNX file at {path}, found nothing", code="BX2092", at=str(path)
        )
    try:
        proto = onnx.load(path)
        onnx.checker.check_model(path)
    except (DecodeError, onnx.checker.ValidationError, ValueError, OSError) as error:
        first = (str(error).splitlines() or [""])[0]
        raise InputError(
            f"this is no ONNX file that can be read: {first}",
            code="BX2093",
            at=path.name,
            help="check it with onnx.checker.check_model; external data must lie beside it",
        ) from error
    return proto


def _body(graph: onnx.GraphProto, opset: int, constants: dict[str, Tensor]) -> NodeBody:
    nodes = []
    kinds: Counter[str] = Counter()
    for proto in graph.node:
        if proto.op_type == "Constant":
            constants[proto.output[0]] = _constant(proto)
            continue
        number = kinds[proto.op_type]
        kinds[proto.op_type] += 1
        nodes.append(_node(proto, number, opset, constants))
    return NodeBody(tuple(nodes), tuple(entry.name for entry in graph.output))


def _node(proto: onnx.NodeProto, number: int, opset: int, constants: dict[str, Tensor]) -> Node:
    bodies = {}
    for attribute in proto.attribute:
        if attribute.type == onnx.AttributeProto.GRAPH:
            constants.update({entry.name: _tensor(entry) for entry in attribute.g.initializer})
            bodies[attribute.name] = _body(attribute.g, opset, constants)
    return Node(
        proto.name or f"{proto.op_type}_{number}",
        proto.op_type if proto.domain in _DOMAINS else f"{proto.domain}.{proto.op_type}",
        tuple(proto.input),
        tuple(proto.output),
        attributes_of(proto),
        opset,
        bodies,
        scope_of(proto),
    )


def _constant(proto: onnx.NodeProto) -> Tensor:
    found = attributes_of(proto)
    kind, value = next(iter(found.items()))
    if isinstance(value, onnx.TensorProto):
        return _tensor(value)
    dtype = torch.float32 if "float" in kind else torch.int64
    return torch.tensor(value, dtype=dtype)


def _tensor(proto: onnx.TensorProto) -> Tensor:
    array = numpy_helper.to_array(proto)
    kind = torch_dtype(proto.data_type, proto.name)
    if kind == torch.bfloat16:
        return torch.from_numpy(array.view(np.int16).copy()).view(kind)
    return torch.from_numpy(np.array(array))


def _input(entry: onnx.ValueInfoProto) -> InputSpec:
    kind = entry.type.tensor_type
    if not entry.type.HasField("tensor_type"):
        raise InputError(f"input {entry.name} is no tensor", code="BX2094", at=entry.name)
    shape = tuple(
        dim.dim_value if dim.HasField("dim_value") else dim.dim_param or None
        for dim in kind.shape.dim
    )
    return InputSpec(entry.name, shape, torch_dtype(kind.elem_type, entry.name))


# --------------------------------------------------------------------------- scopes


def scope_of(proto: onnx.NodeProto) -> _Scope:
    """Return the modules a node belongs to: as torch's exporters wrote it, else by its name."""
    written = {entry.key: entry.value for entry in proto.metadata_props}
    paths = _names(written.get("pkg.torch.onnx.name_scopes"))
    types = _names(written.get("pkg.torch.onnx.class_hierarchy"))
    if paths and len(paths) == len(types):
        pairs = zip(paths[:-1], types[:-1], strict=True)  # the last one is the call itself
        named = [(path, kind.rpartition(".")[2]) for path, kind in pairs if path]
        return () if any(path.startswith("_empty_nn_module") for path, _ in named) else tuple(named)
    return tuple(_by_name(proto.name))


def _names(text: str | None) -> list[str]:
    try:
        found = ast.literal_eval(text or "[]")
    except (ValueError, SyntaxError):
        return []
    return [str(item) for item in found] if isinstance(found, list) else []


def _by_name(name: str) -> Iterator[tuple[str, str]]:
    """Yield scopes of a name such as "/encoder/layer.0/query/MatMul"."""
    parts = name.split("/")[1:-1] if name.startswith("/") else []
    for i, part in enumerate(parts):
        words = [word for word in part.split(".") if not word.isdigit()]
        kind = "".join(word.capitalize() for word in (words or ["block"])[-1].split("_"))
        yield ".".join(parts[: i + 1]), kind


# --------------------------------------------------------------------------- what is not known


def _require_known(path: Path, body: NodeBody) -> None:
    unknown: dict[str, Node] = {}
    for node in _all_nodes(body):
        if node.op not in OPERATORS and node.op not in CONTROL:
            unknown.setdefault(node.op, node)
    if unknown:
        listed = [f"{op}, first in node {node.name}" for op, node in unknown.items()]
        raise InputError(
            f"{path.name} uses operators that are not known here: {', '.join(unknown)}",
            code="BX2095",
            at=path.name,
            notes=tuple(listed[:8]),
            help="export without them (another opset, or torch.onnx.export(..., dynamo=True)), or "
            "split the PyTorch model itself",
        )


def _all_nodes(body: NodeBody) -> Iterable[Node]:
    for node in body.nodes:
        yield node
        for inner in node.bodies.values():
            yield from _all_nodes(inner)

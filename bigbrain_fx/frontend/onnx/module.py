"""ONNX nodes -> nn.Module: parameters under their own names, sub-modules for the file's scopes."""

from __future__ import annotations

import inspect
import re
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from itertools import groupby, takewhile
from pathlib import Path
from typing import cast

import numpy as np
import torch
from torch import Tensor, nn

from bigbrain_fx.errors import BigBrainError, CaptureError
from bigbrain_fx.frontend.onnx import ops_math, ops_nn, ops_rnn, ops_shape  # noqa: F401  # fill the table
from bigbrain_fx.frontend.onnx.nodes import OPERATORS, Node
from bigbrain_fx.frontend.onnx.reader import InputSpec, NodeBody, OnnxFile, read_onnx
from bigbrain_fx.frontend.onnx.values import HOST_LIMIT, Value, host, tensor_of

Environment = dict[str, Value]
Scope = tuple[tuple[str, str], ...]
_KINDS: dict[str, type[OnnxScope]] = {}


class OnnxScope(nn.Module):
    """A module of the exported model: it runs its nodes, and its children's, in order."""

    def __init__(self) -> None:
        super().__init__()
        self._items: list[Node | OnnxScope] = []

    def forward(self, values: Environment) -> None:
        """Run everything in this scope; results go into `values`."""
        for item in self._items:
            if isinstance(item, Node):
                run_node(item, values)
            else:
                item(values)


class OnnxModule(OnnxScope):
    """An ONNX graph as a module; forward takes the file's inputs by name, in its order.

    The module returns a dict of the file's outputs. Floating-point initializers are parameters,
    statistics and index tables are buffers.

    Attributes:
        file: the file as read.
        names: name of a tensor in the file -> its name in `state_dict()`.
        input_names: forward's parameters, for the file's inputs in order.
    """

    def __init__(self, file: OnnxFile) -> None:
        super().__init__()
        self.file = file
        self.names: dict[str, str] = {}
        self._host = _host_constants(file)
        _fill(self, self, _scoped(file.body.nodes), 0)
        self._hold()
        taken: Counter[str] = Counter()
        self.input_names = tuple(_identifier(spec.name, taken) for spec in file.inputs)
        self.output_names = tuple(_identifier(name, taken) for name in file.body.outputs)

    def run(self, inputs: Sequence[Tensor]) -> dict[str, Tensor]:
        """Run the graph on tensors in the order of the file's inputs."""
        values: Environment = dict(self._host)
        for name, place in self.names.items():
            owner, _, attribute = place.rpartition(".")
            values[name] = getattr(self.get_submodule(owner), attribute)
        values.update(zip((spec.name for spec in self.file.inputs), inputs, strict=True))
        OnnxScope.forward(self, values)
        pairs = zip(self.output_names, self.file.body.outputs, strict=True)
        return {name: tensor_of(values[value]) for name, value in pairs}

    def _hold(self) -> None:
        statistics, names = _statistics(self.file.body), tensor_names(self.file)
        for name, tensor in {**self.file.weights, **self.file.constants}.items():
            if name in self._host:
                continue
            owner, attribute = _place(self, names[name])
            trained = tensor.is_floating_point() and name in self.file.weights
            if trained and name not in statistics:
                owner.register_parameter(attribute, nn.Parameter(tensor))
            else:
                owner.register_buffer(attribute, tensor)
            path = next(path for path, module in self.named_modules() if module is owner)
            self.names[name] = f"{path}.{attribute}" if path else attribute


def load_onnx(path: str | Path) -> OnnxModule:
    """Read an .onnx file as a module with trainable parameters.

    Args:
        path: the file; external data must lie beside it.

    Raises:
        InputError: the file cannot be read, or uses an operator that is not supported.
    """
    return _with_signature(read_onnx(Path(path)))


def _with_signature(file: OnnxFile) -> OnnxModule:
    """Make the module with a class of its own: forward's parameters are the file's inputs."""
    taken: Counter[str] = Counter()
    names = [_identifier(spec.name, taken) for spec in file.inputs]
    kind = inspect.Parameter.POSITIONAL_OR_KEYWORD
    signature = inspect.Signature([inspect.Parameter(name, kind) for name in ("self", *names)])

    def forward(self: OnnxModule, *args: Tensor, **kwargs: Tensor) -> dict[str, Tensor]:
        bound = signature.bind(self, *args, **kwargs).arguments
        return self.run([bound[name] for name in names])

    forward.__signature__ = signature  # type: ignore[attr-defined]  # inspect reads it
    made = type(_class_name(file.name), (OnnxModule,), {"forward": forward})
    return cast("OnnxModule", made(file))


# --------------------------------------------------------------------------- building


def _scoped(nodes: Sequence[Node]) -> list[tuple[Scope, Node]]:
    """Pair nodes with scopes; an exporter's own node gets the common scope of its neighbours."""
    known = [node.scope for node in nodes if node.scope]
    found: list[tuple[Scope, Node]] = []
    before: Scope = ()
    ahead = 0
    for node in nodes:
        if node.scope:
            before, ahead = node.scope, ahead + 1
            found.append((node.scope, node))
        else:
            after = known[ahead] if ahead < len(known) else ()
            pairs = zip(before, after, strict=False)
            found.append((tuple(a for a, b in takewhile(lambda p: p[0] == p[1], pairs)), node))
    return found


def _fill(
    root: nn.Module, scope: OnnxScope, nodes: Sequence[tuple[Scope, Node]], depth: int
) -> None:
    """Give a scope its nodes; consecutive nodes of one deeper scope become its child."""
    pieces = [
        (key, list(run))
        for key, run in groupby(nodes, lambda e: e[0][depth] if len(e[0]) > depth else None)
    ]
    count = Counter(key for key, _ in pieces)
    for key, run in pieces:
        child = None
        if key is not None and count[key] == 1:
            child = _scope_at(root, *key)
        if child is None:
            scope._items += [node for _, node in run]
        else:
            scope._items.append(child)
            _fill(root, child, run, depth + 1)


def _scope_at(root: nn.Module, path: str, kind: str) -> OnnxScope | None:
    """Make the module at a dotted path; None when its name cannot be had."""
    parts = path.split(".")
    owner = root
    for part in parts[:-1]:
        if not part:
            return None
        if part not in owner._modules:
            if hasattr(owner, part):
                return None
            owner.add_module(part, nn.Module())
        owner = cast("nn.Module", owner._modules[part])
    last = parts[-1]
    if not last or last in owner._modules or hasattr(owner, last):
        return None
    made = _kind(kind)()
    owner.add_module(last, made)
    return made


def _kind(name: str) -> type[OnnxScope]:
    """Return the class for modules of this name: the names of blocks give their type."""
    plain = _class_name(name)
    if plain not in _KINDS:
        _KINDS[plain] = type(plain, (OnnxScope,), {})
    return _KINDS[plain]


def _place(root: nn.Module, name: str) -> tuple[nn.Module, str]:
    """Find the module and the attribute for a tensor called "layers.0.weight"."""
    parts = [re.sub(r"\W", "_", part) or "_" for part in name.split(".")]
    owner = root
    for part in parts[:-1]:
        if part not in owner._modules:
            if hasattr(owner, part):
                return root, _free(root, "_".join(parts))
            owner.add_module(part, nn.Module())
        owner = cast("nn.Module", owner._modules[part])
    return owner, _free(owner, parts[-1])


def _free(owner: nn.Module, name: str) -> str:
    while hasattr(owner, name):
        name += "_"
    return name


def _class_name(name: str) -> str:
    plain = re.sub(r"\W", "", name)
    return plain if plain.isidentifier() else f"Onnx{plain}"


def _identifier(name: str, taken: Counter[str]) -> str:
    plain = re.sub(r"\W", "_", name)
    plain = plain if plain.isidentifier() else f"input_{plain}"
    taken[plain] += 1
    return plain if taken[plain] == 1 else f"{plain}_{taken[plain]}"


# Inputs that say a shape or an option, by operator; their constants are numbers, not tensors.
SHAPE_INPUTS: Mapping[str, tuple[int, ...]] = {
    "ConstantOfShape": (0,),
    "CumProd": (1,),
    "CumSum": (1,),
    "Dropout": (1, 2),
    "Expand": (1,),
    "OneHot": (1,),
    "Pad": (1, 2, 3),
    "Range": (0, 1, 2),
    "Reshape": (1,),
    "Resize": (2, 3),
    "Slice": (1, 2, 3, 4),
    "Split": (1,),
    "Squeeze": (1,),
    "Tile": (1,),
    "TopK": (1,),
    "Trilu": (1,),
    "Unsqueeze": (1,),
    "Upsample": (1,),
}


def _host_constants(file: OnnxFile) -> Environment:
    """Return the constants that may be shapes, and lone numbers."""
    asked = {
        node.inputs[place]
        for node in file.body.nodes
        for place in SHAPE_INPUTS.get(node.op, ())
        if place < len(node.inputs)
    }
    found: Environment = {"": None}
    for name, tensor in {**file.weights, **file.constants}.items():
        is_shape = not tensor.is_floating_point() and tensor.dim() <= 1
        if (is_shape and tensor.numel() <= HOST_LIMIT) or tensor.dim() == 0 or name in asked:
            found[name] = (
                host(tensor.numpy()) if tensor.dtype != torch.bfloat16 else host(tensor.item())
            )
    return found


def _statistics(body: NodeBody) -> set[str]:
    """Return the names of running statistics: not trained."""
    return {
        name for node in body.nodes if node.op == "BatchNormalization" for name in node.inputs[3:5]
    }


# --------------------------------------------------------------------------- running


def run_node(node: Node, values: Environment) -> None:
    """Run one node on the values by name, and add its results to them.

    Raises:
        CaptureError: the operator is used in a way that has no counterpart; names the node.
    """
    if node.op == "If":
        _run_if(node, values)
        return
    inputs = [values[name] for name in node.inputs]
    try:
        result = OPERATORS[node.op](node, *inputs)
    except BigBrainError as error:
        error.at = error.at or node.at
        raise
    except (RuntimeError, ValueError, TypeError, IndexError) as error:
        first = (str(error).splitlines() or [""])[0]
        raise CaptureError(f"{type(error).__name__}: {first}", code="BX2079", at=node.at) from error
    if node.unread():
        raise CaptureError(
            f"{node.op} with {', '.join(node.unread())} has no counterpart here",
            code="BX2080",
            at=node.at,
        )
    results = result if isinstance(result, tuple | list) else (result,)
    values.update(zip(node.outputs, results, strict=False))


def _run_if(node: Node, values: Environment) -> None:
    condition = values[node.inputs[0]]
    if not isinstance(condition, np.ndarray):
        raise CaptureError(
            "the condition of If depends on the data",
            code="BX2081",
            at=node.at,
            help="export the model with torch.onnx.export(..., dynamo=True), or simplify it first",
        )
    body = node.bodies["then_branch" if bool(condition.reshape(-1)[0]) else "else_branch"]
    inner = dict(values)
    for step in body.nodes:
        run_node(step, inner)
    values.update(zip(node.outputs, (inner[name] for name in body.outputs), strict=True))


# --------------------------------------------------------------------------- names of tensors

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


# --------------------------------------------------------------------------- example inputs

_PASSES_ON = ("Cast", "Identity", "Reshape", "Unsqueeze", "Squeeze", "Slice")


def example_inputs(
    module: OnnxModule, rows: int = 8, length: int = 16, seed: int = 0
) -> dict[str, Tensor]:
    """Make one batch: a free first size is `rows`, any other free size is `length`.

    Integers stay within the tables that they index, else they are 0 or 1. Floating-point numbers
    are normal, booleans are true.
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

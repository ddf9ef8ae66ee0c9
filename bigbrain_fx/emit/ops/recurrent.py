"""Calls of torch.nn's recurrent layers: `made, (hidden, _) = self.cells(x)`.

    hidden = torch.zeros(...)                        self.cells = nn.LSTM(16, 24, num_layers=8)
    torch.lstm(x, [hidden, ...], [self.weight_ih_l0, ...])    becomes    made, _ = self.cells(x)

Written as a function, such a layer would name four tensors for each of its levels. This module
knows what these layers' own forwards run; anything else on their tensors stays a function.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from bigbrain_fx.core import Arg, Const, Graph, ModuleCall, Op, ParamRef, Ref, leaves
from bigbrain_fx.emit.ops.calls import FORMS
from bigbrain_fx.emit.ops.items import Layer, LayerCall, Results
from bigbrain_fx.emit.ops.scope import spec_of

MODULES = "torch.nn.modules.rnn."
GETITEM = "operator.getitem"


@dataclass(frozen=True)
class _Kind:
    """A layer's class, the number of its gates, and how a constructor is told of its op."""

    name: str
    gates: int
    options: tuple[tuple[str, Arg], ...] = ()


KINDS: Mapping[str, _Kind] = {
    "aten.lstm.input": _Kind("LSTM", 4),
    "aten.gru.input": _Kind("GRU", 3),
    "aten.rnn_tanh.input": _Kind("RNN", 1),
    "aten.rnn_relu.input": _Kind("RNN", 1, (("nonlinearity", "relu"),)),
}


@dataclass(frozen=True)
class _Cells:
    """A recurrent op on the tensors of one module, its arguments by name."""

    graph: Graph
    path: str
    kind: _Kind
    bound: Mapping[str, Arg]

    @property
    def levels(self) -> int:
        return int(str(self.bound["num_layers"]))

    @property
    def ways(self) -> tuple[str, ...]:
        """Suffixes of its tensors: one for each direction."""
        return ("", "_reverse") if self.bound["bidirectional"] else ("",)

    @property
    def hidden(self) -> int:
        return self._size("weight_ih_l0", 0) // self.kind.gates

    @property
    def projected(self) -> int:
        """Width that its output is projected to; 0 for none."""
        held = f"{self.path}.weight_hr_l0" in self.graph.param
        return self._size("weight_hr_l0", 0) if held else 0

    @property
    def width(self) -> int:
        return self.projected or self.hidden

    def _size(self, name: str, axis: int) -> int:
        return int(str(self.graph.param[f"{self.path}.{name}"].spec.shape[axis]))

    def tensors(self) -> Iterator[tuple[str, tuple[int, ...]]]:
        """Yield each tensor that the layer has, in the order in which its op takes them."""
        rows, wide = self.kind.gates * self.hidden, self.width
        for level in range(self.levels):
            into = wide * len(self.ways) if level else self._size("weight_ih_l0", 1)
            for way in self.ways:
                end = f"l{level}{way}"
                yield f"{self.path}.weight_ih_{end}", (rows, into)
                yield f"{self.path}.weight_hh_{end}", (rows, wide)
                if self.bound["has_biases"]:
                    yield f"{self.path}.bias_ih_{end}", (rows,)
                    yield f"{self.path}.bias_hh_{end}", (rows,)
                if self.projected:
                    yield f"{self.path}.weight_hr_{end}", (self.projected, self.hidden)

    def layer(self, params: Sequence[str]) -> Layer:
        """Return how the layer is made."""
        spec = self.graph.param[params[0]].spec
        drops = self.bound["dropout"] if self.levels > 1 else 0.0  # between levels: one has none
        dtype = Const(f"torch.{spec.dtype}")
        given: list[tuple[str, Arg, Arg]] = [
            ("num_layers", self.levels, 1),
            *((name, value, None) for name, value in self.kind.options),
            ("bias", self.bound["has_biases"], True),
            ("batch_first", self.bound["batch_first"], False),
            ("dropout", drops, 0.0),
            ("bidirectional", self.bound["bidirectional"], False),
            ("proj_size", self.projected, 0),
            ("dtype", dtype, Const("torch.float32")),
        ]
        options = tuple((name, value) for name, value, default in given if value != default)
        sizes = ("input_size", self._size("weight_ih_l0", 1)), ("hidden_size", self.hidden)
        return Layer(self.kind.name, sizes, options, tuple(params), not spec.requires_grad)

    def starts_at_zero(self, before: Sequence[Op]) -> bool:
        """Whether ops make the states that the layer itself starts from."""
        spec, batch = spec_of(self.graph, self._input), int(not self.bound["batch_first"])
        widths = (self.width, self.hidden)[: len(before)]
        known = {op.name: op for op in before}
        states = [arg.value for arg in leaves((self.bound["hx"],)) if isinstance(arg, Ref)]
        if spec is None or len(before) != len(widths) or sorted(states) != sorted(known):
            return False
        made = [known[state] for state in states]
        if any(op.target != "aten.zeros.default" for op in made):
            return False
        levels = self.levels * len(self.ways)
        wanted = [((levels, spec.shape[batch], width), spec.dtype) for width in widths]
        return [(op.outputs[0].shape, op.outputs[0].dtype) for op in made] == wanted

    def is_batched(self) -> bool:
        """Whether its input has rows: the layer itself does more where there are none."""
        spec = spec_of(self.graph, self._input) if self._input else None
        return spec is not None and len(spec.shape) == 3

    @property
    def _input(self) -> str:
        given = self.bound["input"]
        return given.value if isinstance(given, Ref) else ""


def recurrent_call(
    graph: Graph, module: ModuleCall, ops: Sequence[Op], held: frozenset[str]
) -> LayerCall | None:
    """Return the call of an nn.LSTM, nn.GRU or nn.RNN that ops are, else None.

    `ops` and `held` are as for `layer_call`.
    """
    place = next((i for i, op in enumerate(ops) if op.target in KINDS), None)
    if place is None or module.type != f"{MODULES}{KINDS[ops[place].target].name}":
        return None
    op, before, after = ops[place], ops[:place], ops[place + 1 :]
    bound, results = FORMS[op.target].signature.bind(op), _results(op, after)
    if bound is None or results is None or bound["train"] is not graph.training:
        return None
    params = _own(bound["params"], module.path)
    if not params or set(params) != held:
        return None
    cells = _Cells(graph, module.path, KINDS[op.target], bound)
    if not _is_standard(cells, params) or (before and not cells.starts_at_zero(before)):
        return None
    given = (bound["input"],) if before else (bound["input"], bound["hx"])
    return LayerCall(module, cells.layer(params), op, given, tuple(ops), results)


def _own(params: Arg, path: str) -> list[str]:
    """Return the names of a module's own tensors; nothing where others are among them."""
    given = params if isinstance(params, tuple) else ()
    names = [arg.param for arg in given if isinstance(arg, ParamRef)]
    own = len(names) == len(given) and all(name.startswith(f"{path}.") for name in names)
    return names if own and f"{path}.weight_ih_l0" in names else []


def _is_standard(cells: _Cells, params: Sequence[str]) -> bool:
    """Whether a module has just the tensors that its constructor makes, and all are alike."""
    found = [cells.graph.param[name] for name in params]
    shapes = [(param.name, param.spec.shape) for param in found]
    alike = {(param.kind, param.spec.dtype, param.spec.requires_grad) for param in found}
    plain = len(alike) == 1 and found[0].kind == "parameter"
    return plain and cells.is_batched() and shapes == list(cells.tensors())


def _results(op: Op, after: Sequence[Op]) -> Results | None:
    """Return the parts of a layer's tuple that are taken; None if something else is done with it.

    An nn.LSTM returns its output and a pair of states, the others their output and one state.
    """
    if any(part.target != GETITEM or part.args[0] != Ref(op.name) for part in after):
        return None
    taken = {part.args[1]: part.name for part in after}
    if not after or len(taken) < len(after):
        return None
    first, *states = (taken.get(i) for i in range(len(op.outputs)))
    return (first, tuple(states)) if len(states) > 1 else (first, *states)

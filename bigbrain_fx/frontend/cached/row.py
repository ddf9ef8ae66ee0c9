"""The trace of a model on rows of tokens, both dimensions free, and its dependences on them.

A size T in a shape marks the dimension of positions: names of modules decide nothing.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import TYPE_CHECKING, Any, NoReturn

import sympy  # type: ignore[import-untyped]  # it ships no types
import torch
from torch import Tensor, fx
from torch.export.graph_signature import InputKind

from bigbrain_fx.errors import CaptureError, InputError
from bigbrain_fx.frontend.tracing.export import export_step
from bigbrain_fx.frontend.tracing.step import Loss, Step, input_names, route, without_fast_path
from bigbrain_fx.frontend.translation.batch import Batch, take_apart
from bigbrain_fx.frontend.translation.batch_dims import BatchDims
from bigbrain_fx.frontend.translation.params import tensor_names
from bigbrain_fx.frontend.translation.sources import inside, line_of

if TYPE_CHECKING:
    from torch.export import ExportedProgram


LEAVE_OUT = "leave --kv-cache out: `serve` then computes whole rows"
Sizes = Mapping[sympy.Basic, int]


@dataclass(eq=False)
class Row:
    """A traced model of token rows.

    Attributes:
        step: the user's model, on tensors of its batch.
        program: its trace; the sizes `rows` and `length` are free.
        batch: the example, taken apart.
        tokens, scores: nodes of the trace.
        entry, output: the user's names of both.
        longest: tokens of a row.
        autocast: as of the model file.
    """

    step: Step
    program: ExportedProgram
    batch: Batch
    tokens: fx.Node
    scores: fx.Node
    entry: str
    output: str
    longest: int
    autocast: str | None = None
    _values: dict[fx.Node, Any] = field(default_factory=dict)

    @property
    def model(self) -> torch.nn.Module:
        """The user's model."""
        return self.step.model

    @property
    def rows(self) -> sympy.Basic:
        """The symbol of the rows."""
        return _symbol(self.tokens.meta["val"].shape[0])

    @property
    def length(self) -> sympy.Basic:
        """The symbol of the positions."""
        return _symbol(self.tokens.meta["val"].shape[1])

    @property
    def nodes(self) -> Sequence[fx.Node]:
        """Return the nodes behind the scores, in order."""
        wanted, reached = [self.scores], set()
        while wanted:
            node = wanted.pop()
            if node not in reached:
                reached.add(node)
                wanted += node.all_input_nodes
        return [node for node in self.program.graph.nodes if node in reached]

    @cached_property
    def held(self) -> Mapping[fx.Node, tuple[str, Tensor]]:
        """Parameters, buffers and constants of the trace: the user's names, and the tensors."""
        nodes = {node.name: node for node in self.program.graph.nodes}
        state, constants = self.program.state_dict, self.program.constants
        found = {}
        for spec in self.program.graph_signature.input_specs:
            if spec.kind not in (InputKind.USER_INPUT, InputKind.CUSTOM_OBJ, InputKind.TOKEN):
                name = str(spec.target)
                tensor = state[name] if name in state else constants[name]
                found[nodes[spec.arg.name]] = (inside(name), tensor)
        return found

    @cached_property
    def own(self) -> frozenset[str]:
        """Names of the model's own tensors."""
        return frozenset(tensor_names(self.model))

    @cached_property
    def dependent(self) -> frozenset[fx.Node]:
        """Values that depend on the tokens themselves, and not only on their number."""
        found = {self.tokens}
        for node in self.program.graph.nodes:
            if is_tensor(node) and not found.isdisjoint(node.all_input_nodes):
                found.add(node)
        return frozenset(found)

    @cached_property
    def of_parameters(self) -> frozenset[fx.Node]:
        """Values that a parameter is in."""
        found = {node for node, (_, tensor) in self.held.items() if isinstance(tensor, _PARAMETER)}
        for node in self.program.graph.nodes:
            if not found.isdisjoint(node.all_input_nodes):
                found.add(node)
        return frozenset(found)

    @cached_property
    def sized(self) -> frozenset[fx.Node]:
        """Values whose shape has rows or positions, or that depend on such a value."""
        symbols, found = {self.rows, self.length}, {self.tokens}
        for node in self.program.graph.nodes:
            own = {s for size in shape_of(node) for s in _free(size)}
            if symbols & own or not found.isdisjoint(node.all_input_nodes):
                found.add(node)
        return frozenset(found)

    def positions(self, node: fx.Node) -> list[int]:
        """Return the dimensions that are the positions."""
        return [i for i, size in enumerate(shape_of(node)) if self.is_length(size)]

    def is_length(self, size: object) -> bool:
        """Whether a size is T."""
        return isinstance(size, torch.SymInt) and bool(size.node.expr == self.length)

    def is_rows(self, size: object) -> bool:
        """Whether a size is B."""
        return isinstance(size, torch.SymInt) and bool(size.node.expr == self.rows)

    def table(self, node: fx.Node) -> Any:  # noqa: ANN401  # a tensor, or what a call returns
        """Compute a value that depends on no token, for one row of the greatest length."""
        if node not in self._values:
            self._values[node] = self._computed(node)
        return self._values[node]

    def _computed(self, node: fx.Node) -> Any:  # noqa: ANN401  # as above
        value = node.meta.get("val")
        if isinstance(value, torch.SymInt):
            return self.number(value, {self.rows: 1, self.length: self.longest})
        if node in self.held:
            return self.held[node][1]
        if node.op == "get_attr":
            return getattr(self.program.graph_module, str(node.target))
        args, kwargs = fx.map_arg((node.args, node.kwargs), self.table)
        with torch.no_grad():
            return node.target(*args, **kwargs)  # type: ignore[operator]  # a call

    def number(self, size: object, sizes: Sizes) -> int:
        """Return a size as a number.

        Raises:
            CaptureError: it depends on more than the symbols given.
        """
        expr = size.node.expr if isinstance(size, torch.SymInt) else sympy.Integer(size)
        found = expr.subs(dict(sizes))
        if not found.is_number:
            raise CaptureError(
                f"the size {expr} depends on more than rows and positions", code="BX2016"
            )
        return int(found)


_PARAMETER = torch.nn.Parameter


def row_of(
    model: torch.nn.Module,
    example_batch: object,
    loss: Loss | None,
    autocast: str | None,
    batch_dims: BatchDims | None,
) -> Row:
    """Trace a model on its example batch, rows and positions free.

    Raises:
        InputError: its example has no rows of tokens.
        CaptureError: the trace fixes the length, or the scores need more than tokens.
    """
    how = route(model, example_batch, loss is not None)
    names = input_names(model, example_batch, how)
    batch = take_apart(example_batch, names, tensor_names(model), batch_dims)
    lengths = [e.tensor.shape[1] for e in batch.entries if _is_row(e.tensor) and e.batched]
    if not lengths:
        raise InputError(
            "--kv-cache is for models of rows of tokens, and example_batch() has none: int64, "
            "(rows, positions)",
            code="BX2017",
            help="leave --kv-cache out",
        )
    step = Step(model, loss, batch, how, training=False)
    program = _exported(step, batch, autocast, lengths[0])
    return replace(_found(step, program, batch, lengths[0]), autocast=autocast)


def _is_row(tensor: Tensor) -> bool:
    return tensor.dtype == torch.int64 and tensor.dim() == 2 and tensor.shape[1] > 1


def _shorter(tensor: Tensor, longest: int) -> Tensor:
    """Leave a token out: at a table's own length a cut of it is no cut, and the trace fixes it."""
    cut = _is_row(tensor) and tensor.shape[1] == longest > 3
    return tensor[:, :-1].contiguous() if cut else tensor


def _exported(step: Step, batch: Batch, autocast: str | None, longest: int) -> ExportedProgram:
    tensors = [_shorter(t, longest) for t in batch.sized(max(2, batch.rows)).values()]
    batched = [entry.batched for entry in batch.entries]
    try:
        with torch.no_grad(), without_fast_path():
            return export_step(step, tensors, batched, autocast, longest=longest)
    except Exception as error:  # whatever torch.export raises
        first = (str(error).splitlines() or [""])[0]
        raise CaptureError(
            f"--kv-cache needs a trace that any number of tokens fits, and this model has none: "
            f"{type(error).__name__}: {first[:200]}",
            code="BX2018",
            help=LEAVE_OUT,
        ) from error


def _found(step: Step, program: ExportedProgram, batch: Batch, longest: int) -> Row:
    nodes = {node.name: node for node in program.graph.nodes}
    signature = program.graph_signature
    if signature.buffers_to_mutate:
        name = inside(next(iter(signature.buffers_to_mutate.values())))
        raise CaptureError(
            f"--kv-cache: forward writes into the buffer {name}", code="BX2019", help=LEAVE_OUT
        )
    given = zip(step.seen.output_names, signature.user_outputs, strict=False)
    scores = next(((n, nodes[v]) for n, v in given if v in nodes and _is_scores(nodes[v])), None)
    if scores is None:
        raise CaptureError(
            "--kv-cache: no output has scores (rows, positions, words)",
            code="BX2020",
            help="leave --kv-cache out",
        )
    inputs = [nodes[name] for name in signature.user_inputs]
    row = Row(step, program, batch, inputs[0], scores[1], "", scores[0], longest)
    reached = set(row.nodes)
    used = [(e, n) for e, n in zip(batch.entries, inputs, strict=True) if n in reached]
    if len(used) != 1 or not _is_row(used[0][0].tensor):
        listed = ", ".join(entry.name for entry, _ in used) or "nothing"
        raise CaptureError(
            f"--kv-cache: the scores must come from the tokens alone, and come from {listed}",
            code="BX2021",
            help=LEAVE_OUT,
        )
    row.entry, row.tokens = used[0][0].name, used[0][1]
    if not all(any(_free(size)) for size in shape_of(row.tokens)):
        raise CaptureError(
            f"--kv-cache: the trace holds for rows of {longest} tokens only: the model has a "
            "table or "
            "a size of that length that it does not cut, or a layer goes over them one by one",
            code="BX2022",
            help="take as many positions as there are tokens: table[:tokens.shape[1]]; for LSTM "
            f"or GRU layers {LEAVE_OUT}",
        )
    return row


def _is_scores(node: fx.Node) -> bool:
    value = node.meta.get("val")
    return isinstance(value, Tensor) and value.dim() == 3 and value.is_floating_point()


def is_tensor(node: fx.Node) -> bool:
    """Whether a node is a tensor, or several."""
    value = node.meta.get("val")
    return isinstance(value, Tensor | list | tuple)


def shape_of(node: fx.Node) -> Sequence[Any]:
    """Return the shape of a node's tensor; none for a node that is no single tensor."""
    value = node.meta.get("val")
    return tuple(value.shape) if isinstance(value, Tensor) else ()


def _symbol(size: object) -> sympy.Basic:
    return size.node.expr if isinstance(size, torch.SymInt) else sympy.Integer(size)


def _free(size: object) -> Iterator[sympy.Basic]:
    if isinstance(size, torch.SymInt):
        yield from size.node.expr.free_symbols


def refuse(node: fx.Node, why: str, *, code: str) -> NoReturn:
    """Refuse the form with an op's place.

    Raises:
        CaptureError: always.
    """
    at, line = line_of(node.meta.get("stack_trace"))
    raise CaptureError(
        f"--kv-cache: no form of one position was found: {why}: {line or node.target}",
        code=code,
        at=at or None,
        help=LEAVE_OUT,
    )

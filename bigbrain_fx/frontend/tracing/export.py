"""Run torch.export on a step: with a free batch size when the model allows it, else a fixed one.

This file knows torch.export and its errors; it knows nothing of our graph.
"""

from __future__ import annotations

import contextlib
import functools
import gc
import importlib
import io
import logging
import os
import sys
import traceback
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch._decomp import decompositions
from torch._export.passes import replace_set_grad_with_hop_pass as regions_pass
from torch.export import Dim, ExportedProgram
from torch.fx.proxy import TracerBase
from torch.utils import _traceback as torch_frames, checkpoint as checkpoints

from bigbrain_fx.errors import CaptureError
from bigbrain_fx.frontend.tracing import step as step_file
from bigbrain_fx.frontend.tracing.lines.patches import idle_casts
from bigbrain_fx.frontend.tracing.state.attributes import file_of
from bigbrain_fx.frontend.translation.sizes import env_of, know_lengths
from bigbrain_fx.frontend.translation.sources import is_own, is_users, trail

_STEP = step_file.__file__
Lengths = tuple[tuple[int, str], ...]  # of a tensor: dimensions that are free, and their names


def export_step(
    step: nn.Module,
    tensors: Sequence[Tensor],
    batched: Sequence[bool],
    autocast: str | None,
    *,
    longest: int | None = None,
    lengths: Sequence[Lengths] = (),
) -> ExportedProgram:
    """Export a step; dimension 0 of `batched` tensors stays free, and so do free lengths.

    With `longest` so does dimension 1 of rows of integers of about that length, if it can.

    Raises:
        Exception: whatever torch.export raises; also when the batch, or a length, turned out not to
            be free.
    """
    sizes = [
        _free_sizes(tensor, longest) if free else None
        for tensor, free in zip(tensors, batched, strict=True)
    ]
    for place, own_lengths in enumerate(lengths):
        own = {dim: Dim.DYNAMIC for dim, _ in own_lengths}
        sizes[place] = {**(sizes[place] or {}), **own} or None
    with _patched(), ambient(autocast, tensors), _as_plain(), _plain_checkpoints():
        shapes = {"tensors": tuple(sizes)}
        program = torch.export.export(step, tuple(tensors), dynamic_shapes=shapes, strict=False)
    free = [node.meta["val"].shape[0] for node, is_free in _inputs(program, batched) if is_free]
    if any(isinstance(size, int) for size in free):
        raise CaptureError("the trace fixed the batch size", code="BX2108")
    know_lengths(env_of(program), lengths_in(program, lengths))
    return program


@contextlib.contextmanager
def _patched() -> Iterator[None]:
    """Let torch trace gradients and lines as they are, and say nothing meanwhile."""
    plain = _no_grad_within_autocast, _no_inference_mode
    with quiet(), contextlib.ExitStack() as stack:
        for patch in (*plain, _no_partial_graph, _users_lines, _one_time_step):
            stack.enter_context(patch())
        yield


def lengths_in(program: ExportedProgram, lengths: Sequence[Lengths]) -> dict[Any, str]:
    """Return the symbols of a trace's free lengths, and their names in the graph.

    Args:
        program: as exported.
        lengths: of each tensor.

    Raises:
        CaptureError: the trace holds for one length.
    """
    if not any(lengths):
        return {}
    found = {}
    nodes = (node for node, _ in _inputs(program, [True] * len(lengths)))
    for node, own in zip(nodes, lengths, strict=True):
        for dim, name in own:
            size = node.meta["val"].shape[dim]
            if isinstance(size, int) or not size.node._expr.is_Symbol:
                raise CaptureError(
                    f"the trace fixed the length {size} of {node.name}", code="BX2202"
                )
            found[size.node._expr] = name
    return found


def _free_sizes(tensor: Tensor, longest: int | None) -> dict[int, Any]:
    is_row = tensor.dtype == torch.int64 and tensor.dim() == 2 and tensor.shape[1] > 1
    if longest is None or not is_row or tensor.shape[1] < longest - 1:
        return {0: Dim.DYNAMIC}
    return {0: Dim.DYNAMIC, 1: Dim.AUTO(max=longest)}


def _inputs(
    program: ExportedProgram, batched: Sequence[bool]
) -> Iterator[tuple[torch.fx.Node, bool]]:
    names = program.graph_signature.user_inputs
    nodes = {node.name: node for node in program.graph.nodes if node.op == "placeholder"}
    for name, free in zip(names, batched, strict=True):
        if isinstance(name, str):
            yield nodes[name], free


def ambient(
    autocast: str | None, tensors: Sequence[Tensor]
) -> contextlib.AbstractContextManager[object]:
    """Return the autocast context of the model file."""
    if autocast is None:
        return contextlib.nullcontext()
    kind = tensors[0].device.type if tensors else "cpu"
    kind = "cpu" if kind == "meta" else kind
    return torch.autocast(kind, dtype=getattr(torch, autocast))


@contextlib.contextmanager
def uncompiled() -> Iterator[None]:
    """Run code under torch.compile as its plain calls.

    Inductor would compile the code again for each size, in seconds, and its kernels round
    differently from a trace's calls. `torch.cond` needs a compiler in any case.
    """
    if "torch._dynamo" not in sys.modules:  # nothing is wrapped
        yield
        return
    with torch.compiler.set_stance("default", force_backend="eager"):
        yield


@contextlib.contextmanager
def quiet() -> Iterator[None]:
    """Keep torch's remarks on its own internals, and repeated ones of the model, from the user.

    torch logs the tracebacks of errors that it raises as well; TORCH_LOGS brings them back. The
    user's own handlers and filters get their records as ever: a model may go by them. Nothing
    is compiled by Inductor.
    """
    before = logging.Logger.callHandlers
    with warnings.catch_warnings(), uncompiled():
        warnings.simplefilter("ignore")
        if "TORCH_LOGS" not in os.environ:
            logging.Logger.callHandlers = _call_own_handlers  # type: ignore[method-assign,assignment]
        try:
            yield
        finally:
            logging.Logger.callHandlers = before  # type: ignore[method-assign]


def _call_own_handlers(logger: logging.Logger, record: logging.LogRecord) -> None:
    """Give a record to handlers of the user's classes alone: others show it to people."""
    each: logging.Logger | None = logger
    while each is not None:
        for handler in each.handlers:
            if record.levelno >= handler.level and is_own(file_of(type(handler))):
                handler.handle(record)
        each = each.parent if each.propagate else None


_ASKS = (
    (torch.compiler, ("is_compiling", "is_exporting", "is_dynamo_compiling")),
    (torch.jit, ("is_tracing",)),
)


@contextlib.contextmanager
def _as_plain() -> Iterator[None]:
    """Let the user's own lines see no trace when they query for one, as in training."""
    importlib.import_module("torch._dynamo")  # it notes these functions as it is loaded
    own = [(room, name, getattr(room, name)) for room, names in _ASKS for name in names]
    for room, name, asked in own:
        setattr(room, name, _no_for_users(name, asked))
    try:
        with idle_casts():
            yield
    finally:
        for room, name, asked in own:
            setattr(room, name, asked)


def _no_for_users(name: str, asked: Callable[[], bool]) -> Callable[[], bool]:
    def answer() -> bool:
        code = sys._getframe(1).f_code
        says = name in code.co_names  # torch's C++ asks, too, below a line of the user's
        users = says and is_users(code.co_filename) and "site-packages" not in code.co_filename
        return asked() and not users

    return answer


@contextlib.contextmanager
def _no_inference_mode() -> Iterator[None]:
    """Let torch.inference_mode be torch.no_grad: a trace forgets the former, with its gradients."""
    kind = torch.inference_mode
    own = kind.__enter__, kind.__exit__
    inner: list[torch.set_grad_enabled] = []

    def enter(self: torch.inference_mode) -> None:
        inner.append(torch.set_grad_enabled(torch.is_grad_enabled() and not self.mode))

    def leave(self: torch.inference_mode, *_: object) -> None:
        inner.pop().__exit__(None, None, None)

    kind.__enter__, kind.__exit__ = enter, leave  # type: ignore[method-assign]  # put back
    try:
        yield
    finally:
        kind.__enter__, kind.__exit__ = own  # type: ignore[method-assign]


@contextlib.contextmanager
def _no_grad_within_autocast() -> Iterator[None]:
    """Keep a region of no_grad within one of autocast as a region: torch drops it.

    torch checks whether a section of the graph begins with the switch, and there autocast comes
    first.
    """
    own = regions_pass._is_set_grad_enabled_sub_mod
    begins = (torch.amp.autocast_mode._enter_autocast,)

    def is_region(node: torch.fx.Node, omit_if_same_with_ambient: bool = False) -> bool:
        if node.op != "call_module":
            return False
        body = getattr(node.graph.owning_module, str(node.target))
        inner = (each for each in body.graph.nodes if each.op != "placeholder")
        first = next((each for each in inner if each.target not in begins), None)
        if first is None or first.target is not torch._C._set_grad_enabled:
            return False
        return not omit_if_same_with_ambient or first.args[0] != torch.is_grad_enabled()

    regions_pass._is_set_grad_enabled_sub_mod = is_region  # put back
    try:
        yield
    finally:
        regions_pass._is_set_grad_enabled_sub_mod = own


@contextlib.contextmanager
def _plain_checkpoints() -> Iterator[None]:
    """Treat a non-reentrant checkpoint as plain code: a trace of two nested ones has no gradients.

    A reentrant checkpoint is an autograd.Function, and is plain code where Functions are recorded.
    """
    own = checkpoints._checkpoint_without_reentrant_generator

    def plain(
        _function: object,
        _preserve: object = True,
        context_fn: Callable[[], tuple[Any, Any]] = checkpoints.noop_context_fn,
        *_: object,
        **__: object,
    ) -> Iterator[None]:
        with context_fn()[0]:
            yield

    checkpoints._checkpoint_without_reentrant_generator = plain  # type: ignore[assignment]  # put back
    try:
        yield
    finally:
        checkpoints._checkpoint_without_reentrant_generator = own


@contextlib.contextmanager
def _no_partial_graph() -> Iterator[None]:
    """Drop torch's prints of an unfinished trace; the user's own prints stay."""
    said, graph = io.StringIO(), ""
    try:
        with contextlib.redirect_stderr(said):
            yield
    except Exception as error:
        graph = f"{getattr(error, 'partial_fx_graph', '')}\n"
        raise
    finally:
        sys.stderr.write(said.getvalue().replace(graph, "") if graph.strip() else said.getvalue())


@contextlib.contextmanager
def _one_time_step() -> Iterator[None]:
    """Let recurrent layers find their shapes by one time step: torch's loop takes seconds a layer.

    A recurrent layer stays one op of the trace; torch needs the loop for its result's shape alone.
    """
    layers = {n: getattr(decompositions, n) for n in _LAYERS if hasattr(decompositions, n)}
    for name, layer in layers.items():
        setattr(decompositions, name, functools.partial(_first_step, layer))
    try:
        yield
    finally:
        for name, layer in layers.items():
            setattr(decompositions, name, layer)


_LAYERS = ("one_layer_rnn", "one_layer_lstm")


def _first_step(
    layer: Callable[..., tuple[Tensor, object]], given: Tensor, *args: object, **named: object
) -> tuple[Tensor, object]:
    """Run a recurrent layer on the first of its time steps; return the shapes of all."""
    found, last = layer(given[:1], *args, **named)
    return found.new_empty((given.shape[0], *found.shape[1:])), last


@contextlib.contextmanager
def _users_lines() -> Iterator[None]:
    """Record the innermost line of the user's in every node, helper functions included.

    torch keeps frames of functions called `forward` only, which names the wrong line for an op in a
    helper. Formatting one frame instead of ten is quicker, too. The text of every line of a hundred
    frames is not read for each node, either.
    """
    kept, read = TracerBase._filter_traceback_frames, torch_frames._extract_symbolized_tb
    TracerBase._filter_traceback_frames = _innermost  # type: ignore[method-assign,assignment]  # put back
    torch_frames._extract_symbolized_tb = _unread
    try:
        yield
    finally:
        TracerBase._filter_traceback_frames = kept  # type: ignore[method-assign]
        torch_frames._extract_symbolized_tb = read


def _unread(frames: Sequence[Mapping[str, Any]], skip: int) -> traceback.StackSummary:
    """Return a stack as torch does, outermost frame first, with lines that are read on demand.

    Args:
        frames: innermost first, as torch's `symbolize_tracebacks` gives them.
        skip: innermost frames to leave out.
    """
    stack = traceback.StackSummary()
    for frame in reversed(frames[skip:]):
        place = frame["filename"], frame["line"], frame["name"]
        stack.append(traceback.FrameSummary(*place, lookup_line=False))
    return stack


def _innermost(_tracer: TracerBase, stack: traceback.StackSummary) -> traceback.StackSummary:
    ours = max((i for i, frame in enumerate(stack) if frame.filename == _STEP), default=-1)
    return trail(stack[ours + 1 :])


@contextlib.contextmanager
def without_gc() -> Iterator[None]:
    """Pause the garbage collector: a trace keeps a million objects (25 % faster without it)."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()

"""Rules for an opaque module, checked in plain runs: its tensors, calls and uses of autograd.

    buffers written in place, read as copies  ─▶ kept      anything else ─▶ refused

This file knows modules and autograd's saved tensors; it knows no traces and no graphs.
"""

from __future__ import annotations

import contextlib
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from bigbrain_fx.core import Arg
from bigbrain_fx.errors import CaptureError
from bigbrain_fx.frontend.tracing.state.attributes import OF_TORCH
from bigbrain_fx.frontend.translation.kept import place
from bigbrain_fx.frontend.translation.leaf import own_tensors
from bigbrain_fx.frontend.translation.nests import TensorSlot, decode

if TYPE_CHECKING:
    from bigbrain_fx.frontend.tracing.opaque.call_facts import Facts


def require_found(
    module: nn.Module, before: Mapping[str, Tensor], left: Collection[str] = ()
) -> None:
    """Refuse an opaque module that stores state where a bundle cannot find it.

    Args:
        module: the opaque one.
        before: its own tensors before the call.
        left: attributes that the call sets for later readers.

    Raises:
        CaptureError: names the tensor.
    """
    now = own_tensors(module)
    moved = [name for name, tensor in before.items() if now.get(name) is not tensor]
    held = plain_attributes(module)
    plain = {n: value for n, value in held.items() if isinstance(value, Tensor) and n not in left}
    name = next(iter((*moved, *plain)), None)
    if name is not None:
        dense = plain[name].layout is torch.strided if name in plain else True
        raise CaptureError(
            f"the opaque module {type(module).__name__} keeps the tensor {name!r} where no state "
            "dict finds it",
            code="BX0140e",
            help=_BUFFER if dense else _SPARSE_BUFFERS,
        )


_BUFFER = "register_buffer() it, and write into it in place (self.count.add_(1))"
_SPARSE_BUFFERS = (
    "no trace holds a sparse one: hold coo.indices().clone() and coo.values().clone() as "
    "buffers, of coo = adj.to_sparse_coo().coalesce(), and compute "
    "torch.zeros_like(h).index_add(1, index[0], h[:, index[1]] * value)"
)


def require_tensors(module: nn.Module, result: Arg, state: Sequence[str]) -> None:
    """Refuse lines that depend on state and give other values than tensors: these change by call.

    Raises:
        CaptureError: a trace would have the first call's values for ever.
    """
    leaves: list[object] = []
    decode(result, leaves.append)
    if state and not (leaves and all(isinstance(leaf, TensorSlot) for leaf in leaves)):
        raise CaptureError(
            f"the opaque module {type(module).__name__} goes by {state[0]} and gives numbers "
            "that are no tensors",
            code="BX0141c",
            help="make a larger module opaque, which uses them: --opaque with its class",
        )


def require_unread(module: nn.Module, written: Mapping[str, Tensor], result: object) -> None:
    """Refuse an opaque module with a backward that reads what a later micro-batch's forward writes.

    Args:
        module: the opaque one.
        written: its own tensors that a call has written into, by name.
        result: of the call.

    Raises:
        CaptureError: names the tensor.
    """
    if not written:
        return
    found: list[Tensor] = []
    place(result, found)
    saved = {tensor.untyped_storage()._cdata for tensor in _saved_by(found)}
    name = next((n for n, t in written.items() if t.untyped_storage()._cdata in saved), None)
    if name is None:
        return
    raise CaptureError(
        f"the opaque module {type(module).__name__} writes into {name!r}, and its backward reads "
        "it: forwards of several micro-batches run before the first backward",
        code="BX0140f",
        help=f"compute with a copy: self.{name}.clone(), where what follows uses self.{name}",
    )


def _saved_by(results: list[Tensor]) -> Iterator[Tensor]:
    """Yield the saved tensors of the autograd nodes behind some results.

    It does not use saved_tensors_hooks: torch.func, which opaque code may use, allows none.
    """
    for node in behind([tensor.grad_fn for tensor in results]):
        for name in ("saved_tensors", *(n for n in dir(node) if n.startswith("_saved_"))):
            with contextlib.suppress(Exception):  # written since: a plain backward fails, too
                held = getattr(node, name, None)
                each = held if isinstance(held, tuple) else (held,)
                yield from (tensor for tensor in each if isinstance(tensor, Tensor))


def twice(path: str) -> CaptureError:
    """Refuse a module with state that is called more than once."""
    return CaptureError(
        f"forward calls the opaque module {path} more than once, and it goes by what its calls "
        "leave in attributes: the calls may be on several devices, each with attributes of its own",
        code="BX0160j",
        help=f"let one module call {path}, and make that one opaque: --opaque with its class",
    )


def given_otherwise(path: str) -> CaptureError:
    """Refuse what is given other tensors in a trace than in a run: a mask that only a trace has."""
    return CaptureError(
        f"the opaque module {path} is given other tensors in a trace than when the model runs",
        code="BX0141e",
        help="make a larger module opaque, which makes these: --opaque with its class",
    )


def unsteady(before: Mapping[str, list[Facts]], now: Mapping[str, list[Facts]]) -> CaptureError:
    """Return the difference of two runs at one batch size."""
    path = next(path for path in before if before[path] != now[path])
    pairs = [*zip(before[path], now[path], strict=False)]
    if any(one.given != other.given for one, other in pairs):
        return CaptureError(
            f"the opaque module {path} is given other shapes for other data of the same batch size",
            code="BX0141a",
            help="make a larger module opaque, which makes these: --opaque with its class",
        )
    alike = len(before[path]) == len(now[path])
    if alike and all(one.tensors == other.tensors for one, other in pairs):
        what, how = _other_than_shapes(pairs)
    else:
        what, how = (
            "gives other shapes for other data",
            "return tensors of a fixed shape (pad them)",
        )
    return CaptureError(
        f"the opaque module {path} {what} of the same batch size",
        code="BX0140g",
        help=f"let it {how}, or make a larger module opaque",
    )


def _other_than_shapes(pairs: Sequence[tuple[Facts, Facts]]) -> tuple[str, str]:
    """Return the difference of runs with results of the same shapes, and a remedy."""
    if any(one.fixed != other.fixed for one, other in pairs):
        return (
            "gives what needs no gradient for some data, and what needs one for other data",
            "return h + 0 * self.weight.sum() where it has used no weight",
        )
    if any(one.random != other.random for one, other in pairs):
        return (
            "draws random numbers for some data, and none for other data",
            "draw in either case: keep = torch.rand(n) before the branch",
        )
    return "does other things for other data", "write into the same tensors in either case"


_INPUTS = 3  # of the arguments of torch's engine after the first


@contextmanager
def asks_within(given: Sequence[Tensor], what: str) -> Iterator[None]:
    """Refuse gradients through an opaque part's arguments to the tensors before them.

    Raises:
        CaptureError: such a gradient was requested.
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
                'and make that opaque: --opaque with its class (or leaves = ["Class"] in the model '
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


# --------------------------------------------------------------------------- attributes of others


def plain_attributes(module: nn.Module) -> dict[str, object]:
    """Return all attributes, by path, that are no parameters, buffers or modules."""
    return {
        f"{path}.{name}".removeprefix("."): value
        for path, part in module.named_modules()
        for name, value in vars(part).items()
        if name not in OF_TORCH
    }


def left_by(
    module: nn.Module, before: Mapping[str, object], read: Collection[int]
) -> dict[str, object]:
    """Return the attributes with tensors that a call has set anew, in the module and its modules.

    A list that the call has lengthened does not count: on a device it would grow for ever.

    Args:
        module: the one that was called.
        before: its plain attributes before the call.
        read: ids of the tensors that the call has read: an attribute of before is state.
    """
    state = {name for name in before if any(id(t) in read for t in tensors_in(before[name]))}
    new = {n: v for n, v in plain_attributes(module).items() if v is not before.get(n, _NOTHING)}
    return {name: value for name, value in new.items() if name not in state and tensors_in(value)}


_NOTHING = object()


def tensors_in(value: object) -> list[Tensor]:
    """Return the tensors in a value; none of one that no op can give."""
    found: list[Tensor] = []
    with contextlib.suppress(CaptureError):
        place(value, found)
        return found
    return []


def set_attributes(module: nn.Module, values: Mapping[str, object]) -> None:
    """Set attributes by path, as a call would have left them."""
    for path, value in values.items():
        owner, _, name = path.rpartition(".")
        vars(module.get_submodule(owner))[name] = value

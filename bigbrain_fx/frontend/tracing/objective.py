"""The objective of a graph: a loss that reaches a parameter, gradients that a bundle can add.

This module knows graphs and the three ways to give a loss, not tracing.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.nn.parameter import is_lazy

from bigbrain_fx.core import Graph, Op
from bigbrain_fx.errors import CaptureError, InputError
from bigbrain_fx.frontend.translation.sources import forward_line
from bigbrain_fx.frontend.translation.trace_refusals import BY_DATA

_SPARSE = {
    "aten.embedding.default": 4,
    "aten.embedding_bag.default": 5,
    "aten.embedding_bag.padding_idx": 5,
}
_UNSTORED = (torch.complex128, torch.complex32)
_WAYS = (
    "define loss(output, batch) in the model file; or return a scalar from forward; or an output "
    "with .loss (or the key 'loss')"
)


def require_python(model: nn.Module, loss: object) -> None:
    """Refuse TorchScript, which no trace can enter, and a loss that has trained parameters itself.

    Raises:
        InputError: names a replacement.
    """
    for path, part in model.named_modules():
        if isinstance(part, torch.jit.ScriptModule):
            raise InputError(
                f"the model{f' has a part, {path}, that' if path else ''} is TorchScript, which no "
                "trace can enter",
                code="BX2113",
                help="let model() return the nn.Module itself, and its parts be plain modules, not "
                "torch.jit.script or trace of them",
            )
    owner = loss if isinstance(loss, nn.Module) else getattr(loss, "__self__", None)
    named = owner.named_parameters() if isinstance(owner, nn.Module) else ()
    known = {id(p) for p in model.parameters()}
    name = next((n for n, p in named if p.requires_grad and id(p) not in known), None)
    if name is not None:
        raise InputError(
            f"the loss has a parameter of its own, {name}, which is no part of the model",
            code="BX2114",
            help="make the loss a part of the model, whose forward takes the targets and returns "
            "the loss; or freeze it: requires_grad_(False)",
        )


def require_sizes(model: nn.Module) -> None:
    """Refuse lazy modules that no forward has given sizes: a first batch draws their weights.

    And sparse tensors of the model, which no file of weights holds.

    Raises:
        InputError: names the module.
    """
    for path, part in model.named_modules():
        held = (*part._parameters.values(), *part._buffers.values())
        _require_dense(path, part)
        _require_stored(path, part)
        if any(is_lazy(tensor) for tensor in held if tensor is not None):
            raise InputError(
                f"{path or 'the model'} ({type(part).__name__}) has no sizes before a first "
                "forward, so its weights are not made yet",
                code="BX2115",
                help="give the sizes (Linear(6, 8) for LazyLinear(8)), or run the model once where "
                "it is made: def model(): made = Net(); made(example_batch()['x']); return made",
            )


def _require_dense(path: str, part: nn.Module) -> None:
    for name, tensor in (*part._parameters.items(), *part._buffers.items()):
        if tensor is not None and not is_lazy(tensor) and tensor.layout != torch.strided:
            raise InputError(
                f"{path}{'.' if path else ''}{name} is a sparse tensor ({tensor.layout}), and a "
                "bundle's weights are dense",
                code="BX2117",
                at=forward_line(part),
                help="hold it dense, adj.to_dense(); or, of coo = adj.to_sparse_coo().coalesce(), "
                "hold coo.indices().clone() and coo.values().clone() as buffers, and compute "
                "torch.zeros_like(h).index_add(1, index[0], h[:, index[1]] * value)",
            )


def _require_stored(path: str, part: nn.Module) -> None:
    """Refuse tensors that no safetensors file holds."""
    for name, tensor in (*part._parameters.items(), *part._buffers.items()):
        if tensor is not None and not is_lazy(tensor) and tensor.dtype in _UNSTORED:
            kind = str(tensor.dtype).removeprefix("torch.")
            raise InputError(
                f"{path}{'.' if path else ''}{name} has the type {kind}, which no safetensors "
                "file of a bundle's weights holds",
                code="BX2118",
                at=forward_line(part),
                help="hold its real and imaginary parts, and join them in forward: nn.Parameter("
                "torch.view_as_real(w)), and torch.view_as_complex(self.w); or take complex64",
            )


def require_loss(graph: Graph) -> None:
    """Refuse to train a graph with a loss that does not reach a trained parameter.

    Raises:
        InputError: names the outputs, and how to give a loss.
    """
    if graph.loss is None:
        raise InputError(
            f"{graph.name} has no loss to train on: forward returns {_outputs(graph)}",
            code="BX2120",
            help=_which_way(graph),
        )
    op = graph.op.get(graph.loss)
    if op is None or op.outputs[0].requires_grad:
        return
    frozen = not any(param.spec.requires_grad for param in graph.params)
    raise InputError(
        f"the loss of {graph.name} has no gradient: "
        + ("no parameter requires one" if frozen else "no path leads from it to a parameter"),
        code="BX2121",
        at=op.source or None,
        help="leave requires_grad of the parameters to be trained True"
        if frozen
        else "leave .detach(), torch.no_grad() and what has no gradient (argmax, ==, .long()) out "
        "of the path from the parameters to the loss",
    )


def _outputs(graph: Graph) -> str:
    said = [
        f"{'a tensor' if name == 'output' else name} {_shape(graph, value)}"
        for name, value in graph.output_names
    ]
    return ", ".join(said) or "no tensor"


def _shape(graph: Graph, value: str) -> str:
    op = graph.op.get(value)
    spec = op.outputs[0] if op is not None else graph.input[value].spec
    return "(a scalar)" if not spec.shape else f"[{', '.join(map(str, spec.shape))}]"


def _which_way(graph: Graph) -> str:
    """Say how to give a loss; where an output is a scalar that has a gradient, take that."""
    for name, value in graph.output_names:
        op = graph.op.get(value)
        if op is not None and not op.outputs[0].shape and op.outputs[0].requires_grad:
            key = name if name.isdigit() else repr(name)
            return f"if output {name} is the loss: def loss(output, batch): return output[{key}]"
    return _WAYS


def require_dense(graph: Graph) -> None:
    """Refuse sparse gradients, which devices cannot add up.

    Raises:
        CaptureError: names the line.
    """
    for op in _all(graph.ops):
        position = _SPARSE.get(op.target)
        given = dict(op.kwargs).get("sparse", False)
        if position is not None and len(op.args) > position:
            given = op.args[position]
        if given is True and op.outputs[0].requires_grad:
            raise CaptureError(
                f"the gradient of {', '.join(op.params) or op.name} is sparse, and devices "
                "exchange and add dense ones",
                code="BX0190",
                at=op.source or None,
                notes=(op.code,) if op.code else (),
                help="sparse=False: the same numbers (in the optimizer Adam for SparseAdam)",
            )


def require_constants_unwritten(
    graph: Graph, tensors: Mapping[str, Tensor], model: nn.Module, loss: object
) -> None:
    """Refuse to write into a plain attribute, or into a tensor that the loss alone reaches.

    Other values that forward writes, such as a teacher in a list, are constants of a bundle.

    Raises:
        CaptureError: names the line.
    """
    plain = [t for part in model.modules() for t in vars(part).values() if isinstance(t, Tensor)]
    kept = {0, *map(_address, (*model.parameters(), *model.buffers()))}
    outside = set(map(_address, (*plain, *_named_tensors(loss)))) - kept
    constants = {p.name for p in graph.params if p.kind == "constant"}
    for name, op in _written(graph).items():
        if name in constants and _address(tensors[name]) in outside:
            said = "x".join(map(str, graph.param[name].spec.shape)) or "one number"
            raise CaptureError(
                "forward or loss writes into a tensor that is no buffer of the model "
                f"({name}, {said}): no state dict has it, "
                "and no bundle would keep it",
                code="BX0160b",
                at=op.source or None,
                notes=(op.code,) if op.code else (),
                help="make it a buffer: self.register_buffer('seen', torch.zeros(8)) in __init__; "
                "a teacher or criterion that stands outside is held by the model (self.teacher = "
                "TEACHER in __init__, called in forward), or put into eval() so that its norms "
                "count nothing",
            )


def _named_tensors(loss: object) -> Iterator[Tensor]:
    """Yield the tensors that a loss function's code names, and tensors of modules that it names."""
    code, scope = getattr(loss, "__code__", None), getattr(loss, "__globals__", {})
    held = [scope.get(name) for name in code.co_names] if code is not None else [loss]
    held += [cell.cell_contents for cell in getattr(loss, "__closure__", None) or ()]
    for value in held:
        if isinstance(value, nn.Module):
            yield from (*value.parameters(), *value.buffers())
        elif isinstance(value, Tensor):
            yield value


def _address(tensor: Tensor) -> int:
    """Return where a tensor's numbers are; 0 where it has none of its own."""
    if isinstance(tensor, FakeTensor) or tensor.layout != torch.strided:
        return 0
    return tensor.data_ptr() if tensor.device.type != "meta" and tensor.numel() else 0


def _written(graph: Graph) -> Mapping[str, Op]:
    """Return the tensors that forward writes into, each with the first op that does."""
    canonical = {param.name: param.canonical for param in graph.params}
    writers: dict[str, Op] = {}
    for op in _all(graph.ops):
        for name in op.mutates:
            writers.setdefault(canonical.get(name, name), op)
    return writers


def on_written(names: Sequence[str]) -> tuple[str, ...]:
    """Return the remark on entries of the batch that forward or loss write into."""
    if not names:
        return ()
    return (
        f"forward or loss writes into the batch in place ({', '.join(names[:3])}): each step "
        "begins with what batches() gave, also where it gives the same memory again; a plain loop "
        "would go on from what was written there (x = x * 2 for x.mul_(2) leaves no doubt)",
    )


def require_numbers(graph: Graph, tensors: Mapping[str, Tensor]) -> None:
    """Refuse a trace that holds a tensor of torch's tracer: it came in through `.data`.

    Refuse a constant of forward's that no safetensors file holds, too.

    Raises:
        CaptureError: names the replacement.
    """
    for name, tensor in tensors.items():
        if isinstance(tensor, FakeTensor):
            raise BY_DATA.error(None)
        if tensor.dtype in _UNSTORED:
            raise _not_stored(graph, name, tensor.dtype)


def _not_stored(graph: Graph, name: str, dtype: torch.dtype) -> CaptureError:
    reader = next((op for op in graph.ops if name in op.params), None)
    kind = str(dtype).removeprefix("torch.")
    return CaptureError(
        f"forward or loss holds a constant of the type {kind} ({name}), which no "
        "safetensors file of a bundle's weights holds",
        code="BX0161",
        at=(reader.source if reader else "") or None,
        notes=(reader.code,) if reader and reader.code else (),
        help="give it the type complex64 (dtype=torch.complex64); or join it there of two real "
        "ones: torch.complex(torch.tensor(1.0), torch.tensor(2.0)) for torch.tensor(1 + 2j)",
    )


def _all(ops: tuple[Op, ...]) -> Iterator[Op]:
    for op in ops:
        yield op
        if op.body is not None:
            yield from _all(op.body.ops)


def is_one_value(error: BaseException) -> bool:
    """Whether a norm in train mode refuses one value per channel: a probe was too small."""
    return isinstance(error, ValueError) and "more than 1 value per channel" in str(error)

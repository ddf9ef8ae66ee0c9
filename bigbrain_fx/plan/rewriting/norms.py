"""A BatchNorm of inference behind a convolution -> the convolution with its weights scaled.

    norm(conv(x, w))      becomes      conv(x, w * s) + (bias - mean * s)      s = gain / sqrt(var)

In inference a BatchNorm is a number and a shift for each channel. They are folded where they are
used, from the model's own tensors: nothing is stored under another name.
Source: Jacob et al., CVPR 2018, section 3.2.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from bigbrain_fx.core import Arg, Graph, Op, ParamRef, Ref, RewritePlace, TensorSpec
from bigbrain_fx.plan.rewriting.making import fresh, is_plain, made_like
from bigbrain_fx.planning import mutated_roots

_CONV = "aten.conv2d.default"
_NORM = "aten.batch_norm.default"


def find(graph: Graph) -> Iterator[RewritePlace]:
    """Yield the norms that fold into the convolution before them; none in training."""
    if graph.training:
        return
    written = mutated_roots(graph)
    for op in graph.ops:
        conv = _before(graph, op)
        if conv is None or not is_plain(graph, conv.name, written):
            continue
        if graph.consumers[conv.name] == (op.name,) and not written & {*op.params, *conv.params}:
            yield _place(graph, conv, op)


def _before(graph: Graph, op: Op) -> Op | None:
    """Return the convolution whose result alone a norm of inference reads."""
    match op.args:
        case (Ref(v), ParamRef(), ParamRef(), ParamRef(), ParamRef(), False, _, float(), _):
            conv = graph.op.get(v)
            is_norm = op.target == _NORM and not op.kwargs and conv is not None
            return conv if is_norm and conv is not None and _is_conv(conv) else None
    return None


def _is_conv(op: Op) -> bool:
    match op.args:
        case (Ref(), ParamRef(), *_):
            return op.target == _CONV and not op.kwargs and op.outputs[0].dtype == "float32"
    return False


def _place(graph: Graph, conv: Op, norm: Op) -> RewritePlace:
    made = tuple(_made(graph, conv, norm))
    specs = [graph.param[name].spec for name in (*conv.params, *norm.params)]
    alike = repr((conv.args[3:], norm.args[5:], conv.outputs, specs))
    layers = (norm.module_path or norm.name,)
    return RewritePlace("norms", (conv.name, norm.name), norm.name, made, layers, alike)


def _made(graph: Graph, conv: Op, norm: Op) -> Iterator[Op]:
    """Yield the arithmetic of one norm, in the words of the module that calls both."""
    _, gain, shift, mean, variance, _, _, eps, _ = norm.args
    weight, bias = conv.args[1], conv.args[2] if len(conv.args) > 2 else None
    around = _around(conv, norm)
    assert isinstance(weight, ParamRef) and isinstance(gain, ParamRef)
    filters, channel = graph.param[weight.param].spec, graph.param[gain.param].spec
    names = iter(fresh(graph, f"{norm.name}_{n}") for n in range(9))

    def put(target: str, *args: Arg, spec: TensorSpec = channel) -> Op:
        nbytes = spec.nbytes
        return made_like(
            norm, next(names), target, args, (replace(spec, requires_grad=False),),
            modules=around, reads_bytes=2 * nbytes, writes_bytes=nbytes,
        )

    steady = put("aten.add.Tensor", variance, eps)
    root = put("aten.rsqrt.default", Ref(steady.name))
    scale = put("aten.mul.Tensor", gain, Ref(root.name))
    wide = replace(channel, shape=(*channel.shape, 1, 1, 1))
    column = put("aten.view.default", Ref(scale.name), (-1, 1, 1, 1), spec=wide)
    column = replace(column, view_of=scale.name, reads_bytes=0, writes_bytes=0)
    scaled = put("aten.mul.Tensor", weight, Ref(column.name), spec=filters)
    yield from (steady, root, scale, column, scaled)
    centre: Arg = mean
    if isinstance(bias, ParamRef):
        off = put("aten.sub.Tensor", mean, bias)
        yield off
        centre = Ref(off.name)
    moved = put("aten.mul.Tensor", centre, Ref(scale.name))
    added = put("aten.sub.Tensor", shift, Ref(moved.name))
    yield from (moved, added)
    args = (conv.args[0], Ref(scaled.name), Ref(added.name), *conv.args[3:])
    yield made_like(
        conv, norm.name, _CONV, args, norm.outputs[:1], modules=around, flops=conv.flops,
        reads_bytes=conv.reads_bytes, writes_bytes=conv.writes_bytes,
    )


def _around(conv: Op, norm: Op) -> tuple[object, ...]:
    """Return the module calls that both belong to."""
    pairs = zip(conv.modules, norm.modules, strict=False)
    return tuple(one for one, other in pairs if one == other)

"""A BatchNorm of inference behind a convolution -> the convolution with its weights scaled.

    norm(conv(x, w))      becomes      conv(x, w * s) + (bias - mean * s)      s = gain / sqrt(var)

In inference a BatchNorm is a number and a shift for each channel. They are folded where they are
used, from the model's own tensors: nothing is stored under another name.
Source: Jacob et al., CVPR 2018, section 3.2.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field, replace

from bigbrain_fx.core import Arg, Graph, ModuleCall, Op, ParamRef, Ref, RewritePlace
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
    """Return the convolution whose result a norm of inference reads."""
    match op.args:
        case (Ref(v), ParamRef(), ParamRef(), ParamRef(), ParamRef(), False, _, float(), _):
            conv = graph.op.get(v) if op.target == _NORM and not op.kwargs else None
            return conv if conv is not None and _is_conv(conv) else None
    return None


def _is_conv(op: Op) -> bool:
    match op.args:
        case (Ref(), ParamRef()) | (Ref(), ParamRef(), None | ParamRef(), *_):
            return op.target == _CONV and not op.kwargs and op.outputs[0].dtype == "float32"
    return False


def _place(graph: Graph, conv: Op, norm: Op) -> RewritePlace:
    specs = [graph.param[name].spec for name in (*conv.params, *norm.params)]
    alike = repr((conv.args[3:], norm.args[5:], conv.outputs, specs))
    layers = (norm.module_path or norm.name,)
    made = _Folding(graph, conv, norm).made()
    return RewritePlace("norms", (conv.name, norm.name), norm.name, made, layers, alike)


@dataclass
class _Folding:
    """The ops that stand for a convolution and its norm, in the words of who calls both."""

    graph: Graph
    conv: Op
    norm: Op
    ops: list[Op] = field(default_factory=list)

    def made(self) -> tuple[Op, ...]:
        """Return them in order."""
        _, gain, shift, mean, variance, _, _, eps, _ = self.norm.args
        weight, bias = self.conv.args[1], self.conv.args[2] if len(self.conv.args) > 2 else None
        steady = self._op("steady", "aten.add.Tensor", (variance, eps), gain)
        root = self._op("root", "aten.rsqrt.default", (steady,), gain)
        scale = self._op("scale", "aten.mul.Tensor", (gain, root), gain)
        column = self._column(scale, gain)
        filters = self._op("filters", "aten.mul.Tensor", (weight, column), weight)
        if bias is not None:
            mean = self._op("centre", "aten.sub.Tensor", (mean, bias), gain)
        moved = self._op("moved", "aten.mul.Tensor", (mean, scale), gain)
        added = self._op("added", "aten.sub.Tensor", (shift, moved), gain)
        args, around = (self.conv.args[0], filters, added, *self.conv.args[3:]), self._around()
        conv = replace(self.conv, name=self.norm.name, args=args, modules=around, saves=None)
        return (*self.ops, replace(conv, lines=self.conv.lines[: len(around) + 1]))

    def _op(self, word: str, target: str, args: tuple[Arg, ...], like: Arg) -> Ref:
        """Put an op whose result is like one of the model's tensors."""
        assert isinstance(like, ParamRef)
        spec = replace(self.graph.param[like.param].spec, requires_grad=False)
        name, around = fresh(self.graph, f"{self.norm.name}_{word}"), self._around()
        made = made_like(self.norm, name, target, args, (spec,), modules=around, moves=spec)
        self.ops.append(made)
        return Ref(name)

    def _column(self, scale: Ref, like: Arg) -> Ref:
        """Put a view of the scales: one for each filter."""
        found = self._op("column", "aten.view.default", (scale, (-1, 1, 1, 1)), like)
        made = self.ops[-1]
        wide = replace(made.outputs[0], shape=(*made.outputs[0].shape, 1, 1, 1), strides=(1,) * 4)
        nothing = replace(made, flops=0, reads_bytes=0, writes_bytes=0)
        self.ops[-1] = replace(nothing, outputs=(wide,), view_of=scale.value)
        return found

    def _around(self) -> tuple[ModuleCall, ...]:
        """Return the module calls that both belong to."""
        pairs = zip(self.conv.modules, self.norm.modules, strict=False)
        return tuple(one for one, other in pairs if one == other)

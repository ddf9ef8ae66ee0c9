"""Calls of torch.nn layers: ops that are exactly what a layer's own forward runs become its call.

    F.linear(x, self.q.weight, self.q.bias)      becomes      self.q = nn.Linear(64, 64); self.q(x)

Only the layer's standard call on its own tensors counts; whatever else is done with them stays a
function. This module knows the layers' constructors; it knows nothing of stages or text.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TypeAlias

from bigbrain_fx.core import Arg, Const, Graph, ModuleCall, Op, ParamRef, Ref, TensorSpec
from bigbrain_fx.emit.ops.call_template import short
from bigbrain_fx.emit.ops.calls import FORMS
from bigbrain_fx.emit.ops.items import Layer, LayerCall
from bigbrain_fx.emit.ops.layer_table import ACTIVATIONS, POOLS

MODULES = "torch.nn.modules."
COUNTER = "num_batches_tracked"
Arguments: TypeAlias = list[tuple[str, Arg]]


class _NoLayerError(Exception):
    """The ops are something else than the layer's standard call."""


@dataclass
class _LayerOp:
    """One op of a layer, its arguments by name, the ops before it, and the tensors seen so far."""

    graph: Graph
    path: str
    op: Op
    bound: Mapping[str, Arg]
    before: Sequence[Op]
    params: list[str] = field(default_factory=list)

    def input(self, name: str = "input") -> Arg:
        """Return the value that the layer reads."""
        arg = self.bound[name]
        if not isinstance(arg, Ref):
            raise _NoLayerError
        return arg

    def tensor(self, name: str, attribute: str | None = None) -> TensorSpec | None:
        """Return the spec of the layer's own tensor that an argument is; None if there is none."""
        arg, own = self.bound.get(name), f"{self.path}.{attribute or name}"
        if arg is None:
            return None
        if arg != ParamRef(own):
            raise _NoLayerError
        self.params.append(own)
        return self.graph.param[own].spec

    def needed(self, name: str, attribute: str | None = None) -> TensorSpec:
        """Return the spec of a tensor that the layer must have."""
        spec = self.tensor(name, attribute)
        if spec is None:
            raise _NoLayerError
        return spec

    def options(self, **defaults: Arg) -> Arguments:
        """Return the arguments that differ from the constructor's defaults."""
        given = [(name, self.bound[name]) for name in defaults]
        if any(isinstance(value, Ref | ParamRef) for _, value in given):
            raise _NoLayerError
        return [(name, value) for name, value in given if repr(value) != repr(defaults[name])]


Made: TypeAlias = tuple[Arguments, Arguments, Arg]
"""Positional and keyword arguments of the constructor, and the value that the layer reads."""


def layer_call(
    graph: Graph, module: ModuleCall, ops: Sequence[Op], held: frozenset[str]
) -> LayerCall | None:
    """Return the call of a torch.nn layer that ops are, else None.

    `ops` are all of that call, sizes left out; the layer must have all of `held`, the stage's
    tensors below the module's path.
    """
    name = module.type.rpartition(".")[2]
    if not module.type.startswith(MODULES) or name not in RULES or not ops:
        return None
    rule, op = RULES[name], ops[-1]
    form = FORMS.get(op.target)
    bound = form.signature.bind(op) if form else None
    if bound is None or op.target.partition(".")[2] not in rule.targets or op.is_tuple:
        return None
    call = _LayerOp(graph, module.path, op, bound, ops[:-1])
    try:
        args, options, given = rule.make(call)
        options = options + _dtype(call)
        frozen = _frozen(call)
    except _NoLayerError:
        return None
    if call.before or set(call.params) != held:
        return None
    layer = Layer(name, tuple(args), tuple(options), tuple(call.params), frozen)
    return LayerCall(module, layer, op, (given,), tuple(ops))


def _dtype(call: _LayerOp) -> Arguments:
    """Return the dtype of the layer's floating tensors; mixed ones are no standard layer."""
    specs = [call.graph.param[name].spec for name in call.params if not name.endswith(COUNTER)]
    dtypes = {spec.dtype for spec in specs}
    if len(dtypes) > 1:
        raise _NoLayerError
    return [] if dtypes <= {"float32"} else [("dtype", Const(f"torch.{dtypes.pop()}"))]


def _frozen(call: _LayerOp) -> bool:
    """Whether no parameter is trained; some trained and some not are no standard layer."""
    found = [call.graph.param[name] for name in call.params]
    buffers = ("running_mean", "running_var", COUNTER)
    for param in found:
        is_buffer = param.name.rpartition(".")[2] in buffers
        if (param.kind == "parameter") == is_buffer:
            raise _NoLayerError
    trained = {param.spec.requires_grad for param in found if param.kind == "parameter"}
    if len(trained) > 1:
        raise _NoLayerError
    return trained == {False}


def _linear(call: _LayerOp) -> Made:
    out, into = call.needed("weight").shape
    bias = call.tensor("bias")
    options: Arguments = [] if bias else [("bias", False)]
    return [("in_features", into), ("out_features", out)], options, call.input()


def _embedding(call: _LayerOp) -> Made:
    rows, columns = call.needed("weight").shape
    options = call.options(padding_idx=-1, scale_grad_by_freq=False, sparse=False)
    return [("num_embeddings", rows), ("embedding_dim", columns)], options, call.input("indices")


def _layer_norm(call: _LayerOp) -> Made:
    weight, bias = call.tensor("weight"), call.tensor("bias")
    shape = call.bound["normalized_shape"]
    options = call.options(eps=1e-05)
    if weight is None:
        options.append(("elementwise_affine", False))
    elif bias is None:
        options.append(("bias", False))
    return [("normalized_shape", _single(shape))], options, call.input()


def _rms_norm(call: _LayerOp) -> Made:
    options = call.options(eps=None)
    if call.tensor("weight") is None:
        options.append(("elementwise_affine", False))
    return [("normalized_shape", _single(call.bound["normalized_shape"]))], options, call.input()


def _single(shape: Arg) -> Arg:
    return shape[0] if isinstance(shape, tuple) and len(shape) == 1 else shape


def _group_norm(call: _LayerOp) -> Made:
    weight, _ = call.tensor("weight"), call.tensor("bias")
    options = call.options(eps=1e-05) + ([] if weight else [("affine", False)])
    channels = weight.shape[0] if weight else call.op.outputs[0].shape[1]
    return (
        [("num_groups", call.bound["num_groups"]), ("num_channels", channels)],
        options,
        (call.input()),
    )


def _batch_norm(call: _LayerOp) -> Made:
    weight, _ = call.tensor("weight"), call.tensor("bias")
    mean, _ = call.needed("running_mean"), call.needed("running_var")
    if call.bound["training"] is not call.graph.training:
        raise _NoLayerError
    if call.graph.training:
        _count_batches(call)
    options = call.options(eps=1e-05, momentum=0.1) + ([] if weight else [("affine", False)])
    return [("num_features", mean.shape[0])], options, call.input()


def _count_batches(call: _LayerOp) -> None:
    counter = f"{call.path}.{COUNTER}"
    counted = [(op.target, op.args, op.kwargs) for op in call.before]
    if counted != [("aten.add_.Tensor", (ParamRef(counter), 1), ())]:
        raise _NoLayerError
    call.before = ()
    call.params.append(counter)


def _conv(call: _LayerOp) -> Made:
    out, into, *kernel = call.needed("weight").shape
    options = call.options(stride=1, padding=0, dilation=1, groups=1)
    options += [] if call.tensor("bias") else [("bias", False)]
    groups = call.bound["groups"]
    if not isinstance(groups, int) or not isinstance(into, int):
        raise _NoLayerError
    size = short("kernel_size", tuple(kernel))
    args: Arguments = [("in_channels", into * groups), ("out_channels", out), ("kernel_size", size)]
    return args, options, call.input()


def _conv_back(call: _LayerOp) -> Made:
    into, out, *kernel = call.needed("weight").shape
    options = call.options(stride=1, padding=0, output_padding=0, groups=1)
    options += [] if call.tensor("bias") else [("bias", False)]
    options += call.options(dilation=1)
    groups = call.bound["groups"]
    if not isinstance(groups, int) or not isinstance(out, int):
        raise _NoLayerError
    size = short("kernel_size", tuple(kernel))
    args: Arguments = [("in_channels", into), ("out_channels", out * groups), ("kernel_size", size)]
    return args, options, call.input()


def _dropout(call: _LayerOp) -> Made:
    if call.bound["train"] is not True or not call.graph.training:
        raise _NoLayerError
    return [("p", call.bound["p"])], [], call.input()


def _activation(name: str) -> Callable[[_LayerOp], Made]:
    defaults = ACTIVATIONS[name][1]
    fixed = ACTIVATIONS[name][2]

    def make(call: _LayerOp) -> Made:
        if any(repr(call.bound.get(key)) != repr(value) for key, value in fixed.items()):
            raise _NoLayerError
        return [], call.options(**defaults), call.input("self")

    return make


def _prelu(call: _LayerOp) -> Made:
    (count,) = call.needed("weight").shape
    options: Arguments = [] if count == 1 else [("num_parameters", count)]
    return [], options, call.input("self")


def _softmax(call: _LayerOp) -> Made:
    if call.bound["dtype"] is not None:
        raise _NoLayerError
    return [], call.options(dim=None), call.input("self")


def _pool(name: str) -> Callable[[_LayerOp], Made]:
    defaults = POOLS[name][1]

    def make(call: _LayerOp) -> Made:
        size = call.bound["kernel_size"]
        options = call.options(**defaults)
        options = [(key, arg) for key, arg in options if key != "stride" or arg != size]
        if isinstance(size, Ref | ParamRef) or call.bound["stride"] == ():
            raise _NoLayerError
        return [("kernel_size", size)], options, call.input("self")

    return make


def _adaptive(call: _LayerOp) -> Made:
    size = call.bound["output_size"]
    items = size if isinstance(size, tuple) else (size,)
    if not all(type(item) is int for item in items):
        raise _NoLayerError
    return [("output_size", size)], [], call.input("self")


def _flatten(call: _LayerOp) -> Made:
    return [], call.options(start_dim=1, end_dim=-1), call.input("self")


@dataclass(frozen=True)
class _Rule:
    targets: frozenset[str]
    make: Callable[[_LayerOp], Made]


def _rule(make: Callable[[_LayerOp], Made], *targets: str) -> _Rule:
    return _Rule(frozenset(targets), make)


RULES: Mapping[str, _Rule] = {
    "Linear": _rule(_linear, "linear.default"),
    "Embedding": _rule(_embedding, "embedding.default"),
    "LayerNorm": _rule(_layer_norm, "layer_norm.default"),
    "RMSNorm": _rule(_rms_norm, "rms_norm.default"),
    "GroupNorm": _rule(_group_norm, "group_norm.default"),
    **{f"BatchNorm{n}d": _rule(_batch_norm, "batch_norm.default") for n in (1, 2, 3)},
    **{f"Conv{n}d": _rule(_conv, f"conv{n}d.default") for n in (1, 2, 3)},
    "ConvTranspose1d": _rule(_conv_back, "conv_transpose1d.default"),
    **{f"ConvTranspose{n}d": _rule(_conv_back, f"conv_transpose{n}d.input") for n in (2, 3)},
    "Dropout": _rule(_dropout, "dropout.default"),
    **{f"Dropout{n}d": _rule(_dropout, "feature_dropout.default") for n in (1, 2, 3)},
    "PReLU": _rule(_prelu, "prelu.default"),
    "Softmax": _rule(_softmax, "softmax.int"),
    "LogSoftmax": _rule(_softmax, "log_softmax.int"),
    **{name: _rule(_activation(name), target) for name, (target, _, _) in ACTIVATIONS.items()},
    **{name: _rule(_pool(name), target) for name, (target, _) in POOLS.items()},
    **{
        f"AdaptiveAvgPool{n}d": _rule(_adaptive, f"adaptive_avg_pool{n}d.default")
        for n in (1, 2, 3)
    },
    "Flatten": _rule(_flatten, "flatten.using_ints"),
}
"""How the call of each layer is recognised, by its class in torch.nn."""

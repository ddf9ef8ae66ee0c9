"""Facts of single aten ops beyond their schema: no-ops, writes, random numbers, gradients.

The module knows torch's operators, not the graph that is being made.
"""

from __future__ import annotations

import sys
from functools import lru_cache

import torch
from torch import Tensor, fx
from torch._library.custom_ops import OPDEFS
from torch._ops import OpOverload

from bigbrain_fx.core import words

_DROPPED = ("_assert", "sym_constrain_range", "_guard", "_make_dep_token")

# Return their argument itself when there is nothing to do; the trace's storages say when.
_MAYBE_NOTHING = frozenset(
    {"to", "contiguous", "alias", "lift_fresh", "type_as", "slice", "expand", "reshape", "view"}
    | {"dropout", "feature_dropout", "alpha_dropout", "feature_alpha_dropout"}
)

# Results that never carry a gradient, whatever their arguments.
_NO_GRADIENT = frozenset(
    words(
        """
        detach zeros_like ones_like empty_like full_like rand_like randn_like
        randint_like new_zeros new_ones new_empty new_full new_empty_strided one_hot
        bincount histc bernoulli
        """
    )
)

# The plain form computes another dtype (comparisons), or nobody writes it so (copy, fill, zero).
_KEPT_IN_PLACE = frozenset(
    words(
        """
        eq ne lt le gt ge logical_and logical_or logical_xor logical_not copy fill
        zero set resize resize_as requires_grad random normal uniform bernoulli
        exponential cauchy geometric log_normal rrelu embedding_renorm
        """
    )
)

# Autocast casts what these read, on a GPU or on both kinds, and never what their in-place twins do.
_CAST_UNLESS_IN_PLACE = frozenset(
    words(
        """
        acos asin cosh cumprod cumsum erfinv exp expm1 log log10 log1p log2 pow reciprocal renorm
        rsqrt sinh tan addbmm addmm addmv addr baddbmm
        """
    )
)

_TAKES_INDICES = frozenset(  # masks and indices do not change the result's dtype
    {"masked_fill", "index_put", "index_fill", "index_add", "index_copy", "scatter", "scatter_add"}
)

_RATE_ARGUMENT = {  # op -> positions of (probability, training) among its arguments
    **dict.fromkeys(words("dropout feature_dropout alpha_dropout feature_alpha_dropout"), (1, 2)),
    "scaled_dot_product_attention": (4, None),
    **dict.fromkeys(("lstm", "gru", "rnn_tanh", "rnn_relu"), (5, 6)),
    "rrelu": (None, 3),
}

_RUNNING_STATS = {
    "batch_norm": (3, 4, 5),
    "native_batch_norm": (3, 4, 5),
    "instance_norm": (3, 4, 5),
}


def family(target: object) -> str:
    """Return an op's plain name: `aten.relu_.default` -> "relu"; empty for ops outside of aten."""
    return _names(target)[1] if isinstance(target, OpOverload) else ""


@lru_cache(maxsize=4096)
def _names(target: OpOverload) -> tuple[str, str]:
    name = str(target)
    plain = name.split(".")[1]
    return name, plain if plain.startswith("__") else plain.rstrip("_")


def target_name(target: object) -> str:
    """Return the name that the graph keeps: "aten.linear.default", "operator.mul".

    An op that a Python library made with `torch.library.custom_op` is named with the function that
    makes it: "library.<namespace>.<op>.<overload>.<module>.<function>".
    """
    if isinstance(target, OpOverload):
        return _library_name(target) or _names(target)[0]
    module = getattr(target, "__module__", "").removeprefix("_")
    name = getattr(target, "__name__", str(target))
    return f"{'torch' if module.startswith('torch') else module}.{name}"


@lru_cache(maxsize=4096)
def _library_name(target: OpOverload) -> str | None:
    made = None if target.namespace == "aten" else OPDEFS.get(target._schema.name)
    if made is None:
        return None
    module, name = made._init_fn.__module__, made._init_fn.__name__
    home = sys.modules.get(module)
    is_the_model_file = hasattr(home, "__bigbrain_fx__")  # a bundle has no import of it
    return (
        None
        if is_the_model_file or not hasattr(home, name)
        else (f"library.{target}.{module}.{name}")
    )


def is_dropped(target: object) -> bool:
    """Whether the call only asserts or guards."""
    name = target.name().partition("::")[2] if isinstance(target, OpOverload) else ""
    return name.startswith(_DROPPED)


def may_do_nothing(target: object) -> bool:
    """Whether the op hands back its argument when there is nothing to do."""
    return family(target) in _MAYBE_NOTHING


def carries_gradient(target: object) -> bool:
    """Whether a gradient can flow from the op's results to its arguments."""
    return family(target) not in _NO_GRADIENT


def is_random(node: fx.Node) -> bool:
    """Whether the call draws random numbers with the arguments it has."""
    target = node.target
    if not isinstance(target, OpOverload) or not _is_seeded(target):
        return False
    rate, training = _RATE_ARGUMENT.get(family(target), (None, None))
    if rate is not None and argument(node, rate) in (0, 0.0):
        return False
    return training is None or argument(node, training) is not False


def is_idle_dropout(node: fx.Node) -> bool:
    """Whether the call is a dropout that hands back its argument: p is 0, or it is not training."""
    return family(node.target).endswith("dropout") and not is_random(node)


def returns_view(target: OpOverload) -> bool:
    """Whether the op's result shares its argument's storage by its schema."""
    return any(entry.alias_info is not None for entry in target._schema.returns)


@lru_cache(maxsize=4096)
def _is_seeded(target: OpOverload) -> bool:
    return torch.Tag.nondeterministic_seeded in target.tags


def argument(node: fx.Node, position: int) -> object:
    """Return the argument at a position of the op's schema, its default when it is left out."""
    assert isinstance(node.target, OpOverload)
    if position < len(node.args):
        return node.args[position]
    arguments = node.target._schema.arguments
    if position >= len(arguments):
        return None
    entry = arguments[position]
    return node.kwargs.get(entry.name, entry.default_value)


def written_arguments(node: fx.Node) -> list[fx.Node]:
    """Return the nodes of tensors that the call writes into, batch norm's statistics included."""
    target = node.target
    if not isinstance(target, OpOverload):
        return []
    found = [argument(node, position) for position in _write_positions(target)]
    if stats := _RUNNING_STATS.get(family(target)):
        mean, var, training = stats
        if argument(node, training):
            found += [argument(node, mean), argument(node, var)]
    flat = [
        item for entry in found for item in (entry if isinstance(entry, list | tuple) else [entry])
    ]
    return [item for item in flat if isinstance(item, fx.Node)]


@lru_cache(maxsize=4096)
def _write_positions(target: OpOverload) -> tuple[int, ...]:
    arguments = target._schema.arguments
    return tuple(
        i for i, entry in enumerate(arguments) if entry.alias_info and entry.alias_info.is_write
    )


def turns_in_place(target: object) -> bool:
    """Whether an in-place op writes a shape and no numbers: `t_`, `squeeze_`."""
    known = isinstance(target, OpOverload) and torch.Tag.inplace_view in target.tags
    return known and family(target) != "detach"


def plain_form(
    node: fx.Node, base: Tensor, others: list[Tensor], casts: bool = False
) -> OpOverload | None:
    """Return the op without the underscore when it computes the same: `relu_` -> `relu`.

    Args:
        node: a call that writes into its first argument alone.
        base: the tensor that it writes into.
        others: its other tensor arguments.
        casts: whether it is under autocast, with dtypes on a GPU that no trace on a CPU sees. There
            `y += f(y)` has y's dtype, and `y + f(y)` the wider one.

    Returns:
        None when the in-place form must stay: it has no plain form, or one of another dtype.
    """
    target = node.target
    assert isinstance(target, OpOverload)
    if family(target) in _KEPT_IN_PLACE or _write_positions(target) != (0,):
        return None
    if family(target) in _TAKES_INDICES:
        others = [other for other in others if other.dtype not in (torch.bool, torch.int64)]
    if any((other.dtype != base.dtype or casts) and other.dim() for other in others):
        return None
    if casts and family(target) in _CAST_UNLESS_IN_PLACE:
        return None
    return _without_underscore(target)


@lru_cache(maxsize=4096)
def _without_underscore(target: OpOverload) -> OpOverload | None:
    namespace, _, rest = target.name().partition("::")
    name = rest.partition(".")[0]
    packet = getattr(getattr(torch.ops, namespace), name.removesuffix("_"), None)
    if not name.endswith("_") or packet is None:
        return None
    # Mostly of the same name; but `pow_.Scalar` is `pow.Tensor_Scalar`, and `pow.Scalar` is 2**x.
    overloads = sorted(packet.overloads(), key=lambda each: each != target._overloadname)
    known = (getattr(packet, each) for each in overloads)
    same = (plain for plain in known if _signature(plain) == _signature(target))
    plain = next(same, None)
    return None if plain is None or plain._schema.is_mutable else plain


def _signature(target: OpOverload) -> list[tuple[str, str]]:
    return [(entry.name, str(entry.type)) for entry in target._schema.arguments]

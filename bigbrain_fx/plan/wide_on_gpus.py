"""Values that autocast keeps in float32 on a GPU and in sixteen bits on a CPU: not to be sent.

    layer_norm of bfloat16, under autocast      CPU: bfloat16      GPU: float32
    and what comes of it, x + f(x), likewise

A model is traced on a CPU, and a channel has the type that it found. torch's lists are in its notes
on autocast ("CUDA Ops that can autocast to float32"). The module knows graph and stages, not torch.
"""

from __future__ import annotations

from collections.abc import Sequence

from bigbrain_fx.core import Op
from bigbrain_fx.errors import InputError
from bigbrain_fx.plan.nouns import Plan

_HALVES = frozenset({"bfloat16", "float16"})
_FLOAT32 = frozenset(
    (
        *("acos", "asin", "binary_cross_entropy_with_logits", "cdist", "cosh"),
        *("cosine_embedding_loss", "cosine_similarity", "cross_entropy_loss", "cumprod", "cumsum"),
        *("dist", "erfinv", "exp", "expm1", "group_norm", "hinge_embedding_loss", "kl_div"),
        *("l1_loss", "layer_norm", "log", "log10", "log1p", "log2", "log_softmax"),
        *("margin_ranking_loss", "mse_loss", "multi_margin_loss", "multilabel_margin_loss"),
        *("nll_loss", "norm", "linalg_vector_norm", "linalg_matrix_norm", "native_layer_norm"),
        *("pdist", "poisson_nll_loss", "pow", "prod", "reciprocal", "renorm", "rsqrt", "sinh"),
        *("smooth_l1_loss", "soft_margin_loss", "softmax", "softplus", "sum", "tan"),
        "triplet_margin_loss",
    )
)
_SIXTEEN = frozenset(
    (
        *("addbmm", "addmm", "addmv", "addr", "baddbmm", "bmm", "conv1d", "conv2d", "conv3d"),
        *("conv_transpose1d", "conv_transpose2d", "conv_transpose3d", "convolution", "gru"),
        *("gru_cell", "linear", "lstm", "lstm_cell", "matmul", "mm", "mv", "prelu"),
        *("rnn_relu_cell", "rnn_tanh_cell", "scaled_dot_product_attention"),
    )
)
_CASTS = frozenset({"to", "_to_copy", "type", "half", "bfloat16"})


def require_sent_types(plan: Plan) -> None:
    """Refuse a cut through what a GPU would have in another type than its channel.

    Raises:
        InputError: a GPU of the plan sends such a value.
    """
    cuda = {device.name for device in plan.cluster.devices if device.kind == "cuda"}
    if not cuda.intersection(plan.stages.devices):
        return
    wide: dict[str, Op] = {}
    _walk(plan.graph.ops, plan.graph.autocast in _HALVES, wide)
    for edge in plan.stages.edges:
        sender = plan.stages.stages[edge.source].device
        if edge.kind == "activation" and edge.value in wide and sender in cuda:
            raise _refused(wide[edge.value], plan.graph.op.get(edge.value), sender)


def _refused(first: Op, sent: Op | None, sender: str) -> InputError:
    name = _family(first)
    at = f" ({sent.source})" if sent is not None and sent.source != first.source else ""
    return InputError(
        f"under autocast a GPU keeps {name} in float32, and the CPU that traces the model does "
        f"not: what comes of it{at} is sent by {sender}, in the type that was traced",
        code="BX1342",
        at=first.source or None,
        help=f"write .float() after the {name}, as a GPU has it anyway",
    )


def _walk(ops: Sequence[Op], casts: bool, wide: dict[str, Op]) -> None:
    """Find what is float32 on a GPU and of sixteen bits here, with the op that it comes of."""
    for op in ops:
        if op.body is not None:
            inside = dict(op.kwargs).get("enabled", casts) if _is_autocast(op) else casts
            _walk(op.body.ops, bool(inside), wide)
            origin = next((wide[name] for name in op.body.outputs if name in wide), None)
        else:
            origin = _origin(op, casts, wide)
        if origin is not None and any(spec.dtype in _HALVES for spec in op.outputs):
            wide[op.name] = origin


def _is_autocast(op: Op) -> bool:
    return op.target == "region.autocast"


def _origin(op: Op, casts: bool, wide: dict[str, Op]) -> Op | None:
    """Return the op that makes a value float32 on a GPU; itself, or one whose value it reads."""
    family = _family(op)
    if family.endswith("_") and op.mutates:  # keeps the type of what it writes into, on any kind
        return wide.get(op.mutates[0])
    if casts and family in _FLOAT32:
        return op
    if family in _CASTS or (casts and family in _SIXTEEN):
        return None
    return next((wide[name] for name in op.refs if name in wide), None)


def _family(op: Op) -> str:
    parts = op.target.split(".")
    return parts[1] if parts[0] == "aten" and len(parts) > 1 else parts[-1]

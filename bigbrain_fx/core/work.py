"""Floating point operations and bytes of an op, from shapes alone.

The results are arithmetic over the batch. This file knows aten's names; it knows no devices.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from math import prod

from bigbrain_fx.core.arguments import Arg
from bigbrain_fx.core.sizes import DTYPE_BYTES, Dim, plus, times
from bigbrain_fx.core.tensor_spec import TensorSpec
from bigbrain_fx.core.words import words

Specs = Sequence[TensorSpec]
Formula = Callable[[Specs, Specs, tuple[Arg, ...]], Dim]


def elements(spec: TensorSpec) -> Dim:
    """Return the number of elements of a tensor."""
    return times(*spec.shape)


def nbytes(spec: TensorSpec) -> Dim:
    """Return the bytes of a dense copy of a tensor."""
    return times(elements(spec), DTYPE_BYTES[spec.dtype])


def flops(target: str, inputs: Specs, outputs: Specs, args: tuple[Arg, ...]) -> Dim:
    """Return the floating point operations of one forward call.

    A multiply-add counts two. Attention counts its full square, masked or not (as torch's
    `FlopCounterMode` does); functions such as exp or tanh count a few operations per element.
    """
    family = _family(target)
    if not outputs or family in _FREE:
        return 0
    formula = _FORMULAS.get(family)
    if formula is not None and inputs:
        return formula(inputs, outputs, args)
    return times(_PER_ELEMENT.get(family, 1), elements(outputs[0]))


def moved(target: str, inputs: Specs, outputs: Specs, is_view: bool) -> tuple[Dim, Dim]:
    """Return the bytes that an op reads and writes; a view and a size move nothing."""
    if is_view or not outputs:
        return 0, 0
    written = plus(*[nbytes(spec) for spec in outputs])
    if _family(target) in _GATHERS and len(inputs) > 1:  # reads rows, not the whole table
        return plus(written, *[nbytes(spec) for spec in inputs[1:]]), written
    return plus(*[nbytes(spec) for spec in inputs]), written


def _family(target: str) -> str:
    parts = target.split(".")
    return parts[1].rstrip("_") if len(parts) > 1 else target


def _product_with(inputs: Specs, outputs: Specs, _args: tuple[Arg, ...]) -> Dim:
    """Multiply matrices: an output is a dot product along the first one's last dimension."""
    return times(2, elements(outputs[0]), inputs[0].shape[-1] if inputs[0].shape else 1)


def _add_product(inputs: Specs, outputs: Specs, _args: tuple[Arg, ...]) -> Dim:
    return times(2, elements(outputs[0]), inputs[1].shape[-1])


def _convolution(inputs: Specs, outputs: Specs, _args: tuple[Arg, ...]) -> Dim:
    weight = inputs[1].shape
    return times(2, elements(outputs[0]), *weight[1:])


def _transposed_convolution(inputs: Specs, _outputs: Specs, _args: tuple[Arg, ...]) -> Dim:
    return times(2, elements(inputs[0]), *inputs[1].shape[1:])


def _attention(inputs: Specs, outputs: Specs, _args: tuple[Arg, ...]) -> Dim:
    query, key = inputs[0].shape, inputs[1].shape
    scores = times(*query[:-1], key[-2])
    per_score = plus(times(2, query[-1]), times(2, outputs[0].shape[-1]), 5)
    return times(scores, per_score)


def _recurrent(inputs: Specs, _outputs: Specs, _args: tuple[Arg, ...]) -> Dim:
    rows = times(*inputs[0].shape[:-1])
    weights = plus(*[elements(spec) for spec in inputs[2:] if len(spec.shape) == 2])
    return times(2, rows, weights)


def _pooling(inputs: Specs, outputs: Specs, args: tuple[Arg, ...]) -> Dim:
    window = args[1] if len(args) > 1 else 1
    if not isinstance(window, tuple):
        return elements(inputs[0])
    sides = [side for side in window if isinstance(side, int)]
    return times(elements(outputs[0]), prod(sides) ** (2 if len(sides) == 1 else 1))


def _einsum(inputs: Specs, outputs: Specs, args: tuple[Arg, ...]) -> Dim:
    """Count one multiply-add per combination of indices."""
    terms = str(args[0]).replace(" ", "").partition("->")[0].split(",")
    if "." in str(args[0]) or len(terms) != len(inputs):
        return times(2, elements(outputs[0]))
    sizes: dict[str, Dim] = {}
    for term, spec in zip(terms, inputs, strict=True):
        sizes.update(zip(term, spec.shape, strict=False))
    return times(2, *[sizes[index] for index in sorted(sizes)])


def _per_input(count: int) -> Formula:
    return lambda inputs, _outputs, _args: times(count, elements(inputs[0]))


_FORMULAS: dict[str, Formula] = {
    **dict.fromkeys(words("linear mm matmul bmm mv dot inner _grouped_mm"), _product_with),
    **dict.fromkeys(("addmm", "baddbmm", "addbmm", "addmv"), _add_product),
    **dict.fromkeys(("conv1d", "conv2d", "conv3d", "convolution"), _convolution),
    **dict.fromkeys(
        words("conv_transpose1d conv_transpose2d conv_transpose3d"), _transposed_convolution
    ),
    "scaled_dot_product_attention": _attention,
    "einsum": _einsum,
    **dict.fromkeys(("lstm", "gru", "rnn_tanh", "rnn_relu"), _recurrent),
    **dict.fromkeys(words("max_pool1d max_pool2d max_pool3d avg_pool2d avg_pool3d"), _pooling),
    **dict.fromkeys(words("sum mean amax amin max min prod any all"), _per_input(1)),
    **dict.fromkeys(words("argmax argmin cumsum cumprod norm adaptive_avg_pool2d"), _per_input(1)),
    **dict.fromkeys(
        words("var std var_mean logsumexp topk sort linalg_vector_norm"), _per_input(4)
    ),
    **dict.fromkeys(
        words("cross_entropy_loss nll_loss mse_loss l1_loss smooth_l1_loss"), _per_input(8)
    ),
    **dict.fromkeys(
        words("binary_cross_entropy binary_cross_entropy_with_logits kl_div"), _per_input(8)
    ),
}

_PER_ELEMENT = {
    **dict.fromkeys(words("layer_norm batch_norm group_norm instance_norm native_layer_norm"), 8),
    **dict.fromkeys(("rms_norm", "softmax", "log_softmax", "_softmax", "_log_softmax"), 5),
    **dict.fromkeys(("gelu", "erf", "tanh", "sin", "cos", "pow"), 10),
    **dict.fromkeys(words("silu sigmoid exp log softplus mish elu selu celu"), 5),
    **dict.fromkeys(("sqrt", "rsqrt", "div", "reciprocal", "dropout"), 2),
}

_GATHERS = frozenset({"embedding", "index_select", "index", "gather", "take_along_dim"})

_FREE = frozenset(  # moves or makes data, computes nothing
    words(
        """
        embedding index_select index gather clone contiguous cat stack to copy fill
        zero zeros ones empty full zeros_like ones_like empty_like full_like new_zeros
        new_ones new_empty new_full arange view reshape transpose permute t expand
        slice select squeeze unsqueeze flatten unflatten chunk split split_with_sizes
        unbind detach alias repeat repeat_interleave roll flip tril triu pad
        constant_pad_nd index_put masked_fill where scatter lift_fresh_copy getitem
        movedim narrow view_as expand_as unsafe_split one_hot
        """
    )
)

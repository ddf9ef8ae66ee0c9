"""Assumptions about families of ops on a GPU: passes over memory, shares of product rates.

A device's rates are what it sustains, so shares are of that: 1 is a large product of a model.
Passes are counted from what torch's CUDA kernels read and write (ATen/native/cuda), in units of the
bytes of the *forward* call. Batch norm in training reads its input twice and writes once: 3 passes
of a tensor where the call has 2, so 1.5. Backward it reads two tensors twice and writes one, so
2.5. Shares of convolutions and attention were fitted on published rows, see
tools/studies/published_gpus. This file knows aten's names; it knows no graph and no device.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Passes:
    """How often a family moves the bytes of its forward call; `backward` 0: it hands them on."""

    forward: float = 1.0
    backward: float = 1.0


@dataclass(frozen=True, slots=True)
class Fitted:
    """Rules fitted on published rows, by `python -m tools.studies.published_gpus.fitting`.

    Attributes:
        product_backward: share of the product rate, backward.
        attention, attention_backward: of flops that are needed, a causal mask's half left out.
        convolution, convolution_backward: of dense ones with many channels, in half precision.
        convolution_fp32, convolution_fp32_backward: the same in FP32.
        convolution_tf32, convolution_tf32_backward: the same in TF32.
        winograd: how much faster a 3 x 3 one of stride 1 is in FP32: it needs fewer flops.
        tail: the part of a wave of tiles that a product leaves its multiprocessors idle.
        norms: what norms' passes over memory are multiplied by.
        channels: of a dense convolution, in or out, at which it reaches half of its share.
        grouped_channels: channels of a group at which a convolution reaches half of its share.
        depthwise_passes, depthwise_backward_passes: of its bytes, for a 3 x 3 one.
        depthwise_flops: share of the FP32 rate.
        turned_passes: over a convolution's tensors, in half precision and not channels_last.
        unhidden: the part of a half-precision product's passes over memory that its arithmetic does
            not hide, or of its arithmetic that they do not.
        aligned_4, aligned_2, aligned_1: part of a half-precision product's rate where rows divide
            by 4, 2 or 1 elements and not by 8.
        attention_from_hopper_on: share of attention there: torch's kernels are written for Ampere.
        wide_groups: share of the FP32 rate in the backward of a grouped convolution, for half
            precision, channels_last and groups of more than 32 channels.
    """

    product_backward: float = 1.0
    attention: float = 0.42
    attention_backward: float = 0.45
    convolution: float = 1.1
    convolution_backward: float = 0.97
    convolution_fp32: float = 1.1
    convolution_fp32_backward: float = 0.76
    convolution_tf32: float = 0.47
    convolution_tf32_backward: float = 0.6
    winograd: float = 1.8
    tail: float = 0.22
    norms: float = 1.0
    grouped_channels: float = 25.0
    depthwise_passes: float = 2.7
    depthwise_backward_passes: float = 8.0
    depthwise_flops: float = 0.11
    turned_passes: float = 2.7
    channels: float = 16.0
    unhidden: float = 0.6
    aligned_4: float = 0.5
    aligned_2: float = 0.4
    aligned_1: float = 0.3
    attention_from_hopper_on: float = 0.65
    wide_groups: float = 0.09


FITTED = Fitted()

FORWARD_LAUNCHES = 4.0
"""What an op takes its process, in launch_s: on GPU hosts 59 us in FP32, four times 15 us.

NVIDIA DeepLearningExamples, ResNet-50 on V100 and T4 at batches 1 and 2: 10.2 to 10.5 ms for 175
ops; under autocast 12.8 to 13.0 ms, 74 us an op.
"""
AUTOCAST_LAUNCHES = 1.25
BACKWARD_LAUNCHES = 5.0
"""What an op's backward takes: kernels for each gradient, and the sums of micro-batches.

Steps on a rented H100 (tools/studies/published_gpus) that wait for their process are 9 to 20 %
under by it, one that nearly does 5 % over; by 2.0, a guess, 36 to 42 % under. No row of 331
published ones, which are of larger batches or of inference, tells 2 from 5.
"""
VIEW_LAUNCHES = 0.5
KERNEL_S = 3e-6
"""The least that a kernel takes its GPU: an empty one, with the gap to the next."""

ATTENTION_BACKWARD = 2.5  # five matrix products backward to two forward
CAST_BYTES = 6  # four read and two written, or the other way round

TILE_SIDE = 128
TILE = TILE_SIDE * TILE_SIDE  # elements of a product that a multiprocessor makes at once
COPY_PASSES = 2.6  # a turned tensor is read in pieces: 1.3 for each of read and written
WIDE_GROUP = 32  # channels of a group up to which cuDNN has kernels for channels_last
USUAL_UNITS = 80
ATTENTION_TILE = 64  # rows of queries and keys that a fused kernel takes at once
SPREAD_PASSES = 3.0
"""Passes over a result to sum the gradient of a parameter that was spread over it: a product with
the other factor (two read, one written), and its sum."""
SUMS_INSIDE = ("batch_norm", "layer_norm", "group_norm", "instance_norm", "native_layer_norm")
TURNED_NORMS = ("group_norm", "native_group_norm")
"""On a GPU torch copies what is channels_last to rows of channels before, and copies it back."""
NORMS = ("layer_norm", "native_layer_norm", "rms_norm")

_ONE = Passes()


def _rows(names: str, passes: Passes) -> dict[str, Passes]:
    return dict.fromkeys(names.split(), passes)


PASSES: Mapping[str, Passes] = {
    **_rows("add sub rsub neg", Passes(1.0, 0.0)),
    **_rows("clone contiguous to _to_copy", Passes(1.3, 1.0)),  # a turned tensor is read in pieces
    **_rows("cat stack concat hstack vstack repeat roll flip", Passes(1.0, 0.5)),
    **_rows("pad constant_pad_nd", Passes(1.0, 1.0)),
    **_rows("mul div", Passes(1.0, 1.5)),
    **_rows("relu relu6 sqrt rsqrt reciprocal sigmoid tanh exp expm1", Passes(1.0, 1.5)),
    **_rows("gelu silu hardswish hardsigmoid elu selu celu mish glu", Passes(1.0, 1.5)),
    **_rows("hardtanh leaky_relu prelu clamp clamp_min clamp_max", Passes(1.0, 1.5)),
    **_rows("pow square abs erf log sin cos softplus", Passes(1.0, 1.7)),
    **_rows("softmax _softmax log_softmax _log_softmax", Passes(1.1, 1.6)),
    **_rows("layer_norm native_layer_norm", Passes(1.2, 2.0)),
    **_rows("rms_norm", Passes(1.2, 2.0)),
    **_rows("group_norm native_group_norm instance_norm", Passes(1.6, 2.6)),
    **_rows("batch_norm native_batch_norm", Passes(1.5, 2.5)),
    **_rows("dropout feature_dropout alpha_dropout native_dropout", Passes(1.15, 1.15)),
    **_rows("masked_fill where", Passes(1.0, 1.0)),
    **_rows("index index_select take_along_dim gather", Passes(1.2, 2.0)),
    **_rows("index_add scatter_add index_put scatter", Passes(1.2, 1.5)),
    **_rows("max_pool1d max_pool2d max_pool3d", Passes(1.2, 2.0)),
    **_rows("avg_pool1d avg_pool2d avg_pool3d", Passes(1.2, 1.5)),
    **_rows("sum mean adaptive_avg_pool1d adaptive_avg_pool2d", Passes(1.0, 1.0)),
    **_rows("var std var_mean norm linalg_vector_norm", Passes(1.1, 2.0)),
    **_rows("max min topk sort argsort cumsum", Passes(4.0, 2.0)),
    **_rows("mse_loss l1_loss smooth_l1_loss huber_loss", Passes(1.5, 1.5)),
    **_rows("binary_cross_entropy binary_cross_entropy_with_logits kl_div", Passes(2.0, 2.0)),
    **_rows("cross_entropy_loss nll_loss nll_loss_nd", Passes(2.0, 4.0)),
    **_rows("embedding embedding_bag", Passes(1.0, 1.0)),
}
"""By aten's plain name; what is not here makes one pass there and one back."""

HALF_LOSS = Passes(7.0, 11.0)
"""Cross-entropy of logits in half precision: they are cast to float32 before, and back after."""
EVAL_NORM = Passes(1.0, 1.0)


def passes_of(family: str, *, half: bool, training: bool) -> Passes:
    """Return what is assumed of a family."""
    if half and family in ("cross_entropy_loss", "nll_loss_nd"):
        return HALF_LOSS
    if not training and family in ("batch_norm", "native_batch_norm"):
        return EVAL_NORM
    return PASSES.get(family, _ONE)

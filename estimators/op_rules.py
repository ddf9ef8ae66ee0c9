"""Assumptions about each family of ops: its share of a device's rates, its saved activations.

Speeds are shares of two measured rates of `cluster.json` (FP32 products, large copies) and numbers
of its launches. They were fitted op by op (least squares of logarithms) to `bigbrain-fx profile` of
torch 2.13 on one x86 core with AVX2, float32. The ops were 1142 of `models/`, 96 of a plain CNN,
and those of `git show 4f3726e:tools/image_ops.py` at 1 to 32 rows. Families with fewer than eight
times have the results of an earlier microbenchmark of 0.1 to 10 MiB. SORTING and UNKNOWN are
guesses; a GPU's are in `cuda_rules`. Above 1: the data is in a cache, or the rate of products is
not the core's best. All are assumptions for other machines: `doctor` measures the rates, not the
shares. Backward shares are relative to the bytes of the *forward* call. In a step an op costs more
launches than in a loop: its code is in no cache.

What is kept for backward follows torch's tools/autograd/derivatives.yaml; tests compare it with the
tensors that autograd really saves. This file knows aten's names; it knows no graph and no device.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal, TypeAlias

FORWARD_LAUNCHES = 5.0  # of most ops in the device's launch_s, and a module's call
BACKWARD_LAUNCHES = 4.0  # for each product or pass


@dataclass(frozen=True, slots=True)
class Speed:
    """Shares of the device's rates that an op reaches, forward and backward, and what starts it.

    `backward_bytes` None: the backward only hands gradients on. Launches are in the device's
    launch_s: of the forward and a module's call, and of each product or pass of the backward.
    """

    flops: float = 1.0
    bytes: float = 1.0
    backward_flops: float = 1.0
    backward_bytes: float | None = 1.0
    launches: float = FORWARD_LAUNCHES
    backward_launches: float = BACKWARD_LAUNCHES


@dataclass(frozen=True, slots=True)
class Blocked:
    """One product of a CPU's convolution: between reorders of its tensors, so that all add up.

    Tensors and weights come plain and are copied into blocks of channels for each call, results
    are copied back: oneDNN's "Memory format propagation". A few rows pay the weights' whole copy.

    Attributes:
        flops: share of the device's rate.
        tensor_touches, weight_touches: how often their bytes are moved, at the rate of copies.
        launches: in the device's launch_s; to look a primitive up and to start the reorders.
    """

    flops: float
    tensor_touches: float
    weight_touches: float
    launches: float


@dataclass(frozen=True, slots=True)
class BlockedProducts:
    """A convolution's forward, and its gradients: of the inputs, of the weights."""

    forward: Blocked
    inputs: Blocked
    weights: Blocked


Kind: TypeAlias = Literal["product", "attention", "lookup", "view", "pointwise"]
"""How its backward works.

"product": one product per factor, each as dear as the forward; "attention": two and a half;
"lookup": a dense gradient of the table; "view": by bytes, if at all; "pointwise": one pass.
"""

Kept: TypeAlias = Literal["factors", "first", "inputs", "integers", "result", "noise", "copy"]
"""What autograd keeps.

"factors": each tensor input whose partner needs a gradient; "first": the first input; "inputs": all
tensor inputs; "integers": inputs that are indices, masks or classes; "result": the output; "noise":
the die's factors, of the output's size; "copy": a tensor of its own, of the first input's size.
"""


@dataclass(frozen=True, slots=True)
class OpRule:
    """Assumptions about one family.

    `keeps` are parts of what is saved. `floats_per_row` are more for each row of the input
    (statistics), `bytes_per_element` for each element of the output (indices, gates). Where
    there is `blocked`, a CPU's times are by it, and not by `speed`.
    """

    speed: Speed
    kind: Kind = "pointwise"
    keeps: tuple[Kept, ...] = ()
    floats_per_row: int = 0
    bytes_per_element: int = 0
    blocked: BlockedProducts | None = None


PRODUCT = Speed(0.95, 0.3, 0.92, 0.35, launches=10.0, backward_launches=7.5)
"""Of few rows the weights are read and packed for each call: a third of a copy's rate."""
EINSUM = Speed(0.87, 0.27, 0.87, 0.3, launches=17.0, backward_launches=14.0)
CONVOLUTION = BlockedProducts(
    Blocked(1.2, 3.3, 3.8, 30.0), Blocked(1.4, 5.0, 3.7, 23.0), Blocked(0.96, 3.3, 7.4, 22.0)
)
TRANSPOSED_CONVOLUTION = BlockedProducts(
    Blocked(0.48, 8.0, 5.4, 33.0), Blocked(0.47, 1.9, 1.6, 25.0), Blocked(0.51, 2.3, 5.0, 28.0)
)
ATTENTION = Speed(0.4, backward_flops=0.5, launches=15.0, backward_launches=10.0)
"""Backward of 2.5 products. Rates are of heads of 32 numbers or more; heads of 16 reach half."""
COPY = Speed(bytes=1.1, backward_bytes=4.0, launches=7.5, backward_launches=3.5)
TRANSPOSING = Speed(bytes=0.4, backward_bytes=None, backward_launches=1.5)
PASS_ON = Speed(bytes=1.5, backward_bytes=None, backward_launches=1.5)
SIMPLE = Speed(bytes=1.4, backward_bytes=0.85, launches=5.5, backward_launches=2.5)
SMOOTH = Speed(bytes=0.45, backward_bytes=0.4)
GELU = Speed(bytes=0.32, backward_bytes=0.21, launches=9.5, backward_launches=6.0)
GELU_TANH = Speed(bytes=0.16, backward_bytes=0.15, launches=9.5, backward_launches=6.0)
TANH = Speed(bytes=0.09, backward_bytes=0.7)
EXPONENTIAL = Speed(bytes=0.31, backward_bytes=0.8)
TRIGONOMETRIC = Speed(bytes=0.19, backward_bytes=0.14)
POWER = Speed(bytes=2.2, backward_bytes=0.4)
LAYER_NORM = Speed(bytes=0.46, backward_bytes=0.39, launches=9.5, backward_launches=3.5)
GROUP_NORM = Speed(bytes=0.86, backward_bytes=0.6, launches=9.5, backward_launches=4.5)
RMS_NORM = Speed(bytes=0.6, backward_bytes=0.1)
BATCH_NORM = Speed(bytes=0.23, backward_bytes=0.5, launches=11.0)
SOFTMAX = Speed(bytes=0.48, backward_bytes=0.8)
DICE = Speed(bytes=0.04, backward_bytes=0.9, launches=15.0, backward_launches=2.5)
MASKING = Speed(bytes=0.06, backward_bytes=0.06)
INDEXING = Speed(bytes=0.28, backward_bytes=0.29)  # it counts its dimensions for every element
SELECTING = Speed(bytes=1.3, backward_bytes=0.35)
GATHERING = Speed(bytes=0.95, backward_bytes=0.35)
SCATTERING = Speed(bytes=0.33, backward_bytes=0.5)
PUTTING = Speed(bytes=0.22, backward_bytes=0.16)
"""Of rows of 32 to 256 numbers, 500 to 2,000 of them (a graph's nodes), read 4 to 20 times each:
the middle of four sizes. Tables beyond the caches are slower: of 5 MiB, 0.1 either way."""
LOOKUP = Speed(bytes=0.8, backward_bytes=0.22, launches=12.0, backward_launches=13.0)
LOSS = Speed(bytes=0.16, backward_bytes=0.17, launches=10.0, backward_launches=10.5)
SUM = Speed(bytes=0.6, backward_bytes=None, launches=6.5, backward_launches=2.5)
MEAN = Speed(bytes=1.2, backward_bytes=0.45, launches=10.0, backward_launches=7.0)
REDUCTION = Speed(bytes=2.0, backward_bytes=0.3)
MAX_POOL = Speed(bytes=0.064, backward_bytes=0.47, launches=6.5, backward_launches=5.0)
AVERAGE_POOL = Speed(bytes=0.115, backward_bytes=0.094, launches=9.5, backward_launches=7.0)
RESIZE = Speed(bytes=0.04, backward_bytes=0.22)
SORTING = Speed(bytes=0.05, backward_bytes=0.3)
UNKNOWN = Speed(flops=0.5, bytes=0.5, backward_flops=0.5, backward_bytes=0.5)

OPTIMIZER_TOUCHES = 13.0
"""How often AdamW, as it comes, moves each byte of a parameter.

Fused it would be 7 (reads weight, gradient and two moments, writes all but the gradient); the
default implementation makes a pass for each of its eight formulas: 11.6 to 15.9 in eight
measurements of tensors of 4 MiB, in the middle 13.2; about 10 where tensors stay in the caches.
"""

OPTIMIZER_LAUNCHES = 7.0
"""What AdamW costs for each tensor whatever its size, in the device's launch_s.

On a CPU it goes tensor by tensor, nine ops each: 5.5 to 11 in eight measurements, in the
middle 7.1 (100 tensors of 1 KiB), that is 25 to 54 us.
"""

CUDA_OPTIMIZER_LAUNCHES = 1.6
"""The same on a GPU, where AdamW updates lists of tensors: what its Python costs for each.

Measured on a CPU with the lists' own work left out (400 tensors: 6.7 us each where launch_s was
4.5 us), and the kernels that 30 to 110 tensors share: 0.12. No GPU was asked.
"""


def _rows(names: str, rule: OpRule) -> dict[str, OpRule]:
    return dict.fromkeys(names.split(), rule)


OP_RULES: Mapping[str, OpRule] = {
    **_rows(
        "linear mm matmul bmm mv dot inner addmm baddbmm addbmm addmv _grouped_mm",
        OpRule(PRODUCT, "product", ("factors",)),
    ),
    "einsum": OpRule(EINSUM, "product", ("factors",)),
    **_rows(
        "conv1d conv2d conv3d convolution",
        OpRule(PRODUCT, "product", ("factors",), blocked=CONVOLUTION),
    ),
    **_rows(
        "conv_transpose1d conv_transpose2d conv_transpose3d",
        OpRule(PRODUCT, "product", ("factors",), blocked=TRANSPOSED_CONVOLUTION),
    ),
    "lstm": OpRule(PRODUCT, "product", ("factors",), bytes_per_element=24),
    **_rows(
        "gru rnn_tanh rnn_relu", OpRule(PRODUCT, "product", ("factors",), bytes_per_element=20)
    ),
    "scaled_dot_product_attention": OpRule(ATTENTION, "attention", ("inputs", "result")),
    **_rows("embedding embedding_bag", OpRule(LOOKUP, "lookup", ("integers",))),
    # one pass; the gradient goes on as it is
    **_rows("add sub rsub neg", OpRule(PASS_ON)),
    **_rows("clone contiguous to _to_copy", OpRule(TRANSPOSING)),
    **_rows("cat stack concat hstack vstack pad constant_pad_nd repeat roll flip", OpRule(COPY)),
    **_rows("tril triu cumsum upsample_nearest1d", OpRule(SIMPLE)),
    # one pass there, one back
    **_rows("mul", OpRule(SIMPLE, keeps=("factors",))),
    **_rows("div", OpRule(POWER, keeps=("factors",))),
    **_rows("addcmul addcdiv lerp maximum minimum", OpRule(POWER, keeps=("inputs",))),
    **_rows("relu relu6 sqrt rsqrt reciprocal", OpRule(SIMPLE, keeps=("result",))),
    **_rows("sigmoid", OpRule(SMOOTH, keeps=("result",))),
    **_rows("tanh", OpRule(TANH, keeps=("result",))),
    **_rows("exp expm1", OpRule(EXPONENTIAL, keeps=("result",))),
    **_rows("softmax _softmax log_softmax _log_softmax", OpRule(SOFTMAX, keeps=("result",))),
    **_rows("gelu", OpRule(GELU, keeps=("first",))),
    **_rows("silu hardswish hardsigmoid elu selu celu mish glu", OpRule(SMOOTH, keeps=("first",))),
    **_rows("sin cos erf log log2 log1p softplus atan", OpRule(TRIGONOMETRIC, keeps=("first",))),
    **_rows(
        "pow square abs clamp clamp_min clamp_max leaky_relu hardtanh prelu",
        OpRule(POWER, keeps=("first",)),
    ),
    **_rows("layer_norm native_layer_norm", OpRule(LAYER_NORM, keeps=("first",), floats_per_row=2)),
    **_rows("group_norm native_group_norm instance_norm", OpRule(GROUP_NORM, keeps=("first",))),
    **_rows("rms_norm", OpRule(RMS_NORM, keeps=("first", "copy"), floats_per_row=1)),
    **_rows("batch_norm native_batch_norm", OpRule(BATCH_NORM, keeps=("first",))),
    **_rows("dropout feature_dropout alpha_dropout native_dropout", OpRule(DICE, keeps=("noise",))),
    **_rows("bernoulli rand rand_like randn randn_like", OpRule(DICE)),
    **_rows("masked_fill where", OpRule(MASKING, keeps=("integers",))),
    "index": OpRule(INDEXING, keeps=("integers",)),
    "index_select": OpRule(SELECTING, keeps=("integers",)),
    **_rows("index_add scatter_add scatter", OpRule(SCATTERING, keeps=("integers",))),
    "index_put": OpRule(PUTTING, keeps=("integers",)),
    "take_along_dim": OpRule(GATHERING, keeps=("integers",)),
    "gather": OpRule(GATHERING, keeps=("first", "integers")),
    **_rows("nll_loss nll_loss_nd", OpRule(LOSS, keeps=("first", "integers"))),
    "cross_entropy_loss": OpRule(LOSS, keeps=("copy", "integers")),  # its logarithms
    **_rows("mse_loss smooth_l1_loss huber_loss", OpRule(SMOOTH, keeps=("inputs",))),
    **_rows(
        "binary_cross_entropy binary_cross_entropy_with_logits kl_div",
        OpRule(LOSS, keeps=("inputs",)),
    ),
    "l1_loss": OpRule(SMOOTH, keeps=("copy",)),  # its difference
    "sum": OpRule(SUM),
    "mean": OpRule(MEAN),
    **_rows("var std var_mean", OpRule(REDUCTION, keeps=("first",))),
    **_rows(
        "norm linalg_vector_norm logsumexp amax amin prod",
        OpRule(REDUCTION, keeps=("first", "result")),
    ),
    **_rows("max min topk sort argsort", OpRule(SORTING, bytes_per_element=8)),
    **_rows(
        "max_pool1d max_pool2d max_pool3d", OpRule(MAX_POOL, keeps=("first",), bytes_per_element=8)
    ),
    **_rows("avg_pool1d avg_pool2d avg_pool3d", OpRule(AVERAGE_POOL, keeps=("first",))),
    **_rows("adaptive_avg_pool1d adaptive_avg_pool2d", OpRule(MEAN)),
    **_rows(
        "upsample_nearest2d upsample_bilinear2d upsample_bicubic2d interpolate", OpRule(RESIZE)
    ),
}

VIEW = OpRule(COPY, "view")
"""Any op whose result shares its input's storage."""

ANY_OTHER = OpRule(UNKNOWN, keeps=("inputs", "result"))
"""An op that the table does not know: slow, and everything is kept."""

"""Twenty calls in the shapes of models: `doctor` times them on a GPU, estimators know them by name.

The rate of a card depends on its power cap, its board and torch's kernels, which no datasheet has.
Times of a few calls on the card itself correct the forecasts of all similar calls.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal, TypeAlias

KernelFamily: TypeAlias = Literal[
    "linear", "bmm", "conv2d", "attention", "layer_norm", "softmax", "gelu", "add"
]
KernelPrecision: TypeAlias = Literal["fp32", "tf32", "half"]


@dataclass(frozen=True, slots=True)
class KernelShape:
    """One call, forward.

    `sizes` of a linear layer are rows, inner side, columns; of a batched product batch, then these.
    Of a convolution: batch, channels in, side of the image, channels out, side of the window,
    groups. Of attention: batch, heads, length, width of a head. Of others: rows and columns.
    """

    family: KernelFamily
    precision: KernelPrecision
    sizes: tuple[int, ...]

    @property
    def name(self) -> str:
        """As a cluster file has it."""
        return f"{self.family}-{self.precision}-{'x'.join(map(str, self.sizes))}"


_LINEAR = (
    KernelShape("linear", "fp32", (4096, 1024, 4096)),
    KernelShape("linear", "fp32", (4096, 4096, 1024)),
    KernelShape("linear", "fp32", (512, 1024, 1024)),
    KernelShape("linear", "fp32", (1024, 1280, 50257)),
    KernelShape("linear", "tf32", (4096, 1024, 4096)),
    KernelShape("linear", "tf32", (4096, 4096, 1024)),
    KernelShape("linear", "half", (4096, 1024, 4096)),
    KernelShape("linear", "half", (8192, 4096, 4096)),
    KernelShape("linear", "half", (8192, 768, 3072)),
    KernelShape("linear", "half", (4096, 3072, 768)),
)
KERNELS = (
    *_LINEAR,
    KernelShape("bmm", "fp32", (128, 512, 64, 512)),
    KernelShape("bmm", "fp32", (64, 1024, 1024, 64)),
    KernelShape("conv2d", "fp32", (32, 64, 56, 64, 3, 1)),
    KernelShape("conv2d", "half", (64, 128, 28, 128, 3, 1)),
    KernelShape("conv2d", "half", (64, 256, 28, 512, 1, 1)),
    KernelShape("conv2d", "half", (64, 192, 28, 192, 3, 192)),
    KernelShape("attention", "half", (16, 16, 1024, 64)),
    KernelShape("layer_norm", "fp32", (16384, 1024)),
    KernelShape("softmax", "fp32", (32768, 1024)),
    KernelShape("gelu", "half", (16384, 4096)),
)
KERNEL: Mapping[str, KernelShape] = {kernel.name: kernel for kernel in KERNELS}

"""Seconds of `core.KERNELS` on a GPU.

It makes a kernel's tensors and the call; `measure` times it. Half precision is bfloat16, or float16
where a GPU only emulates that. TF32 is left out where there is none, and so are kernels that would
take more than a quarter of a GPU's free memory.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from math import prod

import torch
from torch import Tensor
from torch.nn import functional as F

from bigbrain_fx.core import KERNELS, KernelShape
from bigbrain_fx.measure.host import measure

_SETS = 2  # of tensors, that take turns, as layers do
_FREE_SHARE = 4


def kernels_s(
    window_s: float,
    device: torch.device,
    get_on: Callable[[], object] = lambda: None,
    kernels: Sequence[KernelShape] = KERNELS,
) -> dict[str, float]:
    """Time each kernel that the device can run for about `window_s`; return seconds by name."""
    found: dict[str, float] = {}
    for kernel in kernels:
        if _fits(kernel, device):
            with torch.inference_mode(), _products_in(kernel.precision):
                found[kernel.name] = _timed_s(kernel, window_s, device)
        get_on()
    return found


def _timed_s(kernel: KernelShape, window_s: float, device: torch.device) -> float:
    calls = [_call(kernel, device) for _ in range(_SETS)]
    return measure.per_call_s(
        lambda i: calls[i % _SETS](), window_s, partial(measure.synchronise, device)
    )


def _fits(kernel: KernelShape, device: torch.device) -> bool:
    if kernel.precision == "tf32" and not _is_from_ampere_on(device):
        return False
    if device.type != "cuda":
        return True
    free_bytes, _ = torch.cuda.mem_get_info(device)
    return _SETS * kernel_bytes(kernel) <= free_bytes // _FREE_SHARE


def kernel_bytes(kernel: KernelShape) -> int:
    """Return about what a kernel's tensors take."""
    size = 2 if kernel.precision == "half" else 4
    match kernel.family, kernel.sizes:
        case "linear", (rows, inner, columns):
            return size * (rows * inner + inner * columns + rows * columns)
        case "bmm", (batch, rows, inner, columns):
            return size * batch * (rows * inner + inner * columns + rows * columns)
        case "conv2d", (batch, inside, side, out, _, _):
            return size * batch * side * side * (inside + out)
        case _, sizes:
            return size * 4 * prod(sizes)


def _is_from_ampere_on(device: torch.device) -> bool:
    return device.type == "cuda" and torch.cuda.get_device_capability(device) >= (8, 0)


@contextmanager
def _products_in(precision: str) -> Iterator[None]:
    """Multiply float32 as the kernel says, and as it was before after that."""
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("high" if precision == "tf32" else "highest")
    try:
        yield
    finally:
        torch.set_float32_matmul_precision(before)


def _call(kernel: KernelShape, device: torch.device) -> Callable[[], Tensor]:
    """Make a kernel's tensors, and return the call on them."""
    dtype = torch.float32
    if kernel.precision == "half":
        halves = torch.bfloat16, torch.float16
        dtype = halves[device.type == "cuda" and not _is_from_ampere_on(device)]
    made = partial(torch.randn, device=device, dtype=dtype)
    match kernel.family, kernel.sizes:
        case "linear", (rows, inner, columns):
            return partial(F.linear, made(rows, inner), made(columns, inner))
        case "bmm", (batch, rows, inner, columns):
            return partial(torch.bmm, made(batch, rows, inner), made(batch, inner, columns))
        case "conv2d", (batch, inside, side, out, window, groups):
            weight = made(out, inside // groups, window, window)
            x = made(batch, inside, side, side)
            if kernel.precision == "half":
                x, weight = (t.to(memory_format=torch.channels_last) for t in (x, weight))
            return partial(F.conv2d, x, weight, padding=window // 2, groups=groups)
        case "attention", sizes:
            q, k, v = (made(*sizes) for _ in range(3))
            return partial(F.scaled_dot_product_attention, q, k, v)
        case "layer_norm", (rows, columns):
            return partial(F.layer_norm, made(rows, columns), (columns,))
        case "softmax", (rows, columns):
            return partial(torch.softmax, made(rows, columns), -1)
        case "gelu", sizes:
            return partial(F.gelu, made(*sizes))
        case _, sizes:
            return partial(torch.add, made(*sizes), made(*sizes))

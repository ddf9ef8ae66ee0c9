"""What torch takes of a CUDA device beyond the bytes that a tensor's shape says.

All of it is read off torch 2.13's source, in the terms of `torch.cuda.max_memory_allocated`; no GPU
has tested it. On a CPU nothing here changes a byte. Left out, because nobody can foresee it:

- what cuDNN takes while a convolution runs: its heuristics choose; a block of the same allocator,
  given back at the end of the call (aten/src/ATen/native/cudnn/Conv_v8.cpp);
- up to 1 MiB of a tensor of more than 1 MiB that gets a block whose rest is too small to be of use
  (CUDACachingAllocator.cpp, `should_split`: the block is counted whole);
- a block of 512 bytes for each scalar that the runtime keeps.

This file knows numbers and aten's names of products; it knows no instructions.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from bigbrain_fx.core import BLAS_BYTES, BLAS_BYTES_FROM_HOPPER_ON, Device, Op

ROUND_BYTES = 512
"""torch's caching allocator hands out multiples of this (c10/core/AllocatorConfig.h,
`kMinBlockSize`; PYTORCH_ALLOC_CONF can ask for more), and `max_memory_allocated` counts them. Its
segments of 2 and 20 MiB are part of what `memory_check` adds for the process.
"""

_FROM_HOPPER_ON_FLOPS_PER_S = 330e12
"""Where a cluster does not say what cuBLAS takes, the rate of half-precision products has to:
312e12 at most before Hopper (A100's datasheet), 756e12 at least from then on (H100 PCIe's).
"""

_PRODUCTS = {
    *("linear", "mm", "matmul", "bmm", "mv", "dot", "einsum", "bilinear"),
    *("addmm", "baddbmm", "addbmm", "addmv"),
}


def rounded(nbytes: int, kind: str) -> int:
    """Return what the allocator of a kind of device takes for a tensor of so many bytes."""
    return -(-nbytes // ROUND_BYTES) * ROUND_BYTES if kind == "cuda" else nbytes


def library_bytes(device: Device, ops: Iterable[Op], trains: bool) -> int:
    """Return the workspaces that cuBLAS keeps on a device.

    Handles belong to threads: the forward's products are started by the program's, the backward's
    by the thread that autograd has for each GPU. The allocator gives a handle its workspace at the
    first product and keeps it; cuBLASLt uses the same one. torch 2.15 gives it back after each
    product, unless TORCH_CUBLAS_WORKSPACE_CACHE is 1.
    """
    if device.kind != "cuda" or not any(map(_has_product, ops)):
        return 0
    return (2 if trains else 1) * _blas_bytes(device)


def optimizer_temporary_bytes(
    sizes: Sequence[int], temporaries: float, leftover: float, *, at_once: bool
) -> int:
    """Return what an optimizer's step holds for a moment, besides gradients and state.

    On a CPU optimizers go parameter by parameter, as on CUDA with `foreach=False`: the temporaries
    of one, and what Python's loop has not let go of the one before. On CUDA they
    update all at once (`foreach` is the default there): AdamW has the roots of all second moments
    (torch/optim/adam.py, `_multi_tensor_adam`), SGD with weight decay the sums with all parameters.
    One for each byte of parameters holds for these, NAdam, RAdam, Adamax and RMSprop; Adagrad,
    Adadelta, and RMSprop with weight decay have two; an optimizer that was made with `fused` has
    none. Of several groups of parameters only the largest counts really; all do here.

    Args:
        sizes: bytes of each trained parameter of a device, as allocated, in their order.
        temporaries: measured as on a CPU, in the parameter's size.
        leftover: the same, of the parameter before, in its size.
        at_once: whether all parameters are updated together.
    """
    if at_once:
        return int(min(1.0, temporaries) * sum(sizes))
    pairs = zip(sizes, (0, *sizes), strict=False)
    return int(max((temporaries * own + leftover * last for own, last in pairs), default=0))


def _blas_bytes(device: Device) -> int:
    if device.blas_bytes is not None:
        return device.blas_bytes
    from_hopper_on = (device.half_flops_per_s or 0.0) > _FROM_HOPPER_ON_FLOPS_PER_S
    return BLAS_BYTES_FROM_HOPPER_ON if from_hopper_on else BLAS_BYTES


def _has_product(op: Op) -> bool:
    if op.body is not None:
        return any(map(_has_product, op.body.ops))
    return any(name in _PRODUCTS for name in op.target.split(".")[1:2])  # "aten.linear.default"

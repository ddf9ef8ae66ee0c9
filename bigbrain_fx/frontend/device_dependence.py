"""Device-dependent lines of a model, and their consequences for a plan with GPUs.

A model is traced on a CPU: a trace keeps the CPU's side of each decision. This file knows lines and
which devices are GPUs; it knows no torch.
"""

from __future__ import annotations

from collections.abc import Sequence

_SHOWN = 3


def help_without_gpu(error: BaseException) -> str | None:
    """Return the remedy for code that fails without a GPU; None for other failures."""
    text = str(error)
    if not any(words in text for words in _NO_GPU):
        return None
    return (
        "a bundle puts each part of the model on its device, and the batch where it is read: leave "
        '.cuda() and .to("cuda") out of the model file, and write device=x.device for what forward '
        "makes"
    )


_NO_GPU = (
    "compiled with CUDA enabled",
    "no NVIDIA driver",
    "No CUDA GPUs",
    "no CUDA-capable device",
)


def told_of_gpus(lines: Sequence[str], gpus: Sequence[str]) -> tuple[str, ...]:
    """Return the remark for a plan with these GPUs on lines that query the device."""
    if not lines or not gpus:
        return ()
    more = f" and {len(lines) - _SHOWN} more" if len(lines) > _SHOWN else ""
    return (
        f"the model file asks what device it is on ({', '.join(lines[:_SHOWN])}{more}): "
        f"{', '.join(gpus)} compute what these lines decide here. Autocast is kept as "
        "`torch.autocast(x.device.type, dtype=torch.bfloat16)`; of a condition on the device leave "
        "that branch which shall be trained",
    )

"""What a model asks of its device, and what that means for a plan with GPUs.

A model is traced on a CPU: a trace keeps what the device decided there. This file knows what was
found and which devices are GPUs; it knows no torch.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from bigbrain_fx.errors import InputError


@dataclass(frozen=True, slots=True)
class Elsewhere:
    """The user's lines that ask what the device is, and what comes of it on a GPU.

    Attributes:
        lines: "model.py:31", in the order in which they asked.
        differs: whether other numbers came; None: what is done there cannot be run here.
        at_import: lines of the files that ask whether there is a GPU, where there is none.
    """

    lines: tuple[str, ...] = ()
    differs: bool | None = False
    at_import: tuple[str, ...] = ()


def help_without_gpu(error: BaseException) -> str | None:
    """Say what to write where code fails as there is no GPU; None where that is not why."""
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


def told_of_gpus(found: Elsewhere | None, gpus: Sequence[str]) -> tuple[str, ...]:
    """Return what the user of a plan with these GPUs should know.

    Raises:
        InputError: the model computes other numbers on a GPU than where it was traced.
    """
    if found is None or not gpus:
        return ()
    lines = ", ".join(found.lines[:3])
    if found.differs:
        raise InputError(
            f"forward or loss asks what device it is on ({lines}), and computes other numbers on a "
            f"GPU than on the CPU that it is traced on: {', '.join(gpus)} would compute the CPU's",
            code="BX2047",
            at=found.lines[0],
            help="autocast is kept as `torch.autocast(x.device.type, dtype=torch.bfloat16)`, or as "
            '`autocast = "bfloat16"` in the model file; of a condition on the device leave that '
            "branch in forward which shall be trained",
        )
    said = []
    if found.differs is None:
        said.append(
            f"forward or loss asks what device it is on ({lines}), and what it does on a GPU could "
            "not be tried here: the bundle computes what is done on a CPU"
        )
    if found.at_import:
        said.append(
            f"{', '.join(found.at_import[:3])} asks whether there is a GPU, and this host has "
            "none: what that decides stays as it is here"
        )
    return tuple(said)

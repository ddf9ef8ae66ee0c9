"""Lines of the user's own files that ask for the device, and their consequences for a plan.

A model is traced on a CPU: a trace keeps the CPU's side of each decision, and a rehearsal on CPUs
sees nothing of them. They are found by their words: nothing is run. Public code that has it:
attention of Stable Diffusion, which takes `torch.autocast(enabled=False, device_type='cuda')` round
its scores. This file is imported without torch.
"""

from __future__ import annotations

import contextlib
import re
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING

from bigbrain_fx.frontend.translation.sources import is_own

if TYPE_CHECKING:
    from torch import nn

_SHOWN = 3
_HERE = f"{Path(__file__).parents[1]}/"
_ASKS = re.compile(
    r"\.is_(cuda|cpu)\b|\.device\.type\s*(==|!=|in\b|not\b)|\.device\s*[!=]=|str\([\w.]*device\)"
    r"|\bcuda\.(is_available|device_count)\(|\bcuda\.amp\b|\bis_autocast_\w*enabled\("
    r"|\bautocast\(.*(?<!\w)['\"](cuda|cpu)\b"
)


def device_lines(model: nn.Module, loss: object) -> tuple[str, ...]:
    """Return the lines that query the device, or whether there is a GPU: "model.py:3"."""
    names = {kind.__module__ for part in model.modules() for kind in type(part).__mro__}
    files = _own_files([*names, str(getattr(loss, "__module__", ""))])
    return tuple(line for file in files for line in _asking(file))


def _asking(file: str) -> Iterator[str]:
    with contextlib.suppress(OSError, UnicodeDecodeError):
        lines = Path(file).read_text(encoding="utf-8").splitlines()
        found = (n for n, line in enumerate(lines, 1) if _ASKS.search(line.partition("#")[0]))
        yield from (f"{Path(file).name}:{number}" for number in found)


def _own_files(names: list[str]) -> Iterator[str]:
    """Yield the user's files: of these modules, and of modules that these refer to."""
    seen: set[str] = set()
    while names:
        module = sys.modules.get(names.pop())
        file = str(getattr(module, "__file__", None) or "")
        if module is None or file in seen or not is_own(file) or file.startswith(_HERE):
            continue
        seen.add(file)
        yield file
        names += map(_origin, vars(module).values())


def _origin(value: object) -> str:
    name = "__name__" if isinstance(value, ModuleType) else "__module__"
    with contextlib.suppress(Exception):  # the user's own objects
        return str(getattr(value, name, ""))
    return ""


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

"""How GPT is trained; the functions are copied from gpt.py.

Every device's process calls these for itself: `batches(seed)` must give all of them the same
batches (they are compared), and an optimizer sees its own device's parameters only. To
clip gradients where the model file did not, split the model again: norms are messages.
"""

from __future__ import annotations

import itertools
import sysconfig
from collections.abc import Iterable, Iterator
from pathlib import Path

import torch
from torch import Tensor, nn

SEQUENCE = 64  # bytes per row
BATCH = 16  # rows per mini-batch
TEXT_BYTES = 2_000_000


def text() -> bytes:
    """Read the first two megabytes of the standard library's top-level modules, in name order."""
    folder = Path(sysconfig.get_paths()["stdlib"])
    found = bytearray()
    for path in sorted(folder.glob("*.py")):
        try:
            found += path.read_bytes()
        except OSError:  # one file that cannot be read is no reason to stop
            continue
        if len(found) >= TEXT_BYTES:
            break
    if len(found) <= SEQUENCE + 1:
        raise FileNotFoundError(f"expected Python source files in {folder}, found {len(found)} B")
    return bytes(found[:TEXT_BYTES])


def batches(seed: int) -> Iterator[dict[str, Tensor]]:
    """Yield random windows of the text; the t-th batch depends on seed and t alone."""
    data = torch.frombuffer(bytearray(text()), dtype=torch.uint8)
    window = torch.arange(SEQUENCE + 1)
    for step in itertools.count():
        dice = torch.Generator().manual_seed(seed * 1_000_003 + step)
        starts = torch.randint(len(data) - SEQUENCE, (BATCH, 1), generator=dice)
        rows = data[starts + window].long()
        yield {"tokens": rows[:, :-1].contiguous(), "targets": rows[:, 1:].contiguous()}


def optimizer(named_params: Iterable[tuple[str, nn.Parameter]]) -> torch.optim.Optimizer:
    """Use AdamW, with weight decay on matrices and none on norms, biases and embeddings."""
    decayed: list[nn.Parameter] = []
    plain: list[nn.Parameter] = []
    for name, param in named_params:
        embedding = name.startswith(("embed", "position", "head"))  # the head is the embedding
        free = embedding or "norm" in name or name.endswith("bias")
        (plain if free else decayed).append(param)
    groups = [{"params": decayed, "weight_decay": 0.1}, {"params": plain, "weight_decay": 0.0}]
    return torch.optim.AdamW(groups, lr=3e-3, betas=(0.9, 0.95))


INPUTS = {
    "tokens": ("tokens",),
    "targets": ("targets",),
}
SPECS = {
    "tokens": ("int64", (16, 64)),
    "targets": ("int64", (16, 64)),
}
WHOLE = ()
OPTIMIZER = optimizer
LR_SCALE = None
CLIP_NORM = None

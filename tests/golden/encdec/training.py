"""How EncoderDecoder is trained; the functions are copied from encdec.py.

Every device's process calls these for itself: `batches(seed)` must give all of them the same
batches (they are compared), and an optimizer sees its own device's parameters only. To
clip gradients where the model file did not, split the model again: norms are messages.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator

import torch
from torch import Tensor

from runtime import adamw

PAD, START, END = 0, 1, 2  # tokens; letters come after them
LETTERS = 8
VOCABULARY = 3 + LETTERS
LENGTH = 16  # letters of the longest word
BATCH = 16  # words per mini-batch


def batches(seed: int) -> Iterator[dict[str, Tensor]]:
    """Yield words and their reverses; the t-th batch depends on seed and t alone."""
    for step in itertools.count():
        dice = torch.Generator().manual_seed(seed * 1_000_003 + step)
        source = torch.full((BATCH, LENGTH), PAD)
        target = torch.full((BATCH, LENGTH + 2), PAD)
        lengths = torch.randint(LENGTH // 2, LENGTH + 1, (BATCH,), generator=dice)
        for row, length in enumerate(lengths.tolist()):
            word = torch.randint(3, VOCABULARY, (length,), generator=dice)
            source[row, :length] = word
            target[row, 0] = START
            target[row, 1 : length + 1] = word.flip(0)
            target[row, length + 1] = END
        yield {"source": source, "target": target}


def lr_scale(step: int) -> float:
    """Rise over the first four steps; torch's default AdamW does the rest."""
    return min(1.0, (step + 1) / 4)


INPUTS = {
    "source": ("source",),
    "target": ("target",),
}
SPECS = {
    "source": ("int64", (16, 16)),
    "target": ("int64", (16, 18)),
}
WHOLE = ()
OPTIMIZER = adamw
LR_SCALE = lr_scale
CLIP_NORM = None

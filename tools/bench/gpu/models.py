"""The models of `tools.bench.gpu`, as data: GPT, Llama and ResNet at three sizes, and in bfloat16.

Sizes are chosen for a card of 16 GiB and some 15 TFLOP/s in float32: with AdamW the largest ones
take most of its memory, and a step takes some tenths of a second. The tiny ones are for tests.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path

ROOT = Path(__file__).resolve().parents[3]
SIZES = ("small", "medium", "large")
TINY = "tiny"


@dataclass(frozen=True)
class Model:
    """A model to run, of one size.

    Attributes:
        built: an expression of `module`'s names.
        batch: an expression of a batch of `rows` rows.
        module: of the package `models`. names: what is imported from it.
        micro_batches: that a step has; they divide `rows`.
    """

    name: str
    size: str
    module: str
    names: str
    built: str
    batch: str
    rows: int
    micro_batches: int

    @property
    def micro_rows(self) -> int:
        """Rows of a micro-batch."""
        return self.rows // self.micro_batches

    def text(self) -> str:
        """Return the model file."""
        return _TEMPLATE.format(root=str(ROOT), **{k: getattr(self, k) for k in _FIELDS})


_FIELDS = ("name", "size", "module", "names", "built", "batch")
_TEMPLATE = '''"""{name}, of the size that tools/bench/gpu calls {size}."""
import sys

import torch

sys.path.insert(0, {root!r})
from models.{module} import {names}  # noqa: E402


def model():
    torch.manual_seed(0)
    return {built}


def example_batch():
    torch.manual_seed(1)
    return {batch}
'''


@dataclass(frozen=True)
class _Text:
    """The size of a transformer; `hidden` and `kv_heads` are Llama's."""

    blocks: int
    dim: int
    heads: int
    kv_heads: int
    hidden: int
    sequence: int
    vocabulary: int
    rows: int
    micro_batches: int

    @property
    def batch(self) -> str:
        """Tokens, and what comes next."""
        drawn = f"torch.randint({self.vocabulary}, ({self.rows}, {self.sequence}))"
        return f'{{"tokens": {drawn}, "targets": {drawn}}}'


_TEXTS = {
    TINY: _Text(2, 32, 2, 1, 64, 16, 64, 4, 2),
    "small": _Text(6, 512, 8, 4, 1376, 512, 8192, 16, 4),
    "medium": _Text(12, 768, 12, 4, 2048, 1024, 32000, 8, 4),
    "large": _Text(24, 1024, 16, 4, 2752, 1024, 32000, 6, 2),
}
_IMAGES = {  # blocks per resolution, width, rows, micro-batches
    TINY: (1, 4, 8, 2),
    "small": (3, 64, 256, 4),
    "medium": (5, 128, 128, 2),
    "large": (8, 192, 256, 2),
}


def _gpt(size: str, of: _Text) -> Model:
    built = (
        f"GPT(blocks={of.blocks}, dim={of.dim}, heads={of.heads}, sequence={of.sequence}, "
        f"vocabulary={of.vocabulary})"
    )
    return Model("gpt", size, "gpt", "GPT, loss", built, of.batch, of.rows, of.micro_batches)


def _llama(size: str, of: _Text) -> Model:
    built = (
        f"Llama(blocks={of.blocks}, dim={of.dim}, heads={of.heads}, kv_heads={of.kv_heads}, "
        f"hidden={of.hidden}, vocabulary={of.vocabulary})"
    )
    return Model("llama", size, "llama", "Llama", built, of.batch, of.rows, of.micro_batches)


def _resnet(size: str, blocks: int, width: int, rows: int, micro_batches: int) -> Model:
    built = f"ResNet(blocks={blocks}, width={width})"
    batch = f"torch.randn({rows}, 3, 32, 32), torch.randint(10, ({rows},))"
    return Model("resnet", size, "resnet", "ResNet, loss", built, batch, rows, micro_batches)


def _in_half(model: Model) -> Model:
    """Return a model whose weights are in bfloat16, as are images."""
    batch = model.batch.replace("3, 32, 32)", "3, 32, 32, dtype=torch.bfloat16)")
    built = f"{model.built}.to(torch.bfloat16)"
    return replace(model, name=f"{model.name}-bf16", built=built, batch=batch)


_ALL = (
    *(_gpt(size, of) for size, of in _TEXTS.items()),
    *(_llama(size, of) for size, of in _TEXTS.items()),
    *(_resnet(size, *of) for size, of in _IMAGES.items()),
)
MODELS: Mapping[tuple[str, str], Model] = {
    (m.name, m.size): m for m in (*_ALL, *map(_in_half, _ALL))
}
"""By name and size."""
NAMES = tuple(dict.fromkeys(name for name, _ in MODELS))

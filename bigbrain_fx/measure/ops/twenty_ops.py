"""A model file of about twenty dear ops, for `profile` without a model.

They are those of this project's models that say most of the others (`telling` of
`tools.studies.few_ops`). They have the sizes of these models: an image's convolutions and norms,
a text's products and attention.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

ROWS = 16
CHANNELS = 32
SIDE = 16  # of an image
WORDS = 64  # of a row
WIDTH = 128
HEADS = 4
VOCABULARY = 256


class ImagePart(nn.Module):
    """Convolve, normalise, pool and widen again: (rows, 16, 16, 16) to (rows, 32)."""

    def __init__(self) -> None:
        super().__init__()
        half = CHANNELS // 2
        self.halve = nn.Conv2d(half, CHANNELS, 3, stride=2, padding=1, bias=False)
        self.same = nn.Conv2d(CHANNELS, CHANNELS, 3, padding=1, bias=False)
        self.widen = nn.ConvTranspose2d(CHANNELS, half, 2, stride=2)
        self.batch_norm = nn.BatchNorm2d(CHANNELS)
        self.group_norm = nn.GroupNorm(4, half)
        self.out = nn.Linear(CHANNELS, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        """Return a row of `WIDTH` for each image."""
        small = F.relu(self.batch_norm(self.halve(x)))
        wide = F.relu(self.group_norm(self.widen(self.same(small))))
        both = torch.cat([F.max_pool2d(wide, 2), F.max_pool2d(x, 2)], 1)
        found: Tensor = self.out(both.mean((2, 3)))
        return found


class TextPart(nn.Module):
    """Attend, then two layers on each position: (rows, words, width) to the same shape."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.qkv = nn.Linear(WIDTH, 3 * WIDTH, bias=False)
        self.up = nn.Linear(WIDTH, 4 * WIDTH)
        self.down = nn.Linear(4 * WIDTH, WIDTH)
        self.mixed = nn.Parameter(torch.randn(HEADS, WIDTH // HEADS, WIDTH // HEADS) / 6)

    def forward(self, x: Tensor) -> Tensor:
        """Add both to the stream."""
        rows, words, width = x.shape
        split = self.qkv(self.norm(x)).view(rows, words, 3, HEADS, width // HEADS)
        q, k, v = split.permute(2, 0, 3, 1, 4).unbind(0)
        seen = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        seen = torch.einsum("bhtd,hde->bthe", seen, self.mixed).reshape(rows, words, width)
        x = x + F.dropout(seen, 0.1, self.training)
        found: Tensor = x + self.down(F.gelu(self.up(x)) * 0.5)
        return found


class TwentyOps(nn.Module):
    """Read an image and a text, and predict the text."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, WIDTH)
        self.image = ImagePart()
        self.text = TextPart()
        self.head = nn.Linear(WIDTH, VOCABULARY, bias=False)

    def forward(self, image: Tensor, tokens: Tensor) -> Tensor:
        """Return logits (rows, words, vocabulary)."""
        found: Tensor = self.head(self.text(self.embed(tokens) + self.image(image).unsqueeze(1)))
        return found


def model() -> nn.Module:
    """Build it."""
    return TwentyOps()


def loss(output: Tensor, batch: dict[str, Tensor]) -> Tensor:
    """Return the mean cross-entropy."""
    return F.cross_entropy(output.flatten(0, 1), batch["targets"].flatten())


def example_batch() -> dict[str, Tensor]:
    """Return noise: what it says does not matter."""
    dice = torch.Generator().manual_seed(0)
    words = torch.randint(VOCABULARY, (2, ROWS, WORDS), generator=dice)
    image = torch.randn(ROWS, CHANNELS // 2, SIDE, SIDE, generator=dice)
    return {"image": image, "tokens": words[0], "targets": words[1]}

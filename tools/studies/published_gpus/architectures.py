"""The models that were measured, as their authors describe them; needs torch, some also timm.

`tools.studies.published_gpus.capturing` captures each once. Shapes matter here, and nothing else.
"""

from __future__ import annotations

import importlib
import importlib.abc
import importlib.machinery
import itertools
import sys
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from types import ModuleType
from unittest.mock import MagicMock

import torch
from torch import Tensor, nn
from torch.nn import functional as F

Batch = Mapping[str, Tensor]

# --------------------------------------------------------------------------- transformers

MPT = {"125m": (768, 12, 12), "760m": (1536, 12, 24), "3b": (2560, 20, 32), "13b": (5120, 40, 40)}
"""Width, heads, layers: llm-foundry, scripts/train/yamls/pretrain/mpt-*.yaml."""
_VOCABULARY = 50368


class _Block(nn.Module):
    """Pre-norm attention (flash, causal) and a GELU feed-forward of four times the width."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm_1, self.norm_2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        """Add attention and feed-forward."""
        rows, length, width = x.shape
        parts = self.qkv(self.norm_1(x)).chunk(3, dim=-1)
        q, k, v = (
            p.view(rows, length, self.heads, width // self.heads).transpose(1, 2) for p in parts
        )
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(mixed.transpose(1, 2).reshape(rows, length, width))
        made: Tensor = x + self.down(F.gelu(self.up(self.norm_2(x))))
        return made


class Decoder(nn.Module):
    """MPT: learned positions, tied embedding."""

    def __init__(self, size: str, length: int) -> None:
        super().__init__()
        width, heads, layers = MPT[size]
        self.tokens = nn.Embedding(_VOCABULARY, width)
        self.positions = nn.Embedding(length, width)
        self.blocks = nn.ModuleList(_Block(width, heads) for _ in range(layers))
        self.norm = nn.LayerNorm(width)

    def forward(self, tokens: Tensor) -> Tensor:
        """Return logits."""
        x = self.tokens(tokens) + self.positions(torch.arange(tokens.shape[1]))
        for block in self.blocks:
            x = block(x)
        return F.linear(self.norm(x), self.tokens.weight)


class _Head(nn.Module):
    """A model of transformers that returns its logits and nothing else."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, tokens: Tensor) -> Tensor:
        """Return logits."""
        made: Tensor = self.inner(input_ids=tokens).logits
        return made


def bert_large() -> nn.Module:
    """NeuSight's bert_large.json (a language-model head), attention as plain products."""
    from transformers import BertConfig, BertLMHeadModel

    config = BertConfig(
        hidden_size=1024, num_hidden_layers=24, num_attention_heads=16, intermediate_size=4096
    )
    config._attn_implementation = "eager"
    return _Head(BertLMHeadModel(config))


def gpt2_large() -> nn.Module:
    """NeuSight's gpt2_large.json, attention as plain products."""
    from transformers import GPT2Config, GPT2LMHeadModel

    config = GPT2Config(n_embd=1280, n_layer=36, n_head=20, use_cache=False)
    config._attn_implementation = "eager"
    return _Head(GPT2LMHeadModel(config))


# --------------------------------------------------------------------------- U-Nets


def _norm_conv(a: int, b: int, stride: int = 1) -> nn.Module:
    conv = nn.Conv2d(a, b, 3, stride, 1, bias=False)
    return nn.Sequential(conv, nn.InstanceNorm2d(b, affine=True), nn.LeakyReLU(0.01))


def _two(a: int, b: int, stride: int = 1) -> nn.Module:
    return nn.Sequential(_norm_conv(a, b, stride), _norm_conv(b, b))


class NnUnet(nn.Module):
    """NVIDIA's nnU-Net for slices of 192 x 160: five halvings, 32 to 512 filters."""

    def __init__(self) -> None:
        super().__init__()
        f = [32, 64, 128, 256, 512, 512]
        self.first = _two(4, f[0])
        self.downs = nn.ModuleList(_two(a, b, 2) for a, b in itertools.pairwise(f))
        pairs = list(zip(f[1:], f, strict=False))[::-1]
        self.ups = nn.ModuleList(
            nn.ConvTranspose2d(low, high, 2, 2, bias=False) for low, high in pairs
        )
        self.mixes = nn.ModuleList(_two(2 * high, high) for _, high in pairs)
        self.last = nn.Conv2d(f[0], 4, 1)

    def forward(self, x: Tensor) -> Tensor:
        """Return a score for each class and pixel."""
        found = [self.first(x)]
        for down in self.downs:
            found.append(down(found[-1]))
        x = found.pop()
        for up, mix in zip(self.ups, self.mixes, strict=True):
            x = mix(torch.cat((up(x), found.pop()), dim=1))
        made: Tensor = self.last(x)
        return made


def _stack(first: int, middle: int, last: int, count: int) -> nn.Module:
    widths = [first, *[middle] * (count - 1), last]
    return nn.Sequential(
        *(
            nn.Sequential(
                nn.Conv2d(a, b, 3, padding=1, bias=False),
                nn.Dropout2d(0.1),
                nn.InstanceNorm2d(b),
                nn.LeakyReLU(0.01),
            )
            for a, b in itertools.pairwise(widths)
        )
    )


class PipeUnet(nn.Module):
    """torchgpipe's U-Net (benchmarks/models/unet): depth 5, `count` convolutions a cell."""

    def __init__(self, count: int, base: int) -> None:
        super().__init__()
        self.downs = nn.ModuleList(
            _stack(3 if i == 0 else base * 2 ** (i - 1), base * 2**i, base * 2**i, count)
            for i in range(5)
        )
        self.middle = _stack(base * 16, base * 32, base * 16, count)
        self.ups = nn.ModuleList(
            _stack(base * 2 ** (i + 1), base * 2**i // 2, base * 2**i // 2, count)
            for i in reversed(range(5))
        )
        self.last = nn.Conv2d(base // 2, 1, 1, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """Return a score for each pixel."""
        kept = []
        for down in self.downs:
            kept.append(down(x))
            x = F.max_pool2d(kept[-1], 2, 2)
        x = self.middle(x)
        for up in self.ups:
            x = up(torch.cat((F.interpolate(x, scale_factor=2.0), kept.pop()), dim=1))
        made: Tensor = self.last(x)
        return made


# --------------------------------------------------------------------------- AmoebaNet-D


def _relu_conv(a: int, b: int, size: object = 1, stride: object = 1, pad: object = 0) -> nn.Module:
    conv = nn.Conv2d(a, b, size, stride, pad, bias=False)  # type: ignore[arg-type]
    return nn.Sequential(nn.ReLU(), conv, nn.BatchNorm2d(b))


class _Halved(nn.Module):
    """Two shifted 1 x 1 convolutions of stride 2."""

    def __init__(self, a: int, b: int) -> None:
        super().__init__()
        self.one, self.two = (nn.Conv2d(a, b // 2, 1, 2, bias=False) for _ in range(2))
        self.norm = nn.BatchNorm2d(b)

    def forward(self, x: Tensor) -> Tensor:
        """Halve both sides."""
        x = torch.relu(x)
        shifted = F.pad(x[:, :, 1:, 1:], (0, 1, 0, 1))
        made: Tensor = self.norm(torch.cat((self.one(x), self.two(shifted)), dim=1))
        return made


def _operation(name: str, c: int, stride: int) -> nn.Module:
    match name:
        case "none":
            return nn.Identity() if stride == 1 else _Halved(c, c)
        case "pool":
            return nn.AvgPool2d(3, stride, 1, count_include_pad=False)
        case "max2":
            return nn.MaxPool2d(2, stride)
        case "1x1":
            return _relu_conv(c, c, 1, stride)
        case "3x3":
            sizes: Sequence[tuple[object, ...]] = [(3, stride, 1)]
        case _:
            sizes = [((1, 7), (1, stride), (0, 3)), ((7, 1), (stride, 1), (3, 0))]
    inner = [_relu_conv(c // 4, c // 4, *size) for size in sizes]
    return nn.Sequential(_relu_conv(c, c // 4), *inner, _relu_conv(c // 4, c))


_NORMAL = (
    "1 1x1, 1 pool, 1 none, 0 7x7, 0 1x1, 0 7x7, 2 pool, 2 none, 1 pool, 5 1x1",
    (0, 3, 4, 6),
)
_REDUCTION = (
    "0 max2, 0 pool, 2 none, 1 3x3, 2 7x7, 2 pool, 3 none, 1 max2, 2 pool, 3 1x1",
    (4, 5, 6),
)


class _Cell(nn.Module):
    def __init__(self, before: int, last: int, c: int, reduction: bool, after: bool) -> None:
        super().__init__()
        self.first = _relu_conv(last, c)
        self.second: nn.Module = _Halved(before, c) if after else nn.Identity()
        if not after and before != c:
            self.second = _relu_conv(before, c)
        text, kept = _REDUCTION if reduction else _NORMAL
        self.kept: tuple[int, ...] = kept
        parts = [part.split() for part in text.split(", ")]
        self.places = [int(place) for place, _ in parts]
        self.operations = nn.ModuleList(
            _operation(name, c, 2 if reduction and int(place) < 2 else 1) for place, name in parts
        )

    def forward(self, x: Tensor, before: Tensor) -> tuple[Tensor, Tensor]:
        """Return the next states."""
        states = [self.first(x), self.second(before)]
        for i in range(0, len(self.operations), 2):
            one, two = (self.operations[k](states[self.places[k]]) for k in (i, i + 1))
            states.append(one + two)
        return torch.cat([states[k] for k in self.kept], dim=1), x


class AmoebaNet(nn.Module):
    """AmoebaNet-D as torchgpipe has it (benchmarks/models/amoebanet)."""

    def __init__(self, layers: int, filters: int) -> None:
        super().__init__()
        c = filters // 4
        self.stem = nn.Sequential(
            nn.ReLU(), nn.Conv2d(3, c, 3, 2, 1, bias=False), nn.BatchNorm2d(c)
        )
        before = last = c
        after, cells = False, []
        plan = [True, True, *[False] * (layers // 3), True]
        plan += [*[False] * (layers // 3), True, *[False] * (layers // 3)]
        for reduction in plan:
            c *= 2 if reduction else 1
            cells.append(_Cell(before, last, c, reduction, after))
            before, last, after = last, c * len(cells[-1].kept), reduction
        self.cells = nn.ModuleList(cells)
        self.classify = nn.Linear(last, 1000)

    def forward(self, x: Tensor) -> Tensor:
        """Return a score for each class."""
        x = before = self.stem(x)
        for cell in self.cells:
            x, before = cell(x, before)
        made: Tensor = self.classify(F.avg_pool2d(x, 7).flatten(1))
        return made


# --------------------------------------------------------------------------- timm


class _NoTorchvision(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Stand in for torchvision, which timm imports for its data sets; models need none of it."""

    def find_spec(
        self, name: str, path: object, target: object = None
    ) -> importlib.machinery.ModuleSpec | None:
        own = name.partition(".")[0] == "torchvision"
        return importlib.machinery.ModuleSpec(name, self, is_package=True) if own else None

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> ModuleType:
        found = MagicMock(name=spec.name)
        found.__path__, found.__spec__, found.__name__ = [], spec, spec.name
        return found

    def exec_module(self, module: ModuleType) -> None:
        """Do nothing."""


def timm(name: str, image: int | None = None, *, fused: bool = True) -> nn.Module:
    """Return a model of timm by its name; not `fused`: attention as plain products."""
    if not any(isinstance(finder, _NoTorchvision) for finder in sys.meta_path):
        sys.meta_path.insert(0, _NoTorchvision())
    make: Callable[..., nn.Module] = importlib.import_module("timm").create_model
    importlib.import_module("timm.layers").set_fused_attn(fused)
    try:
        return make(name, img_size=image) if image else make(name)
    except TypeError:  # a model without a fixed size
        return make(name)


# --------------------------------------------------------------------------- batches and losses


def tokens(length: int) -> Batch:
    """Return tokens and what comes next."""
    found = torch.zeros(2, length, dtype=torch.long)
    return {"tokens": found, "y": found.clone()}


def images(channels: int, height: int, width: int, *, last: bool, dense: int = 0) -> Batch:
    """Return images, with a class each, or with `dense` planes of targets."""
    x = torch.zeros(2, channels, height, width)
    x = x.to(memory_format=torch.channels_last) if last else x
    y = torch.zeros(2, height, width, dtype=torch.long)
    return {"x": x, "y": y if dense else torch.zeros(2, dtype=torch.long)}


def token_loss(logits: Tensor, batch: Batch) -> Tensor:
    """Cross-entropy over tokens."""
    return F.cross_entropy(logits.flatten(0, 1), batch["y"].flatten())


def class_loss(scores: Tensor, batch: Batch) -> Tensor:
    """Cross-entropy over classes, of images or pixels."""
    if scores.shape[1] == 1:
        return F.binary_cross_entropy_with_logits(scores[:, 0], batch["y"].float())
    return F.cross_entropy(scores, batch["y"])


MODELS: Mapping[str, Callable[[int], nn.Module]] = {
    **{f"mpt-{size}": partial(Decoder, size) for size in MPT},
    "bert_large": lambda _: bert_large(),
    "gpt2_large": lambda _: gpt2_large(),
    "nnU-Net 2D": lambda _: NnUnet(),
    "unet(5,64)": lambda _: PipeUnet(5, 64),
    "amoebanet-d(18,256)": lambda _: AmoebaNet(18, 256),
}
"""By name; each takes the length of a sequence or the side of an image."""


def built(name: str, side: int, *, fused: bool = True) -> nn.Module:
    """Return a model; what is not in `MODELS` is timm's."""
    return MODELS[name](side) if name in MODELS else timm(name, side, fused=fused)

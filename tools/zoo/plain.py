"""Models in plain torch: each shows one thing that a capture may get wrong."""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from tools.zoo.case import Batch, Case

_ROWS, _WIDTH = 8, 16


def _mse(output: Tensor, batch: Any) -> Tensor:
    return F.mse_loss(output, batch["y"])


def _energy(output: Tensor, _: Any) -> Tensor:
    return output.square().mean()


def _vectors() -> Batch:
    return {"x": torch.randn(_ROWS, _WIDTH), "y": torch.randn(_ROWS, _WIDTH)}


def _sequences() -> Batch:
    return {"x": torch.randn(_ROWS, 6, _WIDTH), "y": torch.randn(_ROWS, 6, _WIDTH)}


def _pictures(channels: int = 3, side: int = 16) -> Callable[[], Batch]:
    def make() -> Batch:
        return {"x": torch.randn(_ROWS, channels, side, side), "y": torch.randint(0, 4, (_ROWS,))}

    return make


def _classes_loss(output: Tensor, batch: Any) -> Tensor:
    return F.cross_entropy(output, batch["y"])


class Stack(nn.Module):
    """Blocks, one after the other."""

    def __init__(self, block: Callable[[], nn.Module], depth: int) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(block() for _ in range(depth))
        self.head = nn.Linear(_WIDTH, _WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return self.head(x)


def _stack(
    name: str,
    block: Callable[[], nn.Module],
    batch: Callable[[], Batch] = _vectors,
    *,
    refused: bool = False,
    remedy: str = "",
    leaves: tuple[str, ...] = (),
    autocast: str | None = None,
) -> Case:
    def build(depth: int) -> nn.Module:
        return Stack(block, depth)

    return Case(name, build, batch, _mse, autocast, refused=refused, remedy=remedy, leaves=leaves)


# --------------------------------------------------------------------------- convolutions


class UNet(nn.Module):
    """Skips go over the bottom: they cross every cut."""

    def __init__(self, depth: int) -> None:
        super().__init__()
        widths = [8] * (depth + 1)
        self.stem = nn.Conv2d(1, 8, 3, padding=1)
        self.down = nn.ModuleList(
            nn.Sequential(nn.Conv2d(a, b, 3, padding=1), nn.GroupNorm(2, b), nn.SiLU())
            for a, b in itertools.pairwise(widths)
        )
        self.up = nn.ModuleList(nn.Conv2d(16, 8, 3, padding=1) for _ in range(depth))
        self.head = nn.Conv2d(8, 1, 1)

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x)
        skips = []
        for level, layer in enumerate(self.down):
            x = layer(x)
            skips.append(x)
            x = F.max_pool2d(x, 2) if level % 2 == 0 else x
        for layer in self.up:
            skip = skips.pop()
            x = F.interpolate(x, size=skip.shape[-2:], mode="nearest")
            x = F.relu(layer(torch.cat([x, skip], dim=1)))
        return self.head(x)


def _noisy() -> Batch:
    return {"x": torch.randn(_ROWS, 1, 16, 16), "y": torch.randn(_ROWS, 1, 16, 16)}


class ConvBlock(nn.Module):
    """A mobile block as in timm: depthwise convolution, squeeze and excitation, drop path."""

    def __init__(self, width: int, drop: float) -> None:
        super().__init__()
        self.conv = nn.Conv2d(width, width, 3, padding=1, groups=width, bias=False)
        self.norm = nn.BatchNorm2d(width)
        self.squeeze = nn.Conv2d(width, width // 4, 1)
        self.excite = nn.Conv2d(width // 4, width, 1)
        self.point = nn.Conv2d(width, width, 1)
        self.drop = drop

    def forward(self, x: Tensor) -> Tensor:
        y = F.hardswish(self.norm(self.conv(x)))
        scale = F.relu(self.squeeze(y.mean((2, 3), keepdim=True)))
        y = self.point(y * torch.sigmoid(self.excite(scale)))
        if self.training and self.drop:
            kept = x.new_empty((x.shape[0], 1, 1, 1)).bernoulli_(1 - self.drop)
            y = y * kept.div_(1 - self.drop)
        return x + y


class ConvNet(nn.Module):
    """A small image classifier."""

    def __init__(self, depth: int) -> None:
        super().__init__()
        self.stem = nn.Sequential(
            nn.Conv2d(3, 16, 3, 2, 1), nn.BatchNorm2d(16), nn.ReLU(inplace=True)
        )
        self.blocks = nn.Sequential(*(ConvBlock(16, 0.1) for _ in range(depth)))
        self.head = nn.Sequential(nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(16, 4))

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.blocks(self.stem(x)))


class DenseNet(nn.Module):
    """Every layer reads all layers before it."""

    def __init__(self, depth: int) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, 8, 3, padding=1)
        self.layers = nn.ModuleList(
            nn.Sequential(
                nn.BatchNorm2d(8 + 4 * i), nn.ReLU(), nn.Conv2d(8 + 4 * i, 4, 3, padding=1)
            )
            for i in range(depth)
        )
        self.head = nn.Linear(8 + 4 * depth, 4)

    def forward(self, x: Tensor) -> Tensor:
        features = [self.stem(x)]
        for layer in self.layers:
            features.append(layer(torch.cat(features, 1)))
        return self.head(torch.cat(features, 1).mean((2, 3)))


class Generator(nn.Module):
    """Transposed convolutions and instance norms, from a code to an image."""

    def __init__(self) -> None:
        super().__init__()
        self.start = nn.Linear(_WIDTH, 16 * 4)
        self.up = nn.ConvTranspose2d(16, 8, 4, 2, 1)
        self.norm = nn.InstanceNorm2d(8, affine=True)
        self.last = nn.utils.parametrizations.spectral_norm(nn.Conv2d(8, 1, 3, padding=1))

    def forward(self, x: Tensor) -> Tensor:
        y = F.leaky_relu(self.norm(self.up(self.start(x).view(-1, 16, 2, 2))), 0.2)
        return torch.tanh(self.last(y)).flatten(1)


# --------------------------------------------------------------------------- other kinds


class Experts(nn.Module):
    """A router that sends each token to its two best experts, all experts computed."""

    def __init__(self) -> None:
        super().__init__()
        self.router = nn.Linear(_WIDTH, 4)
        self.experts = nn.ModuleList(
            nn.Sequential(nn.Linear(_WIDTH, 32), nn.GELU(), nn.Linear(32, _WIDTH)) for _ in range(4)
        )

    def forward(self, x: Tensor) -> Tensor:
        weight, chosen = torch.topk(self.router(x).softmax(-1), 2)
        gates = torch.zeros_like(x[..., :4]).scatter(-1, chosen, weight)
        made = torch.stack([expert(x) for expert in self.experts], dim=-1)
        return x + (made * gates.unsqueeze(-2)).sum(-1)


class GatheredExperts(nn.Module):
    """Weights of the chosen expert are gathered for each row."""

    def __init__(self) -> None:
        super().__init__()
        self.router = nn.Linear(_WIDTH, 4)
        self.weight = nn.Parameter(torch.randn(4, _WIDTH, _WIDTH) / 4)

    def forward(self, x: Tensor) -> Tensor:
        probability, chosen = self.router(x).softmax(-1).max(-1)
        made = torch.bmm(x.unsqueeze(1), self.weight[chosen]).squeeze(1)
        return x + made * probability.unsqueeze(-1)


class Recommender(nn.Module):
    """Bags of sparse features, dense features and their products, as in DLRM."""

    def __init__(self) -> None:
        super().__init__()
        self.bags = nn.ModuleList(
            nn.EmbeddingBag(50, 8, mode=mode) for mode in ("sum", "mean", "max")
        )
        self.user = nn.Embedding(20, 8)
        self.bottom = nn.Sequential(nn.Linear(5, 16), nn.ReLU(), nn.Linear(16, 8))
        self.top = nn.Sequential(nn.Linear(8 + 10, 16), nn.ReLU(), nn.Linear(16, 1))

    def forward(self, dense: Tensor, items: Tensor, user: Tensor) -> Tensor:
        bottom = self.bottom(dense)
        sparse = [bag(items[:, i]) for i, bag in enumerate(self.bags)]
        parts = torch.stack([bottom, self.user(user), *sparse], dim=1)
        products = torch.bmm(parts, parts.transpose(1, 2))
        rows, columns = torch.tril_indices(5, 5, -1)
        pairs = products[:, rows, columns]
        return self.top(torch.cat([bottom, pairs], dim=1)).squeeze(1)


def _clicks() -> Batch:
    return {
        "dense": torch.randn(_ROWS, 5),
        "items": torch.randint(0, 50, (_ROWS, 3, 4)),
        "user": torch.randint(0, 20, (_ROWS,)),
        "clicked": torch.rand(_ROWS).round(),
    }


def _click_loss(output: Tensor, batch: Any) -> Tensor:
    return F.binary_cross_entropy_with_logits(output, batch["clicked"])


class OffsetBags(nn.Module):
    """Bags with offsets: the number of items is not the batch."""

    def __init__(self) -> None:
        super().__init__()
        self.bag = nn.EmbeddingBag(50, _WIDTH, mode="sum")
        self.body = nn.Sequential(nn.Linear(_WIDTH, 32), nn.ReLU(), nn.Linear(32, _WIDTH))

    def forward(self, items: Tensor, offsets: Tensor) -> Tensor:
        return self.body(self.bag(items, offsets))


class RowBags(nn.Module):
    """A row of indices for each bag."""

    def __init__(self) -> None:
        super().__init__()
        self.bag = nn.EmbeddingBag(50, _WIDTH, mode="sum")
        self.body = nn.Sequential(nn.Linear(_WIDTH, 32), nn.ReLU(), nn.Linear(32, _WIDTH))

    def forward(self, items: Tensor) -> Tensor:
        return self.body(self.bag(items))


class Letters(nn.Module):
    """An embedding, a recurrent net of several layers, and a head."""

    def __init__(
        self, kind: type[nn.LSTM | nn.GRU], depth: int, *, both_ways: bool = False
    ) -> None:
        super().__init__()
        self.embed = nn.Embedding(27, _WIDTH)
        self.cells = kind(
            _WIDTH, 24, num_layers=depth, dropout=0.1, batch_first=True, bidirectional=both_ways
        )
        self.head = nn.Linear(48 if both_ways else 24, 27)

    def forward(self, letters: Tensor) -> Tensor:
        made, _ = self.cells(self.embed(letters))
        return self.head(made)


class Cells(nn.Module):
    """A recurrent net written as a loop over time."""

    def __init__(self) -> None:
        super().__init__()
        self.cell = nn.LSTMCell(_WIDTH, _WIDTH)
        self.head = nn.Linear(_WIDTH, _WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        hidden = cell = x.new_zeros(x.shape[0], _WIDTH)
        states = []
        for t in range(x.shape[1]):
            hidden, cell = self.cell(x[:, t], (hidden, cell))
            states.append(hidden)
        return self.head(torch.stack(states, dim=1))


def _text() -> Batch:
    letters = torch.randint(0, 27, (_ROWS, 9))
    return {"letters": letters[:, :-1].contiguous(), "targets": letters[:, 1:].contiguous()}


def _text_loss(output: Tensor, batch: Any) -> Tensor:
    return F.cross_entropy(output.flatten(0, 1), batch["targets"].flatten())


class TorchTransformer(nn.Module):
    """torch's own encoder, and its own decoder."""

    def __init__(self, depth: int) -> None:
        super().__init__()
        layer = nn.TransformerEncoderLayer(_WIDTH, 4, 32, 0.1, batch_first=True)
        self.encoder = nn.TransformerEncoder(layer, depth)
        back = nn.TransformerDecoderLayer(_WIDTH, 4, 32, 0.1, batch_first=True)
        self.decoder = nn.TransformerDecoder(back, depth)

    def forward(self, x: Tensor) -> Tensor:
        memory = self.encoder(x, src_key_padding_mask=torch.zeros(x.shape[:2], dtype=torch.bool))
        causal = nn.Transformer.generate_square_subsequent_mask(x.shape[1])
        return self.decoder(x, memory, tgt_mask=causal)


class GraphLayer(nn.Module):
    """Message passing over fixed edges: gather, then scatter by sum."""

    edges: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.message = nn.Linear(_WIDTH, _WIDTH)
        self.register_buffer("edges", torch.tensor([[0, 1, 2, 3, 4], [1, 2, 3, 4, 5]]))

    def forward(self, x: Tensor) -> Tensor:
        source, target = self.edges
        sent = self.message(x[:, source])
        return x + torch.zeros_like(x).index_add(1, target, F.elu(sent))


# --------------------------------------------------------------------------- autograd and dtypes


class RoundSTE(torch.autograd.Function):
    """Round, and let the gradient through."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, scale: float) -> Tensor:
        """Round to steps of 1/scale."""
        ctx.scale = scale
        return torch.round(x * scale) / scale

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        """Hand the gradient on, a little smaller."""
        return gradients[0] * 0.5, None


class Rounded(nn.Module):
    """Quantise activations with a straight-through estimator."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(_WIDTH, _WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        made: Tensor = RoundSTE.apply(self.linear(x), 8.0)  # type: ignore[no-untyped-call]
        return torch.tanh(made)


class Inner(nn.Module):
    """Dropout between two layers."""

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(_WIDTH, 32)
        self.drop = nn.Dropout(0.2)
        self.down = nn.Linear(32, _WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(self.drop(F.gelu(self.up(x))))


class Checkpointed(Inner):
    """The same, computed again in the backward pass."""

    reentrant = False

    def forward(self, x: Tensor) -> Tensor:
        made: Tensor = checkpoint(super().forward, x, use_reentrant=self.reentrant)
        return made


class Reentrant(Checkpointed):
    """The older kind of checkpoint."""

    reentrant = True


class Mixed(Inner):
    """A region in bfloat16, another that is kept out of it."""

    def forward(self, x: Tensor) -> Tensor:
        with torch.autocast("cpu", dtype=torch.bfloat16):
            y = self.up(x)
            with torch.autocast("cpu", enabled=False):
                y = F.gelu(y.float())
            y = self.down(self.drop(y))
        return x + y.float()


class Frozen(Inner):
    """A teacher under no_grad beside a student; the difference is detached in part."""

    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            target = torch.sigmoid(self.up(x))
        return x + self.down(self.drop(self.up(x)) * target).detach() * 0.5 + self.down(target)


class PartFrozen(Inner):
    """Parameters that are not trained."""

    def __init__(self) -> None:
        super().__init__()
        self.up.requires_grad_(False)


class Normed(nn.Module):
    """BatchNorm in train mode moves its buffers."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(_WIDTH, _WIDTH)
        self.norm = nn.BatchNorm1d(_WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return F.relu(self.norm(self.linear(x)))


class InPlace(nn.Module):
    """Writes into what it made: whole tensors, views, slices, masks."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(_WIDTH, _WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        y = self.linear(x)
        y += x
        y.mul_(0.5).add_(1.0)
        y[:, 0] = 0.0
        y[:, 4:8] *= 2.0
        y = F.relu_(y)
        z = y.clone()
        z.masked_fill_(z > 2.0, 2.0)
        z[:, 8:].copy_(x[:, 8:])
        return z


class Counting(nn.Module):
    """Keeps a running mean and a counter in buffers, as a quantiser does."""

    mean: Tensor
    seen: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(_WIDTH, _WIDTH)
        self.register_buffer("mean", torch.zeros(_WIDTH))
        self.register_buffer("seen", torch.zeros((), dtype=torch.long))

    def forward(self, x: Tensor) -> Tensor:
        y = self.linear(x)
        if self.training:
            with torch.no_grad():
                self.mean.lerp_(y.detach().mean(0), 0.1)
                self.seen += 1
        return torch.tanh(y - self.mean)


class Reassigning(nn.Module):
    """Gives its buffer a new tensor instead of writing into it."""

    mean: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(_WIDTH, _WIDTH)
        self.register_buffer("mean", torch.zeros(_WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        y = self.linear(x)
        self.mean = 0.9 * self.mean + 0.1 * y.detach().mean(0)
        return torch.tanh(y - self.mean)


# --------------------------------------------------------------------------- forms of in and out


@dataclass
class Result:
    """What a model returns."""

    loss: Tensor
    logits: Tensor
    hidden: tuple[Tensor, ...] = ()
    nothing: None = None


class DataclassOut(nn.Module):
    """Returns a dataclass of the user's."""

    def __init__(self, depth: int) -> None:
        super().__init__()
        self.body = Stack(Inner, depth)

    def forward(self, x: Tensor, y: Tensor) -> Result:
        logits = self.body(x)
        return Result(F.mse_loss(logits, y), logits, (x * 2,))


class DictOut(nn.Module):
    """Returns a nest of dicts and lists."""

    def __init__(self, depth: int) -> None:
        super().__init__()
        self.body = Stack(Inner, depth)

    def forward(self, x: Tensor, y: Tensor) -> dict[str, object]:
        logits = self.body(x)
        return {"loss": F.mse_loss(logits, y), "parts": [logits, {"again": logits}], "none": None}


class KeywordOnly(nn.Module):
    """Takes keyword-only, optional and constant inputs."""

    def __init__(self, depth: int) -> None:
        super().__init__()
        self.body = Stack(Inner, depth)

    def forward(
        self, x: Tensor, *, mask: Tensor | None, scale: float = 1.0, bias: Tensor | None = None
    ) -> Tensor:
        x = x if mask is None else x * mask
        return self.body(x * scale if bias is None else x * scale + bias)


def _keywords() -> Batch:
    return {**_vectors(), "mask": None, "scale": 0.5}  # type: ignore[dict-item]  # a dict


class TupleIn(nn.Module):
    """Takes a nest of tensors."""

    def __init__(self, depth: int) -> None:
        super().__init__()
        self.body = Stack(Inner, depth)

    def forward(self, pair: tuple[Tensor, Tensor], sizes: list[int]) -> Tensor:
        return self.body(pair[0] * sizes[0] + pair[1])


# --------------------------------------------------------------------------- what stands in the way


class Branching(Inner):
    """Clamps when something overflowed: a value decides."""

    def forward(self, x: Tensor) -> Tensor:
        y = super().forward(x)
        if not torch.isfinite(y).all():
            y = torch.nan_to_num(y)
        return y


class Reading(Inner):
    """Uses a value as a Python number."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) * float(x.abs().max().item())


class Dropping(nn.Module):
    """Drops layers with Python's dice."""

    def __init__(self, depth: int) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Inner() for _ in range(depth))

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            if random.random() < 0.5:
                x = block(x)
        return x


class ReadingNone(Inner):
    """The same, kept in a tensor."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) * x.detach().abs().max()


class DroppingByTorch(Dropping):
    """Drops layers with torch's dice."""

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = torch.where(torch.rand(()) < 0.5, block(x), x)
        return x


class Selecting(Inner):
    """Selects rows: the shape depends on data."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x[x[:, 0] > 0])


class Masking(Inner):
    """Masks rows instead."""

    def forward(self, x: Tensor) -> Tensor:
        return torch.where(x[:, :1] > 0, super().forward(x), 0.0)


CASES = (
    Case("unet-skips", UNet, _noisy, _mse),
    Case("conv-net", ConvNet, _pictures(), _classes_loss),
    Case("dense-net", DenseNet, _pictures(), _classes_loss),
    Case(
        "generator",
        lambda _: Generator(),
        lambda: {"x": torch.randn(_ROWS, _WIDTH), "y": torch.randn(_ROWS, 16)},
        _mse,
        depth=0,
    ),
    _stack("moe", Experts, _sequences),
    _stack("moe-gathered", GatheredExperts),
    Case("recommender", lambda _: Recommender(), _clicks, _click_loss, depth=0),
    Case(
        "recommender-offsets",
        lambda _: OffsetBags(),
        lambda: {
            "items": torch.randint(0, 50, (40,)),
            "offsets": torch.arange(0, 40, 5),
            "y": torch.randn(_ROWS, _WIDTH),
        },
        _mse,
        depth=0,
        refused=True,  # the second micro-batch has offsets that begin in the middle
        remedy="recommender-offsets-remedied",
    ),
    Case(
        "recommender-offsets-remedied",
        lambda _: RowBags(),
        lambda: {"items": torch.randint(0, 50, (_ROWS, 5)), "y": torch.randn(_ROWS, _WIDTH)},
        _mse,
        depth=0,
    ),
    Case("lstm", lambda depth: Letters(nn.LSTM, depth), _text, _text_loss),
    Case(
        "lstm-both-ways", lambda depth: Letters(nn.LSTM, depth, both_ways=True), _text, _text_loss
    ),
    Case("gru", lambda depth: Letters(nn.GRU, depth), _text, _text_loss),
    _stack("lstm-cells", Cells, _sequences),
    Case("torch-transformer", TorchTransformer, _sequences, _mse),
    _stack("graph", GraphLayer, _sequences),
    _stack("custom-function", Rounded),
    _stack("checkpoint", Checkpointed),
    _stack("checkpoint-reentrant", Reentrant, refused=True, remedy="checkpoint"),
    _stack("autocast-region", Mixed),
    _stack("autocast-whole", Inner, autocast="bfloat16"),
    _stack("no-grad", Frozen),
    _stack("frozen", PartFrozen),
    _stack("batch-norm", Normed),
    _stack("in-place", InPlace),
    _stack("buffer", Counting),
    _stack("buffer-reassigned", Reassigning),
    Case("dict-output", DictOut, _vectors),
    Case("dataclass-output", DataclassOut, _vectors),
    Case("keyword-only", KeywordOnly, _keywords, _mse),
    Case(
        "nested-input",
        TupleIn,
        lambda: {
            "pair": (torch.randn(_ROWS, _WIDTH), torch.randn(_ROWS, _WIDTH)),
            "sizes": [2, 3],
            "y": torch.randn(_ROWS, _WIDTH),
        },
        _mse,
    ),
    _stack("branch-on-data", Branching),
    _stack("item", Reading, refused=True, remedy="item-remedied"),
    _stack("item-remedied", ReadingNone),
    _stack("item-leaf", Reading, leaves=("Reading",)),
    Case("python-dice", Dropping, _vectors, _mse, refused=True, remedy="python-dice-remedied"),
    Case("python-dice-remedied", DroppingByTorch, _vectors, _mse),
    Case(
        "rows-by-data",
        lambda _: Selecting(),
        _vectors,
        _energy,
        depth=0,
        refused=True,
        remedy="rows-by-data-remedied",
    ),
    Case("rows-by-data-remedied", lambda _: Masking(), _vectors, _energy, depth=0),
)

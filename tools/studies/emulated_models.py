"""Models and clusters to emulate, as data: what the measured studies run.

Models are of such a size that a step of an emulated cluster takes about a second, and a pass of one
micro-batch through a stage far longer than the 8 ms of a quota's period.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

from bigbrain_fx.core import Cluster, Device, Link

MICRO_BATCHES = 4
MEMORY_BYTES = 2**31
FLOPS_PER_S, BYTES_PER_S = 60e9, 12e9  # of a device of speed 1, as described: only ratios matter


@dataclass(frozen=True)
class Model:
    """A model to run: `code` has classes and imports, `built` and `batch` are expressions.

    Attributes:
        rows: of a mini-batch; MICRO_BATCHES divides it.
        calibrates: its cells may be looked at to mend the forecast; they are not reported on.
    """

    name: str
    built: str
    batch: str
    rows: int
    code: str = ""
    calibrates: bool = False

    def text(self, root: str) -> str:
        """Return the model file; `root` is where the package `models` is."""
        return _TEMPLATE.format(
            name=self.name, root=root, code=self.code, built=self.built, batch=self.batch
        )

    def sized(self, rows: int) -> Model:
        """Return the model with a mini-batch of so many rows."""
        old, new = str(self.rows), str(rows)
        batch = self.batch.replace(f"({old}, ", f"({new}, ").replace(f", ({old},", f", ({new},")
        return replace(self, rows=rows, batch=batch.replace(f"n({old}", f"n({new}"))


@dataclass(frozen=True)
class Site:
    """A cluster to emulate: the devices' relative speeds, and the one kind of link."""

    name: str
    speeds: tuple[int, ...]
    mbit_per_s: float
    latency_s: float = 1e-3
    calibrates: bool = False

    @property
    def cluster(self) -> Cluster:
        """The cluster, described: every device a host of its own."""
        devices = tuple(
            Device(f"d{i}", f"h{i}", "cpu", MEMORY_BYTES, s * FLOPS_PER_S, s * BYTES_PER_S)
            for i, s in enumerate(self.speeds)
        )
        return Cluster(devices, Link(self.latency_s, self.mbit_per_s * 1e6 / 8))


# --------------------------------------------------------------------------- the tables

_TEMPLATE = '''"""{name}, of the size that emulated devices run."""
import sys

import torch
import torch.nn.functional as F
from torch import nn

sys.path.insert(0, {root!r})
{code}

def model():
    torch.manual_seed(0)
    return {built}


def example_batch():
    torch.manual_seed(1)
    return {batch}
'''

_TOKENS = '{{"tokens": torch.randint({0}, ({1}, {2})), "targets": torch.randint({0}, ({1}, {2}))}}'

_MIXER = '''

class Block(nn.Module):
    """Mix over patches, then over channels (Tolstikhin et al., 2021)."""

    def __init__(self, patches, dim):
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(dim), nn.LayerNorm(dim)
        self.across = nn.Sequential(
            nn.Linear(patches, 2 * patches), nn.GELU(), nn.Linear(2 * patches, patches)
        )
        self.within = nn.Sequential(nn.Linear(dim, 4 * dim), nn.GELU(), nn.Linear(4 * dim, dim))

    def forward(self, x):
        x = x + self.across(self.norm1(x).transpose(1, 2)).transpose(1, 2)
        return x + self.within(self.norm2(x))


class Mixer(nn.Module):
    def __init__(self, blocks, dim):
        super().__init__()
        self.embed = nn.Conv2d(3, dim, 4, 4)
        self.blocks = nn.Sequential(*(Block(64, dim) for _ in range(blocks)))
        self.head = nn.Linear(dim, 10)

    def forward(self, images):
        x = self.blocks(self.embed(images).flatten(2).transpose(1, 2))
        return self.head(x.mean(1))


def loss(output, batch):
    return F.cross_entropy(output, batch[1])
'''

_RECURRENT = '''

class Reader(nn.Module):
    """Layers of LSTM, one after another."""

    def __init__(self, layers, dim, vocabulary):
        super().__init__()
        self.embed = nn.Embedding(vocabulary, dim)
        self.layers = nn.ModuleList(nn.LSTM(dim, dim, batch_first=True) for _ in range(layers))
        self.head = nn.Linear(dim, vocabulary)

    def forward(self, tokens):
        x = self.embed(tokens)
        for layer in self.layers:
            x, _ = layer(x)
        return self.head(x)


def loss(output, batch):
    return F.cross_entropy(output.flatten(0, 1), batch["targets"].flatten())
'''

_CNN = """

class Cnn(nn.Module):
    def __init__(self, width):
        super().__init__()
        sizes = (3, width, width, 2 * width, 2 * width)
        self.convs = nn.ModuleList(
            nn.Conv2d(a, b, 3, padding=1) for a, b in zip(sizes, sizes[1:])
        )
        self.head = nn.Linear(2 * width, 10)

    def forward(self, images):
        x = images
        for conv in self.convs:
            x = F.max_pool2d(F.relu(conv(x)), 2)
        return self.head(x.flatten(2).mean(2))


def loss(output, batch):
    return F.cross_entropy(output, batch[1])
"""

_MODELS = (
    Model(
        "gpt",
        "GPT(blocks=6, dim=256, heads=4, sequence=128, vocabulary=512)",
        _TOKENS.format(512, 8, 128),
        8,
        "from models.gpt import GPT, loss  # noqa: E402\n",
        calibrates=True,
    ),
    Model(
        "llama",
        "Llama(blocks=6, dim=256, heads=4, kv_heads=2, hidden=688, vocabulary=512)",
        _TOKENS.format(512, 8, 128),
        8,
        "from models.llama import Llama  # noqa: E402\n",
    ),
    Model(
        "encdec",
        "EncoderDecoder(layers=3, dim=256)",
        '{"source": torch.randint(3, 11, (64, 16)), "target": torch.randint(3, 11, (64, 18))}',
        64,
        "from models.encdec import EncoderDecoder  # noqa: E402\n",
    ),
    Model(
        "moe",
        "MoE(blocks=4, dim=256, hidden=512)",
        _TOKENS.format(32, 32, 32),
        32,
        "from models.moe import MoE, loss  # noqa: E402\n",
    ),
    Model(
        "resnet",
        "ResNet(blocks=2, width=16)",
        "torch.randn(80, 3, 32, 32), torch.randint(10, (80,))",
        80,
        "from models.resnet import ResNet, loss  # noqa: E402\n",
        calibrates=True,
    ),
    Model(
        "unet",
        "UNet(depth=3, width=16)",
        "torch.randn(80, 1, 32, 32), torch.rand(80, 1, 32, 32).round()",
        80,
        "from models.unet import UNet, loss  # noqa: E402\n",
    ),
    Model(
        "mixer",
        "Mixer(blocks=6, dim=256)",
        "torch.randn(20, 3, 32, 32), torch.randint(10, (20,))",
        20,
        _MIXER,
    ),
    Model("lstm", "Reader(5, 192, 256)", _TOKENS.format(256, 64, 32), 64, _RECURRENT),
)
CNN = Model(
    "cnn", "Cnn(16)", "torch.randn({rows}, 3, 32, 32), torch.randint(10, ({rows},))", 64, _CNN
)
"""Of no fixed batch: `{rows}` stands for its rows."""
MODELS: Mapping[str, Model] = {model.name: model for model in _MODELS}

_SITES = (
    Site("equal2-1000", (1, 1), 1000.0, calibrates=True),
    Site("equal2-100", (1, 1), 100.0),
    Site("uneven2-1000", (2, 1), 1000.0),
    Site("uneven2-200", (2, 1), 200.0, 2e-3),
    Site("equal3-300", (1, 1, 1), 300.0),
    Site("uneven4-1000", (4, 2, 1, 1), 1000.0),
)
SITES: Mapping[str, Site] = {site.name: site for site in _SITES}

"""What is run of data against model parallelism, as data: models, ways to use devices, and rows."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from itertools import product
from typing import Any

from bigbrain_fx.plan import Options
from tools.studies.emulated_models import CNN, Model, Site

MICRO_BATCHES = 4
DEVICES = 4  # of the emulated cluster; fewer are used of the same
MBIT_PER_S = (1000.0, 100.0)
ROWS = 64  # of the step that every way is run at
SWEEP = {"mlp": (16, 256, 1024), "cnn": (16, 256, 1024), "resnet": (16, 256), "gpt": (16, 256)}

_MLP = """

class Mlp(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(width, width) for _ in range(6))
        self.head = nn.Linear(width, 10)

    def forward(self, images):
        x = images.flatten(1)
        for layer in self.layers:
            x = F.relu(layer(x))
        return self.head(x)


def loss(output, batch):
    return F.cross_entropy(output, batch[1])
"""

_IMAGES = "torch.randn({rows}, 3, {side}, {side}), torch.randint(10, ({rows},))"
_TOKENS = (
    '{{"tokens": torch.randint(256, ({rows}, 32)), "targets": torch.randint(256, ({rows}, 32))}}'
)
MODELS: Mapping[str, Model] = {
    "mlp": Model("mlp", "Mlp(768)", _IMAGES.replace("{side}", "16"), ROWS, _MLP),
    "cnn": replace(CNN, rows=ROWS),
    "resnet": Model(
        "resnet",
        "ResNet(blocks=1, width=8)",
        _IMAGES.replace("{side}", "32"),
        ROWS,
        "from models.resnet import ResNet, loss  # noqa: E402\n",
    ),
    "gpt": Model(
        "gpt",
        "GPT(blocks=4, dim=128, heads=4, sequence=32, vocabulary=256)",
        _TOKENS,
        ROWS,
        "from models.gpt import GPT, loss  # noqa: E402\n",
    ),
}


@dataclass(frozen=True)
class Way:
    """How devices share a step: how many of them, as so many replicas, with which ZeRO stage."""

    name: str
    devices: int
    choices: Mapping[str, Any]

    @property
    def options(self) -> Options:
        """What is planned: pipelines are cut evenly, so that all devices are used."""
        return Options("naive", schedule="1f1b", micro_batches=MICRO_BATCHES, **self.choices)

    def __str__(self) -> str:
        return "1 device" if self.devices == 1 else f"{self.name}, {self.devices} devices"


ONE = Way("one", 1, {})
WAYS = (
    *(Way("pipeline", n, {}) for n in (2, 4)),
    *(Way("replicas", n, {"replicas": n}) for n in (2, 4)),
    Way("2 replicas of pipelines of 2", 4, {"replicas": 2}),
    *(Way("ZeRO 1", n, {"replicas": n, "zero_stage": 1}) for n in (2, 4)),
    Way("ZeRO 3", 4, {"replicas": 4, "zero_stage": 3, "sum_order": "micro"}),
)
_SWEPT = (ONE, *(way for way in WAYS if way.devices == 4 and way.name in ("pipeline", "replicas")))


@dataclass(frozen=True)
class StudyCell:
    """A model and a batch, on so many of the emulated devices, in one way."""

    model: str
    rows: int
    way: Way
    mbit_per_s: float

    @property
    def key(self) -> tuple[str, int, str, float]:
        """What a row names it by."""
        return self.model, self.rows, str(self.way), self.mbit_per_s


@dataclass(frozen=True)
class StudyRow:
    """What a cell came to.

    Attributes:
        way: with its number of devices.
        step_s: median of the steps but the first.
        sent_bytes: of all messages of a step, as planned.
        peak_bytes: of the fullest device, as forecast: tensors.
        resident_bytes: of the fullest process, above what Python and torch take.
        load: of the machine, others included, when it began.
    """

    model: str
    rows: int
    way: str
    mbit_per_s: float
    step_s: float
    sent_bytes: int
    peak_bytes: int
    resident_bytes: int
    load: float

    @property
    def key(self) -> tuple[str, int, str, float]:
        """Which cell it is of."""
        return self.model, self.rows, self.way, self.mbit_per_s

    @property
    def rows_per_s(self) -> float:
        """Rows trained on in a second."""
        return self.rows / self.step_s


def cells() -> Iterator[StudyCell]:
    """Yield all cells, those of one network together; one device needs no network twice."""
    for mbit_per_s, model in product(MBIT_PER_S, MODELS):
        is_fast = mbit_per_s == MBIT_PER_S[0]
        for way in (ONE, *WAYS) if is_fast else WAYS:
            yield StudyCell(model, ROWS, way, mbit_per_s)
        for rows, way in product(SWEEP[model] if is_fast else (), _SWEPT):
            yield StudyCell(model, rows, way, mbit_per_s)


def site(mbit_per_s: float) -> Site:
    """Return the cluster that is emulated."""
    return Site(f"dp-vs-mp-{mbit_per_s:g}", (1,) * DEVICES, mbit_per_s)


def model_text(name: str, rows: int, root: str) -> str:
    """Return a model's file, for a batch of so many rows."""
    model = MODELS[name]
    return replace(model, batch=model.batch.format(rows=rows)).text(root)

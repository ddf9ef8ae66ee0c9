"""The two files that `bigbrain-fx init` writes: a model that trains, and a cluster for it.

Other models are those of models/, which a wheel has beside this file. This room holds texts; it
knows nothing of how they are read.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING

from bigbrain_fx.errors import InputError, os_error_as

if TYPE_CHECKING:
    from bigbrain_fx.core import Cluster

MODEL = '''\
"""A model for bigbrain-fx: it guesses the next byte of a text from the sixteen before it.

    bigbrain-fx split model.py --devices cluster.json --out bundle
    bigbrain-fx run bundle --steps 30

The names below are what bigbrain-fx looks for. It runs this file when it splits the model; the
bundle gets its own copy of `batches` and `optimizer`.
"""

import argparse
from collections.abc import Iterable, Iterator
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor, nn

CONTEXT = 16  # bytes that the model sees
BATCH = 64  # rows of a mini-batch; a multiple of --micro-batches


class Block(nn.Module):
    """A residual block; as long as it is one class, the bundle has one class for it, too."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.up = nn.Linear(width, 4 * width)
        self.down = nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(F.gelu(self.up(self.norm(x))))


class NextByte(nn.Module):
    def __init__(self, width: int = 256, depth: int = 4) -> None:
        super().__init__()
        self.embed = nn.Embedding(256, 32)
        self.enter = nn.Linear(32 * CONTEXT, width)
        self.blocks = nn.ModuleList(Block(width) for _ in range(depth))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, 256)

    def forward(self, context: Tensor) -> Tensor:
        x = self.enter(self.embed(context).flatten(1))
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


def model() -> nn.Module:
    """Required. Return the model; a class or an instance called `model` would do as well."""
    return NextByte()


def example_batch() -> dict[str, Tensor]:
    """Required. Return one mini-batch; dimension 0 is the batch.

    Entries that are named like arguments of `forward` are passed to it; the others are for `loss`.
    """
    return next(batches(seed=0))


def loss(output: Tensor, batch: dict[str, Tensor]) -> Tensor:
    """Optional. Without it the model returns its loss, or an object with `.loss`."""
    return F.cross_entropy(output, batch["target"])


def batches(seed: int) -> Iterator[dict[str, Tensor]]:
    """Optional. Yield mini-batches; step t takes the t-th, on every device.

    Here each step has a generator of its own, so that step 1000 can be had without the 999 before.
    """
    text = torch.tensor(list(Path(argparse.__file__).read_bytes()))
    step = 0
    while True:
        generator = torch.Generator().manual_seed(1_000_003 * seed + step)
        start = torch.randint(len(text) - CONTEXT, (BATCH,), generator=generator)
        context = text[start[:, None] + torch.arange(CONTEXT)]
        yield {"context": context, "target": text[start + CONTEXT]}
        step += 1


def optimizer(named_params: Iterable[tuple[str, nn.Parameter]]) -> torch.optim.Optimizer:
    """Optional. Called on each device with its own parameters; default: AdamW as it comes."""
    return torch.optim.AdamW(named_params, lr=2e-3)


# More that may be here:
#
# def lr_scale(step: int) -> float:      # a factor on every learning rate
#     return min(1.0, (step + 1) / 100)
#
# def scheduler(optimizer):              # or a scheduler, stepped after every training step
#     return torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 1000)
#
# clip_norm = 1.0                        # limit of the gradient's norm over all devices
# autocast = "bfloat16"                  # compute in this type where torch deems it safe; or
# autocast = "float16"                   # on GPUs without bfloat16, with
# grad_scaler = True                     # torch.amp.GradScaler, over all devices
'''

CLUSTER = """\
{
  "$comment": "An example with made-up rates: `bigbrain-fx doctor` measures this machine's.",
  "devices": [
    {
      "$comment": "Rates are what the device sustains in FP32. 'host' is the machine it is in.",
      "name": "d0",
      "host": "localhost",
      "kind": "cpu",
      "memory": "2GiB",
      "flops": "60GFLOP/s",
      "memory_bandwidth": "12GB/s",
      "threads": 1
    },
    {
      "$comment": "A GPU needs no rates: 'name', 'host' and 'preset': 'rtx-3090' will do.",
      "name": "d1",
      "host": "localhost",
      "kind": "cpu",
      "memory": "2GiB",
      "flops": "60GFLOP/s",
      "memory_bandwidth": "12GB/s",
      "threads": 1
    }
  ],
  "links": {
    "default": {
      "$comment": "For any two devices; 'between' holds exceptions, by devices or hosts.",
      "bandwidth": "1GB/s",
      "latency": "50us"
    },
    "between": []
  }
}
"""

CLUSTER_NAME = "cluster.json"
MEASURING = "bigbrain-fx doctor --write cluster.json --force"
MADE_UP = (
    "the rates in cluster.json are an example's, not this machine's, so forecasts are not either: "
    f"`{MEASURING}` measures them"
)
EXAMPLES = ("bytes", "gpt", "resnet", "hf", "digits")
_FILES = {"gpt": "gpt.py", "resnet": "resnet.py", "hf": "finetune_hf.py", "digits": "digits.py"}
_INSTALLED = Path(__file__).parent / "examples"  # in a wheel; a checkout has them in models/
_CHECKOUT = Path(__file__).resolve().parents[2] / "models"


def example(name: str) -> str:
    """Return the model file of an example.

    Raises:
        InputError: there is no such example.
    """
    if name == "bytes":
        return MODEL
    if name not in _FILES:
        raise InputError(
            f"there is no example '{name}'",
            code="BX3528",
            help=f"choose one of {', '.join(EXAMPLES)}",
        )
    places = (folder / _FILES[name] for folder in (_INSTALLED, _CHECKOUT))
    return next(path for path in places if path.is_file()).read_text(encoding="utf-8")


def is_made_up(cluster: Cluster) -> bool:
    """Whether a cluster is the example that `init` writes, with rates that nobody measured."""
    from bigbrain_fx.cluster import parse_cluster

    return cluster == parse_cluster(CLUSTER, CLUSTER_NAME)


def write_starter(
    folder: str | Path, force: bool = False, example_name: str = "bytes"
) -> tuple[Path, ...]:
    """Write model.py and cluster.json into `folder`, which is made if it is not there.

    Nothing is written if model.py exists and `force` is off; a cluster.json alone is kept, as
    `doctor --write` left it.

    Args:
        folder: where.
        force: replace what is there.
        example_name: one of `EXAMPLES`.

    Returns:
        The files written.

    Raises:
        InputError: a file exists, the folder cannot be written, or there is no such example.
    """
    from bigbrain_fx.weights import replace_file

    folder = Path(folder)
    texts = {"model.py": example(example_name), CLUSTER_NAME: CLUSTER}
    there = [name for name in texts if os.path.lexists(folder / name)]
    if there == [CLUSTER_NAME] and (folder / CLUSTER_NAME).is_file() and not force:
        del texts[CLUSTER_NAME]
    elif there and not force:
        raise InputError(
            f"{' and '.join(there)} exist{'' if len(there) > 1 else 's'} already",
            code="BX3529",
            at=str(folder),
            help="name another folder, or add --force to replace them",
        )
    with os_error_as(
        "cannot write the starter files",
        code="BX3530",
        at=folder,
        help="name a folder that can be written",
    ):
        folder.mkdir(parents=True, exist_ok=True)
        for name, text in texts.items():
            replace_file(folder / name, text.encode())
        return tuple(folder / name for name in texts)

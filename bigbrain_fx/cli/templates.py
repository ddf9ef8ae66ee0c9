"""The two files that `bigbrain-fx init` writes: a model that trains, and a cluster for it.

Models are those of models/, which a wheel has beside this file.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING

from bigbrain_fx.errors import InputError, os_error_as

if TYPE_CHECKING:
    from bigbrain_fx.core import Cluster

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
_FILES = {
    "bytes": "next_byte.py",
    "gpt": "gpt.py",
    "resnet": "resnet.py",
    "hf": "finetune_hf.py",
    "digits": "digits.py",
}
EXAMPLES = tuple(_FILES)
_INSTALLED = Path(__file__).parent / "examples"  # in a wheel; a checkout has them in models/
_CHECKOUT = Path(__file__).resolve().parents[2] / "models"


def example(name: str) -> str:
    """Return the model file of an example.

    Raises:
        InputError: there is no such example.
    """
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

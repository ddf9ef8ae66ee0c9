"""Published rows as a forecast is asked them: model, card, precision, sizes, seconds a step.

It reads the CSV files of a folder that is not ours to ship; what the product cannot be asked
(tensor parallelism, FP8, rows of memory) is left out, with a reason.
"""

from __future__ import annotations

import csv
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from tools.bench.published_gpus.graphs import Key

VARIABLE = "BIGBRAIN_GPU_DATA"
FILES = ("llm_foundry", "neusight_labels", "deeplearningexamples", "other", "timm")

_CARDS = {
    "a100_40gb": "a100-40",
    "a100_80gb": "a100-80",
    "h100_80gb": "h100",
    "A100-SXM4-80GB": "a100-80",
    "NVIDIA_A100-SXM4-40GB": "a100-40",
    "NVIDIA_A100-PCIE-40GB": "a100-40-pcie",
    "NVIDIA_A100_80GB_PCIe": "a100-80-pcie",
    "NVIDIA_H100_80GB_HBM3": "h100",
    "NVIDIA_L4": "l4",
    "Tesla_V100-PCIE-32GB": "v100-32-pcie",
    "Tesla_P100-PCIE-16GB": "p100-16",
    "Tesla_P4": "p4",
    "Tesla_T4": "t4",
    "T4": "t4",
    "V100-SXM2-16GB": "v100-16",
    "V100-SXM2-32GB": "v100-32",
    "Tesla P40": "p40",
    "rtx-3090": "rtx-3090",
}
_SOURCES = {
    "MosaicML llm-foundry": "llm-foundry",
    "NeuSight (ASPLOS 2025) labels": "neusight",
    "NVIDIA DeepLearningExamples": "dle",
    "torchgpipe benchmarks": "torchgpipe",
    "timm results": "timm",
}


@dataclass(frozen=True)
class Row:
    """One measurement; `step_s` is of micro_batch x accum rows on each replica.

    `parallelism` is "", "DP", "PP" or "FSDP"; `fused`: under torch.compile. `products_tf32`: of
    products, which NGC's containers and "tf32" rows have on. `last_is_kept`: the last micro-batch
    is not computed again, as torchgpipe's "except_last" has it.
    """

    id: str
    source: str
    card: str
    key: Key
    gpus: int
    parallelism: str
    micro_batch: int
    accum: int
    step_s: float
    recompute: bool
    with_optimizer: bool = True
    fused: bool = False
    last_is_kept: bool = False
    products_tf32: bool = False

    @property
    def precision(self) -> str:
        """As a table names it."""
        if self.products_tf32:
            return "tf32"
        return {"float32": "fp32", "float16": "fp16", "bfloat16": "bf16"}[self.key.precision]

    @property
    def samples(self) -> int:
        """Rows of a step on each replica."""
        return self.micro_batch * self.accum


@dataclass(frozen=True)
class Skipped:
    """A row that is not forecast, and why."""

    id: str
    why: str


def data_folder(given: Path | None) -> Path | None:
    """Return where the rows are: as given, else as the environment says; None: nowhere."""
    named = os.environ.get(VARIABLE)
    folder = given or (Path(named) if named else None)
    if folder is None:
        return None
    inner = folder / "published" / "gpu"
    folder = inner if inner.is_dir() else folder
    return folder if (folder / f"{FILES[0]}.csv").is_file() else None


def read_rows(folder: Path) -> tuple[list[Row], list[Skipped]]:
    """Read every file."""
    rows: list[Row] = []
    skipped: list[Skipped] = []
    for name in FILES:
        with (folder / f"{name}.csv").open(newline="", encoding="utf-8") as file:
            for entry in csv.DictReader(file):
                found = _row(entry)
                if isinstance(found, Row):
                    rows.append(found)
                else:
                    skipped.append(Skipped(entry["id"], found))
    return rows, skipped


def _row(entry: Mapping[str, str]) -> Row | str:
    """Return a row, or why it is none."""
    way, precision = entry["parallelism"], entry["precision"]
    if "fp8" in precision:
        return "FP8 is no precision of torch.autocast"
    if way.startswith("TP"):
        return "tensor parallelism is not there"
    if entry["unit"].startswith("GiB"):
        return "memory, not time"
    gpus = int(entry["n_gpus"])
    micro, accum = _sizes(entry)
    if not micro:
        return "its batch size is not said"
    kind = next((k for k in ("FSDP", "DP", "PP") if k in way), "")
    return Row(
        id=entry["id"],
        source=_SOURCES[entry["source"]],
        card=_CARDS[entry["gpu"]],
        key=_key(entry),
        gpus=gpus,
        parallelism=kind,
        micro_batch=micro,
        accum=accum,
        step_s=_step_s(entry, micro * accum, gpus, kind),
        recompute=entry["recompute"].startswith("True"),
        with_optimizer="no optimizer" not in entry["task"] and kind != "PP" and gpus != 4,
        fused="fusion" in way,
        last_is_kept="PP" in way and entry["recompute"].startswith("True") and accum > 1,
        products_tf32=precision == "tf32",
    )


_GPIPE_BATCH = {(1, 2): 96, (4, 2): 256, (32, 2): 1280, (1, 4): 160, (4, 4): 360, (32, 4): 1152}
_GPIPE_BATCH |= {(1, 8): 196, (4, 8): 480, (32, 8): 1280}
"""AmoebaNet's batches by (chunks, GPUs): torchgpipe, benchmarks/amoebanetd-speed/main.py."""


def _sizes(entry: Mapping[str, str]) -> tuple[int, int]:
    """Return rows of a micro-batch, and how many of them."""
    accum = int(entry["accum"] or 1)
    if entry["model"].startswith("amoebanet"):
        return max(1, _GPIPE_BATCH[accum, int(entry["n_gpus"])] // accum), accum
    return round(float(entry["micro_batch"] or 0)), accum


def _step_s(entry: Mapping[str, str], rows: int, gpus: int, kind: str) -> float:
    value, unit = float(entry["value"]), entry["unit"]
    if unit == "ms/step":
        return value / 1e3
    if unit == "tokens/s/gpu":
        return rows * int(entry["seq_or_img"]) / value
    copies = gpus if kind == "DP" else 1
    return rows * copies / value  # images a second; timm's "s" is the same


def _key(entry: Mapping[str, str]) -> Key:
    model, precision, notes = entry["model"], entry["precision"], entry["notes"]
    name = {
        "resnet50v1.5": "resnet50",
        "resnet101 224": "resnet101",
        "unet(5,64) 192": "unet(5,64)",
    }.get(model, model)
    task = "infer" if entry["task"] == "infer" else "train"
    half = {"bf16": "bfloat16", "fp16": "float16"}
    dtype = next((t for word, t in half.items() if word in precision), "float32")
    last = "nhwc" in precision or (dtype == "float16" and "channels_last" in notes)
    last |= dtype == "float16" and name == "resnet50" and entry["source"].startswith("NVIDIA")
    side = int(entry["seq_or_img"].partition("x")[0])
    return Key(name, side, task, dtype, "nhwc" if last else "nchw")


def wanted(rows: Sequence[Row]) -> frozenset[Key]:
    """Return the graphs that rows need."""
    return frozenset(row.key for row in rows)

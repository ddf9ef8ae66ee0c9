"""Published rows of clusters as a forecast is asked them: cluster, strategy, sizes, seconds.

Sailor's file says all of it. Newer rows of several GPUs name a strategy in prose, so `NEWER` says
what each means; a row that it does not know is left out, with a reason.
"""

from __future__ import annotations

import csv
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, TypeAlias

Runtime: TypeAlias = Literal["", "megatron-deepspeed"]


@dataclass(frozen=True)
class ClusterRow:
    """One measurement.

    Attributes:
        group: whose errors are averaged.
        cards: the preset of each replica's stages: `cards[stage][replica]`.
        layers: first and last layer of each stage; empty: one stage, or stages of equal time.
        tensor: devices of a group.
        rows: of a micro-batch.
        batch: rows of a step.
        hosts: devices of one.
        peak_bytes: of the fullest GPU; 0: not published.
        zero: of ZeRO, whose gradients and weights go by collectives.
        fused: under torch.compile.
        runtime: whose memory it is.
    """

    group: str
    name: str
    model: str
    cards: tuple[tuple[str, ...], ...]
    layers: tuple[tuple[int, int], ...]
    tensor: int
    rows: int
    batch: int
    host: int
    step_s: float
    peak_bytes: int = 0
    zero: Literal[0, 1, 2, 3] = 0
    fused: bool = False
    recompute: str = ""
    runtime: Runtime = ""

    @property
    def replicas(self) -> int:
        """Copies of the model."""
        return len(self.cards[0])


def folder_of(folder: Path) -> Path:
    """Return where the rows of clusters lie beside those of single GPUs."""
    for inner in (folder, folder / "published" / "clusters", folder.parent / "clusters"):
        if (inner / "sailor_measured.csv").is_file():
            return inner
    return folder


def read_rows(folder: Path) -> tuple[list[ClusterRow], list[str]]:
    """Read both files; also return what is left out, with its reason."""
    rows, skipped = [*_sailor(folder / "sailor_measured.csv")], []
    with (folder / "several_gpus.csv").open(newline="", encoding="utf-8") as file:
        for entry in csv.DictReader(file):
            key = entry["source"], entry["model"], entry["cluster"].partition(" (")[0]
            found = NEWER.get((*key, entry["strategy"].partition(";")[0]))
            if found is None:
                skipped.append(f"{' '.join(key)} {entry['strategy']}: its sizes are not known here")
            else:
                rows.append(_newer(entry, found))
    return rows, skipped


# --------------------------------------------------------------------------- Sailor

_CARDS = {
    "GH-96": "gh200-96",
    "A100-40": "a100-40",
    "V100-16": "v100-16",
    "RTX-3090": "rtx-3090",
    "Titan-RTX": "titan-rtx",
    "RTX-2080": "rtx-2080-ti",
}


def _sailor(path: Path) -> Iterator[ClusterRow]:
    with path.open(newline="", encoding="utf-8") as file:
        for entry in csv.DictReader(file):
            yield _of_sailor(entry)


def _of_sailor(entry: Mapping[str, str]) -> ClusterRow:
    stages = entry["gpus_per_stage"].split("|")
    counts = [int(count) for count in entry["dp"].split("|")]
    if len(counts) < len(stages):
        counts *= len(stages)
    tensor = int(stages[0].rpartition("x")[2])
    layers = [tuple(map(int, each.split("-"))) for each in entry["layers"].split("|")]
    return ClusterRow(
        group=f"sailor {entry['site']} {entry['model']}",
        name=entry["file"].removeprefix("plan_config_").removesuffix(".json"),
        model=entry["model"],
        cards=tuple(_replicas(stage, n) for stage, n in zip(stages, counts, strict=True)),
        layers=tuple((first, last) for first, last in layers) if len(stages) > 1 else (),
        tensor=tensor,
        rows=int(entry["mbs"]),
        batch=int(entry["gbs"]),
        host=sum(counts) * tensor // int(entry["N"]),
        step_s=float(entry["real_s"]),
        peak_bytes=int(entry["max_mem_bytes"]),
        runtime="megatron-deepspeed",
    )


_FIRST = ("RTX-3090", "Titan-RTX", "GH-96", "A100-40", "V100-16", "RTX-2080")


def _replicas(stage: str, count: int) -> tuple[str, ...]:
    """Return the card of each replica of a stage; of two kinds, as many of each, the faster first.

    Its validation lists the kinds alone: six hosts are two of each, and four have two 2080s.
    """
    kinds = [each.rpartition("x")[0] for each in stage.split("+")]
    kinds.sort(key=_FIRST.index)
    more, fewer = divmod(count, len(kinds))
    found = [kind for kind in kinds for _ in range(more)]
    extra = kinds[:fewer] if len(kinds) == 2 else kinds[len(kinds) - fewer :]
    found = sorted((*found, *extra), key=_FIRST.index)
    return tuple(_CARDS[kind] for kind in found)


# --------------------------------------------------------------------------- newer rows


@dataclass(frozen=True)
class _Newer:
    """What a row's prose stands for: `steps` micro-batches of `rows` on each of `replicas`."""

    card: str
    replicas: int
    tensor: int = 1
    stages: int = 1
    rows: int = 2
    steps: int = 1
    zero: Literal[0, 1, 2, 3] = 0
    recompute: str = ""


_TITAN = ("torchtitan benchmarks", "Llama-3.1-8B")
_NANO = ("nanotron", "Llama-1B", "8 H100")
NEWER: Mapping[tuple[str, ...], _Newer] = {
    (*_TITAN, "8 H100", "FSDP 8"): _Newer("h100", 8, zero=3),
    (*_TITAN, "128 H100", "FSDP 128"): _Newer("h100", 128, zero=3),
    (*_TITAN, "64 H100", "FSDP 8 x TP 8"): _Newer("h100", 8, 8, rows=16, zero=3),
    (*_NANO, "DP4 TP2"): _Newer("h100", 4, 2, rows=4, steps=64),
    (*_NANO, "DP2 TP4"): _Newer("h100", 2, 4, rows=4, steps=128),
    (*_NANO, "TP8"): _Newer("h100", 1, 8, rows=4, steps=256),
    (*_NANO, "TP4 PP2"): _Newer("h100", 1, 4, 2, rows=4, steps=256),
    ("TinyLlama", "TinyLlama-1.1B", "16 A100-40", "FSDP 16"): _Newer(
        "a100-40", 16, rows=8, steps=8, zero=3
    ),
    ("IBM fms-fsdp", "Llama-2-7B", "128 A100-80", "FSDP"): _Newer("a100-80", 128, zero=3),
}


def _newer(entry: Mapping[str, str], own: _Newer) -> ClusterRow:
    return ClusterRow(
        group="newer",
        name=f"{entry['source']} {entry['cluster']} {entry['strategy']}"[:44],
        model=entry["model"],
        cards=((own.card,) * own.replicas,) * own.stages,
        layers=(),
        tensor=own.tensor,
        rows=own.rows,
        batch=own.rows * own.steps * own.replicas,
        host=8,
        step_s=float(entry["measured_s"]),
        zero=own.zero,
        fused="compile" in entry["note"] or "fused" in entry["note"],
        recompute=own.recompute,
    )

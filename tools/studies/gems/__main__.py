"""GEMS beside 1F1B and zb-v: the largest model that fits, and rows a second, at the same memory.

    python -m tools.studies.gems --write results.md [--steps 12]

The founders' hypothesis: keeping the optimizer's state, or activations, away makes GEMS-MASTER
better. Two models of as many alike blocks as fit (`blocks`): one of images, whose activations are
large and weights small, and one of text, where it is the other way round. Four equal devices;
plans are forecast, nothing of this size is run. Small ones are: two processes on this machine.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path

import click
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from bigbrain_fx.bundles import RunOptions, run, split
from bigbrain_fx.core import Cluster, Device, DeviceStore, Graph, Link
from bigbrain_fx.errors import NoPlanError
from bigbrain_fx.frontend import capture
from bigbrain_fx.plan import Options, Plan, Source, make_plan, read_plan
from bigbrain_fx.planning.registry import load
from tools.conformance.live_bytes import tracked_bytes

ROOT = Path(__file__).resolve().parents[3]
DEVICES, ROWS, MEMORY_MIB = 4, 8, 128
STORE_BYTES_PER_S = 2e9
DEPTHS = (*range(4, 33, 4), 40, 48, 56, 64)
WIDTH, TOKENS, CHANNELS, SIDE = 256, 128, 32, 128


@dataclass(frozen=True)
class Contender:
    """A schedule with what it keeps where; `options` are those of `split`."""

    name: str
    options: Mapping[str, object]


def contenders(devices: int) -> tuple[Contender, ...]:
    """Return schedules with each thing that they may keep away, plain 1F1B first."""
    away = ("", "state", "activations", "activations,state")
    alone = {"schedule": "1f1b", "in_flight": (1,) * devices}
    tried: tuple[tuple[str, Mapping[str, object], tuple[str, ...]], ...] = (
        ("1f1b", {"schedule": "1f1b"}, away),
        ("1f1b, one in flight", alone, (away[0], away[-1])),
        ("zb-v", {"schedule": "zb-v"}, away[:2]),  # activations of split backwards stay
        ("gems", {"schedule": "gems"}, away),
    )
    found = []
    for name, base, kept in tried:
        for words in kept:
            more = f" --offload {words}" if words else ""
            offload = tuple(words.split(",")) if words else ()
            found.append(Contender(f"{name}{more}", {**base, "offload": offload}))
        found.append(Contender(f"{name} --recompute all", {**base, "recompute": "all"}))
    return tuple(found)


CONTENDERS = contenders(DEVICES)

# --------------------------------------------------------------------------- models


class Convolutions(nn.Module):
    """Two convolutions beside a shortcut: large activations, few weights."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Conv2d(CHANNELS, CHANNELS, 3, padding=1)
        self.second = nn.Conv2d(CHANNELS, CHANNELS, 3, padding=1)

    def forward(self, x: Tensor) -> Tensor:
        """Apply it."""
        added: Tensor = self.second(F.relu(self.first(x)))
        return x + added


class Attention(nn.Module):
    """A Transformer's block: small activations, many weights."""

    def __init__(self) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        """Apply it."""
        split = self.qkv(self.norm1(x)).view(*x.shape[:2], 3, 8, WIDTH // 8)
        q, k, v = split.permute(2, 0, 3, 1, 4).unbind()
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(mixed.transpose(1, 2).reshape(x.shape))
        fed: Tensor = self.down(F.gelu(self.up(self.norm2(x))))
        return x + fed


class Blocks(nn.Module):
    """So many blocks, one after the other, and a loss."""

    def __init__(self, make: Callable[[], nn.Module], count: int) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(make() for _ in range(count))

    def forward(self, x: Tensor) -> Tensor:
        """Run them."""
        for block in self.blocks:
            x = block(x)
        return x.square().mean()


SHAPES: Mapping[str, tuple[Callable[[], nn.Module], tuple[int, ...]]] = {
    "images": (Convolutions, (CHANNELS, SIDE, SIDE)),
    "text": (Attention, (TOKENS, WIDTH)),
}


@cache
def graph_of(model: str, blocks: int) -> Graph:
    """Capture a model of so many blocks."""
    make, shape = SHAPES[model]
    module = Blocks(make, blocks)
    found = capture(module, {"x": torch.randn(ROWS, *shape)}, None, name=model)
    return found.graph


# --------------------------------------------------------------------------- plans


def cluster(memory_mib: int) -> Cluster:
    """Return equal devices, each with a store."""
    names = [f"d{i}" for i in range(DEVICES)]
    made = (Device(n, "h", "cpu", memory_mib << 20, 60e9, 12e9, 1e-6) for n in names)
    stores = tuple(DeviceStore(f"s{n}", n, 1 << 40, STORE_BYTES_PER_S) for n in names)
    return Cluster(tuple(made), Link(20e-6, 1.25e9), stores=stores)


def planned(model: str, blocks: int, contender: Contender, memory_mib: int) -> Plan | None:
    """Plan a step of a row a micro-batch over all devices; None where it does not fit."""
    source, where = Source("", optimizer_leftover=1.0), cluster(memory_mib)
    given = {"partitioner_options": (("use_all", True),), **contender.options}
    options = Options(micro_batches=ROWS, **given)  # type: ignore[arg-type]  # fields of Options
    try:
        return make_plan(graph_of(model, blocks), where, source, options)
    except NoPlanError:
        return None


@dataclass(frozen=True)
class Row:
    """One contender on one model.

    Attributes:
        blocks: of the largest model that fits; 0: none of those tried does.
        rows_per_s: there.
        shared_rows_per_s, peak_bytes: of the model of as many blocks as plain 1F1B holds; None
            where that does not fit.
    """

    model: str
    contender: str
    blocks: int
    rows_per_s: float
    shared_rows_per_s: float | None
    peak_bytes: int | None


def rows_of(model: str, memory_mib: int, depths: Sequence[int] = DEPTHS) -> Iterator[Row]:
    """Forecast every contender on one model."""
    shared = largest(model, CONTENDERS[0], memory_mib, depths)[0]
    for contender in CONTENDERS:
        blocks, plan = largest(model, contender, memory_mib, depths)
        there = planned(model, shared, contender, memory_mib) if shared else None
        peak = max(e.peak_bytes for e in there.forecast.devices) if there else None
        yield Row(
            model,
            contender.name,
            blocks,
            ROWS / plan.forecast.step_s if plan else 0.0,
            ROWS / there.forecast.step_s if there else None,
            peak,
        )


def largest(
    model: str, contender: Contender, memory_mib: int, depths: Sequence[int]
) -> tuple[int, Plan | None]:
    """Return the most blocks that fit, of the depths, and their plan."""
    best: tuple[int, Plan | None] = 0, None
    low, high = 0, len(depths)
    while low < high:
        middle = (low + high) // 2
        plan = planned(model, depths[middle], contender, memory_mib)
        if plan is None:
            high = middle
        else:
            best, low = (depths[middle], plan), middle + 1
    return best


# --------------------------------------------------------------------------- small ones, run

SMALL = ("1f1b", "1f1b, one in flight", "gems")


@dataclass(frozen=True)
class Timed:
    """One contender's bundle of models/gpt.py on two processes: forecast and run."""

    contender: str
    forecast_s: float
    step_s: float
    forecast_bytes: int
    tracked_bytes: int


def timed(steps: int, rounds: int = 3) -> list[Timed]:
    """Run small bundles in turns; keep the quickest step of each, and count its live tensors."""
    found = [each for each in contenders(2) if each.name in SMALL]
    where = replace(cluster(4096), devices=cluster(4096).devices[:2])
    with tempfile.TemporaryDirectory(prefix="gems-") as scratch:
        made = [_bundle(each, where, Path(scratch, str(i))) for i, each in enumerate(found)]
        best = dict.fromkeys(range(len(found)), float("inf"))
        for number, bundle in list(enumerate(made)) * rounds:
            best[number] = min(best[number], _quickest_s(bundle, steps))
        return [
            Timed(
                each.name,
                read_plan(bundle).forecast.step_s,
                best[number],
                max(e.peak_bytes for e in read_plan(bundle).forecast.devices),
                max(tracked_bytes(bundle, Path(scratch, f"tracked{number}")).values()),
            )
            for number, (each, bundle) in enumerate(zip(found, made, strict=True))
        ]


def _bundle(contender: Contender, where: Cluster, folder: Path) -> Path:
    options = Options(**{"partitioner": "naive", "micro_batches": ROWS, **contender.options})  # type: ignore[arg-type]  # fields of Options
    return split(ROOT / "models" / "gpt.py", where, folder, options).bundle


def _quickest_s(bundle: Path, steps: int) -> float:
    return min(step.step_s for step in run(bundle, RunOptions(steps=steps)).steps[1:])


# --------------------------------------------------------------------------- the page

HEAD = """# GEMS beside 1F1B and zb-v

`python -m tools.studies.gems --write results.md` wrote this page.

{question}
"""
QUESTION = """\
GEMS ([schedules.md](../../../docs/reference/schedules.md#gems)) holds one micro-batch's activations
on a device, and the weights of two stages. The question was whether keeping things away, the
optimizer's state or activations, makes GEMS-MASTER better. So: four equal devices of {memory} MiB,
{rows} micro-batches of one row, AdamW, a store of {store:g} GB/s for each device, and as many alike
blocks as fit, of two kinds: two convolutions of {channels} channels on {side} x {side} pixels
(activations large, weights few), and a Transformer's block {width} wide on {tokens} tokens (the
other way round). All by forecast (`analytical`, 60 GFLOP/s and 12 GB/s a device, 10 Gbit/s between
them), cut by `chain-dp` over all four. "One in flight" is 1F1B with `in_flight` 1: one micro-batch
after the other. Depths tried are {depths}; "+": the deepest of them fits, "none": not even the
first does. Each device of zb-v has two pieces, and messages of both under way: where these are
large (4 MiB each, of images) they alone take 26 to 52 MiB of a device.
"""


def page(rows: Sequence[Row], ran: Sequence[Timed], memory_mib: int) -> str:
    """Return the page."""
    question = QUESTION.format(
        memory=memory_mib,
        rows=ROWS,
        store=STORE_BYTES_PER_S / 1e9,
        channels=CHANNELS,
        side=SIDE,
        width=WIDTH,
        tokens=TOKENS,
        depths=", ".join(map(str, DEPTHS)),
    )
    models = dict.fromkeys(row.model for row in rows)
    parts = [_section(model, [row for row in rows if row.model == model]) for model in models]
    return "\n".join([HEAD.format(question=question), *parts, *([_ran(ran)] if ran else [])])


def _section(model: str, rows: Sequence[Row]) -> str:
    shared = rows[0].blocks
    lines = [
        f"## {model}",
        "",
        f"| schedule | largest, blocks | rows/s there | rows/s at {shared} blocks | peak, MiB |",
        "|---|---:|---:|---:|---:|",
        *(_line(row) for row in rows),
        "",
        _said(rows),
    ]
    return "\n".join(lines) + "\n"


def _line(row: Row) -> str:
    most = f"{row.blocks}{'+' * (row.blocks == DEPTHS[-1])}" if row.blocks else "none"
    there = f"{row.rows_per_s:.2f}" if row.blocks else "-"
    both = "- | -"
    if row.shared_rows_per_s is not None and row.peak_bytes is not None:
        both = f"{row.shared_rows_per_s:.2f} | {row.peak_bytes / 2**20:.0f}"
    return f"| {row.contender} | {most} | {there} | {both} |"


def _said(rows: Sequence[Row]) -> str:
    """Say what came out: of size, and of pace at the depth that all but a few hold."""
    ours = [row for row in rows if row.contender.startswith("gems")]
    others = [row for row in rows if row not in ours]
    best, rest = _best(ours), _best(others)
    plain = next(row for row in ours if row.contender == "gems")
    more = best.blocks / plain.blocks if plain.blocks else float("inf")
    return (
        f"With what it may keep away GEMS holds {more:.1f} times as many blocks as without "
        f"(`{best.contender}`: {best.blocks}, {best.rows_per_s:.2f} rows/s). The others' "
        f"largest is `{rest.contender}`: {rest.blocks}, {rest.rows_per_s:.2f} rows/s."
    )


def _best(rows: Sequence[Row]) -> Row:
    return max(rows, key=lambda row: (row.blocks, row.rows_per_s))


def _ran(ran: Sequence[Timed]) -> str:
    base = ran[0]
    lines = [
        "## Run",
        "",
        "models/gpt.py on two processes of this machine, eight micro-batches: the quickest step of",
        "three turns, the most bytes of live tensors on a device, and the forecast of both. Where",
        "others compute on the machine (of two cores), too, steps say little; bytes do not vary.",
        "",
        "| schedule | step of 1f1b's | forecast | live tensors, MiB | forecast |",
        "|---|---:|---:|---:|---:|",
        *(
            f"| {row.contender} | {row.step_s / base.step_s:.2f} | "
            f"{row.forecast_s / base.forecast_s:.2f} | {row.tracked_bytes / 2**20:.2f} | "
            f"{row.forecast_bytes / 2**20:.2f} |"
            for row in ran
        ),
    ]
    return "\n".join(lines) + "\n"


@click.command()
@click.option("--write", "out", type=click.Path(dir_okay=False, path_type=Path), required=True)
@click.option("--memory", "memory_mib", default=MEMORY_MIB, show_default=True, help="MiB a device.")
@click.option("--steps", default=12, show_default=True, help="Of each small run; 0: run none.")
def main(out: Path, memory_mib: int, steps: int) -> None:
    """Forecast all contenders, run small ones, and write the page."""
    torch.set_num_threads(1)
    load("partitioner")
    load("estimator")
    found = []
    for row in (row for model in SHAPES for row in rows_of(model, memory_mib)):
        click.echo(f"{row.model}: {_line(row)}")
        found.append(row)
    out.write_text(page(found, timed(steps) if steps else [], memory_mib))


if __name__ == "__main__":
    main()

"""Several jobs on one cluster, as forecast: pairs of models on several clusters, as `pack` divides.

    python -m tools.studies.several_jobs --write results.md

Each row is `bigbrain-fx pack` with models that ship. Nothing is timed.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import click

from bigbrain_fx.bundles import captured_model
from bigbrain_fx.core import Cluster, Device, Link
from bigbrain_fx.errors import NoPlanError
from bigbrain_fx.plan import Options, Packing, PackJob, pack
from bigbrain_fx.plan.memory_check import needed_bytes

MODELS = Path(__file__).resolve().parents[3] / "models"
OPTIONS = Options("auto", effort="fast")
MIB = 2**20
LAN, SLOW = Link(1e-4, 1.25e8), Link(1e-3, 1.25e7)  # 1 Gbit/s, 100 Mbit/s


def cluster(speeds: Sequence[float], link: Link, memory_mib: int = 4096) -> Cluster:
    """Return CPU devices of these speeds, each on a host of its own."""
    return Cluster(
        tuple(
            Device(f"d{n}", f"host{n}", "cpu", memory_mib * MIB, 2e10 * s, 1e10 * s, 5e-6)
            for n, s in enumerate(speeds)
        ),
        link,
    )


CLUSTERS: Mapping[str, Cluster] = {
    "2:1, 1 Gbit/s": cluster((2, 1), LAN),
    "2:1:1, 1 Gbit/s": cluster((2, 1, 1), LAN),
    "2:1:1, 100 Mbit/s": cluster((2, 1, 1), SLOW),
}
CASES: tuple[tuple[tuple[str, int], ...], ...] = (
    (("gpt", 100), ("gpt", 100)),
    (("gpt", 100), ("resnet", 100)),
    (("gpt", 100), ("digits", 3000)),
)


@dataclass(frozen=True)
class PackRow:
    """One case on one cluster."""

    jobs: tuple[tuple[str, int], ...]
    where: str
    found: Packing

    def __str__(self) -> str:
        each = "; ".join(
            f"{job.name} x {job.steps}: {' '.join(job.plan.stages.devices)}"
            for job in self.found.jobs
        )
        gain = self.found.in_turn_last_s / self.found.last_s
        cells = (
            self.where,
            each,
            *(f"{job.ends_s:.1f}" for job in self.found.jobs),
            f"{self.found.in_turn_last_s:.1f}",
            f"{gain:.2f}",
            f"{self.found.mean_s:.1f} / {self.found.in_turn_mean_s:.1f}",
            f"{self.found.last_s / self.found.bound_s:.2f}",
            str(self.found.looked_at),
        )
        return f"| {' | '.join(cells)} |"


def jobs_of(case: Sequence[tuple[str, int]], known: dict[str, PackJob]) -> list[PackJob]:
    """Return a case's jobs; each model is captured once."""
    for name, _ in case:
        if name not in known:
            chosen = replace(OPTIONS, mode="train")
            path = MODELS / f"{name}.py"
            with captured_model(path, chosen, None, None, 600.0, meta=True) as found:
                known[name] = PackJob(name, found.graph, found.source, chosen, 1)
    return [replace(known[name], steps=steps) for name, steps in case]


def rows(known: dict[str, PackJob]) -> list[PackRow]:
    """Pack every case on every cluster; a line to see each."""
    found = []
    for case in CASES:
        jobs = jobs_of(case, known)
        for where, devices in CLUSTERS.items():
            row = PackRow(case, where, pack(jobs, devices))
            click.echo(str(row))
            found.append(row)
    return found


def refusal(known: dict[str, PackJob]) -> tuple[int, str]:
    """Return a memory in MiB in which two jobs fit one by one and not together, and what is said.

    From what one device needs for one of them, less and less is given.
    """
    jobs = jobs_of((("gpt", 100), ("gpt", 100)), known)
    whole = pack(jobs, cluster((1, 1), LAN)).jobs[0].plan
    (entry,) = whole.forecast.devices
    needed = needed_bytes(entry, whole.cluster.device[entry.device])
    for share in (n / 20 for n in range(18, 0, -1)):
        memory_mib = (needed - int((1 - share) * entry.peak_bytes)) // MIB
        try:
            pack(jobs, cluster((1, 1), LAN, memory_mib))
        except NoPlanError as error:
            if error.code != "BX1257":  # they do not fit together
                raise
            return memory_mib, str(error)
    raise AssertionError("these two were meant not to fit together")


def page(found: Sequence[PackRow], memory_mib: int, refused: str) -> str:
    """Return the page."""
    sooner = [row for row in found if row.found.in_turn_last_s > row.found.last_s]
    mean = [row for row in found if row.found.in_turn_mean_s > row.found.mean_s]
    return "\n".join(
        [
            "# Several jobs on one cluster\n",
            "Written by `python -m tools.studies.several_jobs --write "
            "tools/studies/several_jobs`; do not edit. Forecasts (`auto`, effort fast,",
            "estimator analytical): nothing was run.\n",
            "`bigbrain-fx pack a/ b/ --devices cluster.json` gives each job devices of its own, so "
            "that the last one ends as early",
            "as can be, and says what running them one after the other gives, each with every "
            "device. A job keeps its devices to",
            "its end. Devices of one host are as slow as they are while all jobs compute there.\n",
            "| cluster | who gets what | first job ends, s | second | one after the other, s | "
            "times sooner | mean end: together / in turn | last end over the bound | divisions |",
            "|---|---|---:|---:|---:|---:|---:|---:|---:|",
            *map(str, found),
            "",
            f"Together the last job ends sooner in {len(sooner)} of {len(found)} cases, and jobs "
            f"end sooner on average in {len(mean)}. What",
            "a job loses with fewer devices, it gains where it used them badly: waits for "
            "messages, and devices that are too slow to help.",
            "The bound is all jobs' work on all devices at once, without waiting or messages; no "
            "division and no order ends before it.",
            "`divisions` are all there are, but for devices that are alike; of larger clusters "
            "some are tried (deal, move, swap),",
            "and the command says so.\n",
            f"Two jobs that fit one by one, on two devices of {memory_mib} MiB:\n",
            "```",
            refused,
            "```",
            "",
        ]
    )


@click.command()
@click.option("--write", type=click.Path(path_type=Path), help="The page.")
def main(write: Path | None) -> None:
    """Pack every case; print the page, or write it."""
    known: dict[str, PackJob] = {}
    refused = refusal(known)
    text = page(rows(known), *refused)
    if write is None:
        click.echo(text)
    else:
        write.write_text(text)


if __name__ == "__main__":
    main()

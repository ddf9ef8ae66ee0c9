"""Schedules beside 1F1B on four emulated devices, alike: measured, and as simulated.

    python -m tools.split_schedules [--rounds 5] [--steps 4] [--json]

Linux and root. Together the devices have half of this machine's cores: of two, a quarter of one
each. The GPT of `tools.bench_peer`, 8 micro-batches of one row, links of 1 Gbit/s. All plans are
made from measured ops and a surveyed cluster and run in turns. A figure is a schedule's step over
that of 1F1B in the same round; how far the simulator's ratio is off follows.
"""

from __future__ import annotations

import json
import os
import statistics
import tempfile
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import click
import torch

from bigbrain_fx.bundles import source_of
from bigbrain_fx.core import Cluster
from bigbrain_fx.frontend import CaptureSession, capture_file
from bigbrain_fx.measure.ops import ProfileOptions, profile
from bigbrain_fx.plan import Options, Plan, make_plan
from bigbrain_fx.planning.registry import load
from tools import peer_model
from tools.bench_peer import MICRO_BATCHES, MODEL
from tools.emulation import emulated
from tools.fidelity_models import Site
from tools.unlike import measured

SITE = Site("four alike", (1, 1, 1, 1), 1000.0)
SCHEDULES = ("1f1b", "zb-h1", "zb-v")


@dataclass(frozen=True)
class Row:
    """One schedule: its step over that of 1F1B, as simulated and in each round; seconds a step."""

    schedule: str
    forecast_s: float
    measured_s: float
    simulated: float
    ratios: tuple[float, ...]

    @property
    def off(self) -> float:
        """How far the simulated ratio is above the measured one, as a share of it."""
        return self.simulated / statistics.median(self.ratios) - 1

    def __str__(self) -> str:
        lower, middle, upper = statistics.quantiles(self.ratios, n=4)
        return (
            f"{self.schedule:8s} {self.measured_s:.3f} s ({self.forecast_s:.3f} s forecast), "
            f"of 1F1B {middle:.3f} ({lower:.3f} to {upper:.3f}), "
            f"simulated {self.simulated:.3f}: {self.off:+.1%}"
        )


def planned(session: CaptureSession, cluster: Cluster, schedule: str) -> Plan:
    """Plan the model from measured ops under a schedule."""
    options = Options("chain-dp", "measured", schedule, MICRO_BATCHES)
    return make_plan(session.graph, cluster, source_of(session.facts), options)


def rows_of(plans: Sequence[Plan], taken: Sequence[Sequence[float]]) -> list[Row]:
    """Hold each schedule to the first one: steps in the order of rounds, plan by plan."""
    first = plans[0].forecast.step_s
    return [
        Row(
            name,
            plan.forecast.step_s,
            statistics.median(steps),
            plan.forecast.step_s / first,
            tuple(own / base for own, base in zip(steps, taken[0], strict=True)),
        )
        for name, plan, steps in zip(SCHEDULES, plans, taken, strict=True)
    ]


@click.command()
@click.option("--rounds", default=5, show_default=True, help="Runs of each plan, in turns.")
@click.option("--steps", default=4, show_default=True, help="Of each run, besides its first.")
@click.option("--json", "as_json", is_flag=True)
def main(rounds: int, steps: int, as_json: bool) -> None:
    """Measure split schedules beside 1F1B on four devices."""
    torch.set_num_threads(1)
    load("partitioner")
    load("estimator")
    with tempfile.TemporaryDirectory(prefix="split-schedules-") as folder:
        store = Path(folder, "profiles.sqlite")
        os.environ["BIGBRAIN_PROFILES"] = str(store)
        size = peer_model.BATCH // MICRO_BATCHES
        profile(MODEL, store, ProfileOptions(rows=(size,), device="cpu"))
        with capture_file(MODEL) as session, emulated(SITE.cluster) as net:
            cluster = net.survey().cluster
            plans = [planned(session, cluster, name) for name in SCHEDULES]
            rows = rows_of(plans, measured(net, session, plans, rounds, steps))
    for row in rows:
        click.echo(json.dumps(asdict(row)) if as_json else str(row))


if __name__ == "__main__":
    main()

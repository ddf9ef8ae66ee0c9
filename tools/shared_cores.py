"""Devices that share a core: forecast against measured step time, with and without knowing it.

    python -m tools.shared_cores [--steps 12] [--json]

Two devices of one host whose processes may all use a single core of this machine: the GPT and the
splits of `tools/forecast.py`. Ops and rates are measured alone, on that core. Three forecasts:

    shared    cluster.json says so ("cores": 1), and the simulator lets them slow each other
    crowd     as if both always computed: what planners are told
    alone     as if each had a core of its own
"""

from __future__ import annotations

import json
import os
import statistics
import tempfile
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import click

from bigbrain_fx.core import Cluster, Host
from bigbrain_fx.frontend import CaptureSession, capture_file
from bigbrain_fx.measure.host import probe
from bigbrain_fx.measure.ops import ProfileOptions, profile
from bigbrain_fx.planning.contention import crowded
from tools.forecast import MICRO_BATCHES, MODEL, ROWS, SPLITS, median_step_s, split_after


@dataclass(frozen=True)
class Row:
    """One split; forecasts by what was known of the core."""

    blocks_first: int
    schedule: str
    measured_s: float
    forecast_s: Mapping[str, float]

    @property
    def error(self) -> Mapping[str, float]:
        """Forecast over measured, less one."""
        return {name: said_s / self.measured_s - 1 for name, said_s in self.forecast_s.items()}


@click.command()
@click.option("--steps", default=12, show_default=True)
@click.option("--json", "as_json", is_flag=True)
def main(steps: int, as_json: bool) -> None:
    """Print forecast and measured step time of four splits."""
    os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})  # of all processes to come, too
    with tempfile.TemporaryDirectory() as scratch:
        path = Path(scratch) / "model.py"
        path.write_text(MODEL)
        store = Path(scratch) / "profiles.sqlite"
        os.environ["BIGBRAIN_PROFILES"] = str(store)
        options = ProfileOptions(rows=(ROWS // MICRO_BATCHES,), device="cpu")
        profile(path, store, options)
        clusters = known(probe(devices=1, kind="cpu").cluster)
        with capture_file(path) as session:
            rows = [_measured(session, clusters, *split, steps, as_json) for split in SPLITS]
    for name in clusters:
        errors = [abs(row.error[name]) for row in rows]
        summary = {"known": name, "mape": statistics.fmean(errors), "worst": max(errors)}
        text = f"{name:<8} mean error {summary['mape']:.1%}, worst {summary['worst']:.1%}"
        click.echo(json.dumps(summary) if as_json else text)


def known(single: Cluster) -> Mapping[str, Cluster]:
    """Return two devices on the core of one, described in three ways."""
    (device,) = single.devices
    pair = tuple(replace(device, name=f"d{i}") for i in range(2))
    alone = replace(single, devices=pair)
    shared = replace(alone, hosts=(Host(device.host, cores=1),))
    return {"shared": shared, "crowd": crowded(shared), "alone": alone}


def _measured(
    session: CaptureSession,
    clusters: Mapping[str, Cluster],
    blocks_first: int,
    schedule: str,
    steps: int,
    as_json: bool,
) -> Row:
    plans = {
        name: split_after(session, cluster, blocks_first, schedule, "measured")
        for name, cluster in clusters.items()
    }
    row = Row(
        blocks_first,
        schedule,
        median_step_s(plans["shared"], session, steps),
        {name: plan.forecast.step_s for name, plan in plans.items()},
    )
    said = "   ".join(f"{n} {s:6.3f} s ({row.error[n]:+.1%})" for n, s in row.forecast_s.items())
    text = f"{blocks_first} blocks first, {schedule:<6}{row.measured_s:6.3f} s   {said}"
    click.echo(json.dumps({**asdict(row), "error": row.error}) if as_json else text)
    return row


if __name__ == "__main__":
    main()

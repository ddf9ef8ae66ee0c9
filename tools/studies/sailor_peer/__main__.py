"""Plan Sailor's experiments by `auto` and by Sailor, and value each plan by both simulators.

    python -m tools.studies.sailor_peer --sailor DIR/sailor --library DIR --profile FILE [--on ...]

See README.md for how the library is built. Without their folder nothing is compared.
"""

from __future__ import annotations

import time
from collections import Counter
from dataclasses import replace
from pathlib import Path

import click

from bigbrain_fx.core import Cluster, Graph, SumOrder
from bigbrain_fx.plan import Options, Plan, Source, make_plan
from tools.studies.published_clusters.models import graph_of
from tools.studies.sailor_peer.clusters import cluster, places
from tools.studies.sailor_peer.peer import OURS, Peer, Theirs
from tools.studies.sailor_peer.plans import in_their_words, planned

BATCH = 1024
ON = (
    "8xa100-40,16xa100-40,32xa100-40,80xa100-40,128xa100-40,"
    "8xa100-40+24xv100-16,32xa100-40+96xv100-16,geo:8xa100-40,geo:16xa100-40"
)


@click.command()
@click.option("--sailor", type=click.Path(path_type=Path), help="Their folder, called sailor.")
@click.option("--library", type=click.Path(path_type=Path), help="Where libplanner.so lies.")
@click.option(
    "--profile",
    type=click.Path(path_type=Path),
    help="Of tools.studies.sailor_peer.sailor_profile.",
)
@click.option("--on", default=ON, show_default=True, help="Experiments, with commas between.")
@click.option("--host", default=1, show_default=True, help="Cards of a host of ours: 1 or 4.")
def main(
    sailor: Path | None, library: Path | None, profile: Path | None, on: str, host: int
) -> None:
    """Print a line for each plan of each experiment."""
    if sailor is None or library is None or profile is None or not sailor.is_dir():
        click.echo("no planner here: give --sailor, --library and --profile; nothing is compared")
        return
    peer = Peer(sailor.resolve(), library.resolve())
    graph = replace(graph_of(OURS), batch=BATCH)
    for name in on.split(","):
        _say_theirs(name, graph, peer, profile)
        start_s = time.process_time()
        plan = _planned(graph, cluster(name, peer, host), profile)
        took_s = time.process_time() - start_s
        said = peer.step_s(in_their_words(plan), plan.rows)
        click.echo(f"{name}: auto   S {_s(said)} O {_ours(plan, took_s)}")


def _say_theirs(name: str, graph: Graph, peer: Peer, profile: Path) -> None:
    """Print Sailor's plan; ours of it is on hosts of four cards, whose groups have NVLink."""
    theirs = peer.plan({each.kind: each.count for each in places(name)})
    if theirs is None:
        click.echo(f"{name}: Sailor has no plan that fits")
        return
    own = planned(graph, cluster(name, peer), theirs.plan, profile)
    seen = "-" if own is None else f"{own.forecast.step_s:.2f}"
    click.echo(f"{name}: Sailor S {theirs.step_s:.2f} O {seen} {_shape(theirs)}")


def _planned(graph: Graph, devices: Cluster, profile: Path) -> Plan:
    """Plan by `auto`, sums by NCCL as theirs are; of unlike cards by our own messages."""
    cards = {device.preset for device in devices.devices}
    options = Options("auto", f"layers:{profile}", effort="fast", replicas=0)
    order: SumOrder | None = "backend" if len(cards) == 1 else None
    return make_plan(graph, devices, Source(""), replace(options, sum_order=order))


def _ours(plan: Plan, took_s: float) -> str:
    stages, counts = plan.stages, sorted({len(micros) for micros in plan.stages.micros})
    shape = f"{stages.replicas} x {len(stages.devices) // stages.replicas}, {plan.schedule}"
    return (
        f"{plan.forecast.step_s:.2f} {shape}, {plan.rows} rows x {counts}, "
        f"groups of {stages.members}, ZeRO {stages.zero_stage}, planned in {took_s:.1f} s"
    )


def _shape(theirs: Theirs) -> str:
    stages = theirs.plan["pipeline_list"][0]["tmp_per_stage"]
    each = [Counter((kind[0], degree) for (kind,), degree in stage) for stage in stages]
    said = [", ".join(f"{n} x {card} tp{t}" for (card, t), n in own.items()) for own in each]
    return f"{theirs.plan['mbs']} rows, {' | '.join(said)}, searched in {theirs.search_s:.2f} s"


def _s(seconds: float | None) -> str:
    return "-" if seconds is None else f"{seconds:.2f}"


if __name__ == "__main__":
    main()

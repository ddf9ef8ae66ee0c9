"""Cells run on an emulated cluster: planned, written as bundles, and measured."""

from __future__ import annotations

import os
import statistics
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import groupby
from pathlib import Path

from bigbrain_fx.bundles import source_of
from bigbrain_fx.bundles.launch import RunOptions
from bigbrain_fx.core import Cluster, Send
from bigbrain_fx.emit import write_bundle
from bigbrain_fx.frontend import capture_file
from bigbrain_fx.plan import Plan, make_plan
from bigbrain_fx.planning.registry import load
from tools.studies.dp_vs_mp.cells import StudyCell, StudyRow, model_text, site
from tools.studies.emulation import Network, emulated

ROOT = Path(__file__).resolve().parents[3]
STEPS = 4  # the first is not counted


def measured(lacking: Sequence[StudyCell]) -> Iterator[StudyRow]:
    """Run cells, network by network and model by model."""
    load("partitioner")
    load("estimator")
    for mbit_per_s, of_network in groupby(lacking, key=lambda cell: cell.mbit_per_s):
        cluster = site(mbit_per_s).cluster
        with emulated(cluster) as net:
            for _, alike in groupby(of_network, key=lambda cell: (cell.model, cell.rows)):
                yield from _of_model(net, cluster, [*alike])


def _of_model(net: Network, cluster: Cluster, alike: Sequence[StudyCell]) -> Iterator[StudyRow]:
    with tempfile.TemporaryDirectory(prefix="dp-vs-mp-") as folder:
        path = Path(folder, f"{alike[0].model}.py")
        path.write_text(model_text(alike[0].model, alike[0].rows, str(ROOT)))
        with capture_file(path) as session:
            for number, cell in enumerate(alike):
                used = replace(cluster, devices=cluster.devices[: cell.way.devices])
                source = source_of(session.facts)
                plan = make_plan(session.graph, used, source, cell.way.options)
                bundle = write_bundle(plan, session, Path(folder, f"bundle{number}"))
                yield _row(net, cell, plan, bundle, Path(folder, f"logs{number}"))


def _row(net: Network, cell: StudyCell, plan: Plan, bundle: Path, logs: Path) -> StudyRow:
    load_before = os.getloadavg()[0]
    done = net.run(bundle, RunOptions(steps=STEPS, threads=1, logs=logs))
    return StudyRow(
        *cell.key,
        statistics.median(line.step_s for line in done.steps[1:]),
        sent_bytes(plan),
        max(device.peak_bytes for device in plan.forecast.devices),
        max(done.max_rss_bytes.values()) - net.baseline_rss_bytes,
        load_before,
    )


def sent_bytes(plan: Plan) -> int:
    """Return the bytes of a step's messages between devices, as planned."""
    every = (instruction for program in plan.programs for instruction in program.instructions)
    return sum(each.edge.nbytes for each in every if isinstance(each, Send))

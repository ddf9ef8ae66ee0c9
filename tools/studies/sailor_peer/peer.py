"""Sailor's planner and simulator, of a folder of theirs and a library that was built of it.

They print to the process's own output, which is closed for as long. pandas is wanted by a reader of
traces that nobody calls here, so that an empty module stands for it.
"""

from __future__ import annotations

import importlib.util
import io
import json
import math
import os
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, redirect_stdout
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

MODEL = "OPT-350"
OURS = "OPT-350M"
Kind = tuple[str, str]
"""Their name of a card, and a zone."""


@dataclass(frozen=True)
class Pipeline:
    """One replica in their words.

    Attributes:
        layers: of each stage.
        places: the card and zone of each.
        degree: of the tensor group of each.
        micro_batches: that it computes a step.
    """

    layers: tuple[tuple[int, ...], ...]
    places: tuple[Kind, ...]
    degrees: tuple[int, ...]
    micro_batches: int


@dataclass(frozen=True)
class Theirs:
    """A plan of theirs: as their planner gave it, and what they say it takes."""

    plan: Mapping[str, Any]
    step_s: float
    search_s: float


class Peer:
    """What their files have: mutable, as their objects are."""

    def __init__(self, folder: Path, library: Path) -> None:
        sys.path[:0] = [str(folder), str(library)]
        self.planner_files = folder / "sailor" / "Planner"
        self.folder = folder
        self.config_file = self.planner_files / "simulations/configs/training_config_opt_350.json"
        self.profiles_file = self.planner_files / "simulations/profiles_tmp.json"
        self.library = importlib.import_module("libplanner")
        with _empty("pandas"):
            self.rules = importlib.import_module("sailor.Planner.simulations.runtime_simulator")
        self.curve = importlib.import_module("sailor.providers.gcp.model_networking")
        self.config, memory, profiles = (
            json.loads(path.read_text(encoding="utf-8"))
            for path in (self.config_file, self.planner_files / "llm_info.json", self.profiles_file)
        )
        root = folder.parent  # they look for their own files in sailor/sailor of it
        self.simulator = self.rules.Simulator(
            str(root), self.config, memory, False, profiles, zone="us-central1-a"
        )
        self.networks = self.simulator.inter_network_coeffs

    def rate(self, one: Kind, two: Kind, nbytes: int, count: int = 1) -> float:
        """Return the GB/s between so many cards of each of two hosts, for so many bytes."""
        found = self.networks.get_zone_coeffs(one[1], one[0], count, two[1], two[0], count)[0]
        return max(0.01, nbytes / 1e9 / float(self.curve.get_time_on_config(nbytes, found)))

    def plan(self, counts: Mapping[Kind, int]) -> Theirs | None:
        """Return the first of their planner's plans that fits by their simulator."""
        zones: dict[str, dict[str, int]] = {}
        for (card, zone), count in counts.items():
            zones.setdefault(zone, {})[card] = count
        with _silent():
            planner, names = self._planner()
            start_s = time.process_time()
            found = planner.get_sorted_plans(zones, 0.0, 0.0)
            search_s = time.process_time() - start_s
            plans = (_read(config, names) for config in found)
            fitting = next((plan for plan in plans if self.simulator.check_config_fits(plan)), None)
            if fitting is None:
                return None
            step_s = self.simulator.simulate_iteration_time(fitting)[0]
        return Theirs(fitting, float(step_s), search_s)

    def step_s(self, pipelines: Sequence[Pipeline], rows: int) -> float | None:
        """Return what they say that replicas take; None: it does not fit, or sizes have no profile.

        Replicas that are cut alike are one pipeline of theirs, with as many places for each stage.
        They give all pipelines as many micro-batches; here each has its own, by their functions.
        """
        if any(not self._is_profiled(each, rows) for each in pipelines):
            return None
        with _silent():
            plans = [self._said([own], rows) for own in pipelines]
            if not all(map(self.simulator.check_config_fits, plans)):
                return None
            alike = len({each.layers for each in pipelines}) == 1
            every = self._said(pipelines if alike else _longest(pipelines), rows)
            pipe_s = max(
                self._pipeline_s(own, plan, rows)
                for own, plan in zip(pipelines, plans, strict=True)
            )
            shape = self.rules.convert_homogeneous(every, self.config)
            return float(pipe_s + self.simulator.estimate_sync_time(shape))

    def _is_profiled(self, each: Pipeline, rows: int) -> bool:
        profiles = self.simulator.profiles
        return all(
            str(degree) in profiles.get(card, {}).get(str(rows), {})
            for (card, _), degree in zip(each.places, each.degrees, strict=True)
        )

    def _pipeline_s(self, own: Pipeline, plan: Mapping[str, Any], rows: int) -> float:
        """Return one replica's seconds without sums: their whole step of a batch of its own."""
        whole = self.simulator.global_batch_size
        self.simulator.global_batch_size = own.micro_batches * rows
        try:
            return float(self.simulator.simulate_iteration_time(plan)[0])
        finally:
            self.simulator.global_batch_size = whole

    def _said(self, pipelines: Sequence[Pipeline], rows: int) -> dict[str, Any]:
        first = pipelines[0]
        stages = [
            [([(p.places[i][0], p.degrees[i], p.places[i][1])], p.degrees[i]) for p in pipelines]
            for i in range(len(first.layers))
        ]
        pipeline = {
            "num_stages": len(stages),
            "layers_per_stage": [list(layers) for layers in first.layers],
            "tmp_per_stage": stages,
            "dp": [len(pipelines)] * len(stages),
        }
        return {"pipeline_list": [pipeline], "mbs": rows, "used_gpus": {}}

    def _planner(self) -> tuple[Any, list[str]]:
        quotas = self.planner_files / "sailor_planner/dummy_quotas_dict.json"
        files = (
            f"{self.planner_files}/sailor_planner/profiles/{MODEL}/",
            f"{self.folder}/sailor/providers/multizone_bandwidths_het.json",
            str(self.config_file),
            f"{self.planner_files}/llm_info.json",
            f"{self.folder}/sailor/providers/gcp/communication_cost.json",
        )
        made = self.library.SailorPlanner(*files, True, False, str(quotas), "throughput")
        return made, sorted(json.loads(quotas.read_text(encoding="utf-8")))


def _longest(pipelines: Sequence[Pipeline]) -> list[Pipeline]:
    """Return the replica of the largest stage, as often as there are replicas."""
    longest = max(pipelines, key=lambda each: max(map(len, each.layers)))
    return [longest] * len(pipelines)


def _read(
    config: Any,  # noqa: ANN401
    names: Sequence[str],
) -> dict[str, Any]:
    zones = config.get_zones()
    stages = [
        [([(names[card], degree, zones[zone])], degree) for card, degree, zone, *_ in stage]
        for stage in config.get_config_per_stage()
    ]
    pipeline = {
        "num_stages": len(stages),
        "layers_per_stage": [list(layers) for layers in config.get_stages()],
        "tmp_per_stage": stages,
        "dp": [len(stage) for stage in stages],
    }
    return {"pipeline_list": [pipeline], "mbs": config.get_mbs(), "used_gpus": {}}


def micro_batches(plan: Mapping[str, Any], batch: int) -> int:
    """Return how many each replica of a plan of theirs computes: they round up."""
    return math.ceil(batch / plan["mbs"] / plan["pipeline_list"][0]["dp"][0])


@contextmanager
def _empty(name: str) -> Iterator[None]:
    """Let an empty module stand for one that is not installed."""
    is_here = importlib.util.find_spec(name) is not None
    if not is_here:
        sys.modules[name] = ModuleType(name)
    yield
    if not is_here:
        del sys.modules[name]


@contextmanager
def _silent() -> Iterator[None]:
    """Close the process's output for as long."""
    sys.stdout.flush()
    kept, empty = os.dup(1), os.open(os.devnull, os.O_WRONLY)
    try:
        os.dup2(empty, 1)
        with redirect_stdout(io.StringIO()):
            yield
    finally:
        os.dup2(kept, 1)
        os.close(kept)
        os.close(empty)

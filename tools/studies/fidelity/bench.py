"""What `fidelity` works with: captured and profiled models, surveyed clusters, a reference.

It knows how to get ready for a forecast; cells and rows are others' to know.
"""

from __future__ import annotations

import json
import statistics
from collections.abc import Callable, Iterable, Mapping
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from pathlib import Path

from bigbrain_fx.cluster import read_cluster
from bigbrain_fx.core import Cluster, Costs, Device
from bigbrain_fx.costs.profiles import Machine, ProfileStore
from bigbrain_fx.frontend import CaptureSession, capture_file
from bigbrain_fx.measure.host import Survey
from bigbrain_fx.measure.ops import ProfileOptions, profile
from bigbrain_fx.plan import Plan, costs_of
from bigbrain_fx.planning.registry import estimator
from tools.studies.emulated_models import MICRO_BATCHES, MODELS
from tools.studies.emulated_profiles import profile_devices
from tools.studies.emulation import Network
from tools.studies.fidelity.reference import Reference

ROOT = Path(__file__).resolve().parents[3]
SOURCES = ("devices", "steady", "survey", "share", "analytical")
MACHINE = "machine"  # whose rates are the medians over the profiles
SURVEYS = 3  # at most
SURVEY = "survey"  # in the notes of a place; the others are of models
ROUNDS = 8  # of the slowest device

Say = Callable[[str], None]


@dataclass
class Bench:
    """The models: written, profiled, captured once, when their first cell comes.

    Attributes:
        work: a folder for model files and for what is known of the profiles.
        store: the profile database.
        stack: ends the capture sessions.
    """

    work: Path
    store: Path
    stack: ExitStack
    sessions: dict[str, CaptureSession] = field(default_factory=dict)

    def profile(self, models: Iterable[str], say: Say) -> None:
        """Measure the ops of some models on the bare machine; what is known already stays."""
        known = self.references()
        for name in models:
            rows = MODELS[name].rows // MICRO_BATCHES
            with Reference() as beside:
                found = profile(
                    self.file(name), self.store, ProfileOptions(rows=(rows,), device="cpu")
                )
            if any(entry.lacking for entry in found.measured):
                known[name] = beside.seconds
            of_models = [taken_s for key, taken_s in known.items() if key != MACHINE]
            known[MACHINE] = statistics.median(of_models or [beside.seconds])
            self._note.write_text(json.dumps(known))
            say(f"{name}: {'; '.join(map(str, found.measured))}")

    def references(self) -> dict[str, float]:
        """Return the seconds of the reference product when each model was profiled."""
        return json.loads(self._note.read_text()) if self._note.exists() else {}

    def session(self, model: str) -> CaptureSession:
        """Capture a model."""
        if model not in self.sessions:
            captured = capture_file(self.file(model))
            self.sessions[model] = self.stack.enter_context(captured)
        return self.sessions[model]

    @property
    def machine(self) -> Machine:
        """The bare machine, as it was profiled."""
        ours = [m for m in ProfileStore(self.store, read_only=True).machines() if m.threads == 1]
        return ours[0]

    @property
    def _note(self) -> Path:
        return self.store.with_name(self.store.name + ".references.json")

    def file(self, model: str) -> Path:
        """Write a model's file."""
        path = self.work / f"{model}.py"
        path.write_text(MODELS[model].text(str(ROOT)))
        return path


@dataclass(frozen=True)
class _Notes:
    """Seconds of the reference product by what was measured meanwhile, in a file of JSON."""

    path: Path

    def of(self, what: str) -> float | None:
        found: dict[str, float] = json.loads(self.path.read_text()) if self.path.exists() else {}
        return found.get(what)

    def keep(self, what: str, seconds: float) -> None:
        found = json.loads(self.path.read_text()) if self.path.exists() else {}
        self.path.write_text(json.dumps(found | {what: seconds}, indent=1))


@dataclass
class Place:
    """An emulated cluster as forecasts see it.

    What was measured once stays in `work`, so that cells that are measured later, or anew, have the
    forecasts of their pair: remove the folder to begin again.

    Attributes:
        found: what `doctor` says of it.
        machine: the bare one, as profiled.
        work: for that, for the devices' own profiles, and for the reference products beside them.
        sittings: by model, those profiles; see `sit`.
    """

    net: Network
    found: Cluster
    machine: Machine
    work: Path
    sittings: dict[str, Sitting] = field(default_factory=dict)

    @classmethod
    def of(cls, net: Network, machine: Machine, work: Path, quiet: float) -> Place:
        """Survey a network, again where others used the machine."""
        file, notes = work / "cluster.json", _Notes(work / "references.json")
        if file.exists() and notes.of(SURVEY) is not None:
            return cls(net, read_cluster(file), machine, work)
        seen: list[tuple[float, int, Survey, float]] = []
        while len(seen) < SURVEYS and (not seen or min(seen)[0] > quiet):
            with Reference() as beside:
                survey = net.survey()
            seen.append((beside.busy, len(seen), survey, beside.seconds))
        _, _, survey, taken_s = min(seen)
        work.mkdir(parents=True, exist_ok=True)
        survey.write(file, force=True)
        notes.keep(SURVEY, taken_s)
        return cls(net, survey.cluster, machine, work)

    @property
    def notes(self) -> _Notes:
        """What the reference product took beside each measurement here."""
        return _Notes(self.work / "references.json")

    @property
    def shares(self) -> Cluster:
        """The cluster as it was ordered, each device a share of the machine that was profiled."""
        return shared(self.net, self.found, dict.fromkeys(self.net.quotas, self.machine))

    def sit(self, bench: Bench, model: str) -> Sitting:
        """Profile a model on all devices at once, when its first cell comes."""
        if model not in self.sittings:
            taken_s = self.notes.of(model)
            stores = {name: self.work / model / f"{name}.sqlite" for name in self.net.quotas}
            if taken_s is None or not all(store.exists() for store in stores.values()):
                rows = MODELS[model].rows // MICRO_BATCHES
                with Reference() as beside:
                    stores = dict(
                        profile_devices(
                            self.net, bench.file(model), rows, self.work / model, ROUNDS
                        )
                    )
                taken_s = beside.seconds
                self.notes.keep(model, taken_s)
            machines = {name: _only_machine(store) for name, store in stores.items()}
            cluster = shared(self.net, self.found, machines)
            self.sittings[model] = Sitting(stores, cluster, taken_s)
        return self.sittings[model]

    def forecast_references(self, model: str, profiled: Mapping[str, float]) -> dict[str, float]:
        """Return what the reference product took when the ground of each forecast was measured.

        A profile is scaled by rates that are the medians over all profiles: how the machine had
        changed from then to its own is taken into account.
        """
        now, sat = self.notes.of(SURVEY) or 0.0, self.sittings[model].reference_s
        of_model = profiled.get(model, now)
        drift = of_model / profiled.get(MACHINE, of_model)
        found = {"devices": sat, "steady": sat, "share": of_model}
        return found | {"survey": now * drift, "analytical": now}


@dataclass(frozen=True)
class Sitting:
    """One profile of a model on each device of a cluster.

    Attributes:
        stores: the database of each device.
        cluster: its devices have the rates that were found together with the ops.
        reference_s: of the product meanwhile.
    """

    stores: Mapping[str, Path]
    cluster: Cluster
    reference_s: float

    def costs(self, plan: Plan) -> Costs:
        """Return what the ops of a plan for `cluster` take, each device's by its own database."""
        concrete, known = plan.graph.at(plan.rows), costs_of(plan)
        of = {
            name: estimator("measured", profiles=str(store)).estimate(concrete, self.cluster)
            for name, store in self.stores.items()
        }
        return replace(
            known,
            alone=None,
            ops={name: costs.ops[name] for name, costs in of.items()},
            measured={name: costs.measured[name] for name, costs in of.items()},
            optimizer_s_per_byte={n: c.optimizer_s_per_byte[n] for n, c in of.items()},
            optimizer_s_per_tensor={n: c.optimizer_s_per_tensor[n] for n, c in of.items()},
        )


def _only_machine(store: Path) -> Machine:
    (machine,) = ProfileStore(store, read_only=True).machines()
    return machine


def shared(net: Network, found: Cluster, machines: Mapping[str, Machine]) -> Cluster:
    """Return the cluster as it was ordered: each device a share of the machine that was profiled.

    Args:
        net: its quotas are the shares.
        found: what a survey says, for the overheads.
        machines: as profiled, for each device.
    """

    def device(each: Device) -> Device:
        cores, machine = net.quotas[each.name].cores, machines[each.name]
        return replace(
            each,
            flops_per_s=machine.flops_per_s * cores,
            memory_bytes_per_s=machine.memory_bytes_per_s * cores,
            launch_s=machine.launch_s / cores,
            overheads=found.device[each.name].overheads,
        )

    return replace(net.cluster, devices=tuple(map(device, net.cluster.devices)))

"""What `tools.fidelity` works with: captured and profiled models, surveyed clusters, a reference.

It knows how to get ready for a forecast; cells and rows are others' to know.
"""

from __future__ import annotations

import json
import statistics
from collections.abc import Callable, Iterable, Mapping
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from pathlib import Path

from bigbrain_fx.capture import CaptureSession, capture_file
from bigbrain_fx.core import Cluster, Device, Overheads
from bigbrain_fx.doctor import Survey
from bigbrain_fx.profiler import ProfileOptions, profile
from bigbrain_fx.profiles import Machine, ProfileStore
from tools.emulation import Network
from tools.fidelity_models import MICRO_BATCHES, MODELS
from tools.fidelity_reference import Reference

ROOT = Path(__file__).resolve().parent.parent
SOURCES = ("survey", "share", "analytical", "steady")
MACHINE = "machine"  # whose rates are the medians over the profiles
SURVEYS = 3  # at most

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
                found = profile(self._file(name), self.store, ProfileOptions(rows=(rows,)))
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
            captured = capture_file(self._file(model))
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

    def _file(self, model: str) -> Path:
        path = self.work / f"{model}.py"
        path.write_text(MODELS[model].text(str(ROOT)))
        return path


@dataclass(frozen=True)
class Place:
    """An emulated cluster as forecasts see it: a cluster by source, and the reference then."""

    net: Network
    clusters: Mapping[str, Cluster]
    reference_s: float

    @classmethod
    def of(cls, net: Network, machine: Machine, keep: Path, quiet: float) -> Place:
        """Survey a network, again where others used the machine; keep what was found in a file."""
        seen: list[tuple[float, int, Survey, float]] = []
        while len(seen) < SURVEYS and (not seen or min(seen)[0] > quiet):
            with Reference() as beside:
                survey = net.survey()
            seen.append((beside.busy, len(seen), survey, beside.seconds))
        _, _, survey, taken_s = min(seen)
        survey.write(keep, force=True)
        found = survey.cluster
        clusters = {"survey": found, "share": shared(net, found, machine), "analytical": found}
        return cls(net, clusters, taken_s)

    def forecast_references(self, model: str, profiled: Mapping[str, float]) -> dict[str, float]:
        """Return what the reference product took when the ground of each forecast was measured.

        A profile is scaled by rates that are the medians over all profiles: how the machine had
        changed from then to its own is taken into account.
        """
        of_model = profiled.get(model, self.reference_s)
        drift = of_model / profiled.get(MACHINE, of_model)
        now = self.reference_s
        found = {"survey": now * drift, "share": of_model, "analytical": now}
        return found | {"steady": found["survey"]}


def shared(net: Network, found: Cluster, machine: Machine) -> Cluster:
    """Return the cluster as it was ordered: each device a share of the machine that was profiled.

    Args:
        net: its quotas are the shares.
        found: what a survey says, for the overheads: seconds of a processor, so over the share.
        machine: as profiled.
    """

    def device(each: Device) -> Device:
        cores = net.quotas[each.name].cores
        return replace(
            each,
            flops_per_s=machine.flops_per_s * cores,
            memory_bytes_per_s=machine.memory_bytes_per_s * cores,
            launch_s=machine.launch_s / cores,
            overheads=_over(found.device[each.name].overheads, cores),
        )

    return replace(net.cluster, devices=tuple(map(device, net.cluster.devices)))


def _over(own: Overheads, cores: float) -> Overheads:
    rate = own.message_bytes_per_s
    return Overheads(
        own.message_s / cores,
        None if rate is None else rate * cores,
        own.instruction_s / cores,
        own.step_s / cores,
    )

"""Each way planned, forecast and run on an emulated cluster, round after round in turn."""

from __future__ import annotations

import statistics
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from itertools import groupby
from pathlib import Path

from bigbrain_fx.bundles import source_of
from bigbrain_fx.bundles.launch import RunOptions
from bigbrain_fx.emit import write_bundle
from bigbrain_fx.errors import BigBrainError
from bigbrain_fx.frontend import CaptureSession, capture_file
from bigbrain_fx.plan import Plan, make_plan
from tools.studies.divided.cells import Row, Way, rows_of, site_of, ways
from tools.studies.divided.seated import NAME, seated
from tools.studies.emulated_models import MODELS
from tools.studies.emulated_profiles import profile_devices
from tools.studies.emulation import Network, emulated
from tools.studies.fidelity.bench import ROOT, Bench, Place, Say, Sitting
from tools.studies.fidelity.drift import slower_cluster
from tools.studies.fidelity.reference import Reference

ROUNDS = 2  # of the slowest device's members of groups, which compute a whole batch's rows
QUIET = 0.65  # of all processors' time; the devices take half


@dataclass(frozen=True)
class Repeats:
    """How many rounds, steps of a run besides its first, and texts of ways (none: all).

    And how many times larger the batch is.
    """

    rounds: int
    steps: int
    names: tuple[str, ...] = ()
    batches: int = 1

    def wants(self, way: Way) -> bool:
        """Say whether a way is run."""
        return not self.names or any(text in way.name for text in self.names)


def measured(
    pairs: Sequence[tuple[str, str]], work: Path, repeats: Repeats, say: Say
) -> Iterator[Row]:
    """Run models on clusters, cluster by cluster; what fails is said and left out."""
    with ExitStack() as stack:
        bench = Bench(work, work / "profiles.sqlite", stack)
        bench.profile(sorted({model for model, _ in pairs}), say)
        for name, group in groupby(pairs, key=lambda pair: pair[1]):
            with emulated(site_of(name).cluster) as net:
                place = Place.of(net, bench.machine, work / name, QUIET)
                for model, _ in group:
                    yield from _of_model(place, bench, model, name, repeats, say)


def forecast_again(rows: Sequence[Row], work: Path, say: Say) -> list[Row]:
    """Return rows with forecasts made anew, of the profiles beside which they were measured."""
    found = []
    with ExitStack() as stack:
        bench = Bench(work, work / "profiles.sqlite", stack)
        for name in dict.fromkeys(row.site for row in rows):
            with emulated(site_of(name).cluster) as net:
                place = Place.of(net, bench.machine, work / name, QUIET)
                cells = dict.fromkeys(row.cell for row in rows if row.site == name)
                for model, _, batches in cells:
                    own = [row for row in rows if row.cell == (model, name, batches)]
                    by_name = {way.name: way for way in ways(site_of(name), batches)}
                    say(f"{model}/{name}: {len(own)} forecasts")
                    sitting = place.sit(bench, model)
                    with capture_file(_sized(work, model, batches)) as session:
                        found += [_again(row, by_name[row.way], session, sitting) for row in own]
    return found


def _again(row: Row, way: Way, session: CaptureSession, sitting: Sitting) -> Row:
    return replace(row, forecast_s=forecast_s(way, session, sitting, row.reference_s))


def _sized(work: Path, model: str, batches: int) -> Path:
    """Write the model's file for the batch of these runs."""
    rows = rows_of(model, batches)
    path = work / f"{model}-{rows}.py"
    path.write_text(MODELS[model].sized(rows).text(str(ROOT)))
    return path


def _of_model(
    place: Place, bench: Bench, model: str, site: str, repeats: Repeats, say: Say
) -> Iterator[Row]:
    """Profile a model's ops on all devices, then run it in every way."""
    asked = list(filter(repeats.wants, ways(site_of(site), repeats.batches)))
    sitting = _sitting(place, bench, model, asked, repeats.batches)
    with (
        tempfile.TemporaryDirectory(prefix="divided-") as folder,
        capture_file(_sized(bench.work, model, repeats.batches)) as session,
        seated(sitting),
    ):
        cases = []
        for way in asked:
            try:
                cases.append(Case.of(way, session, sitting, Path(folder)))
            except BigBrainError as error:
                say(f"{model}/{site}/{way.name} failed: {error}")
        taken = in_turns(place.net, cases, repeats, Path(folder))
        for case, runs in zip(cases, taken, strict=True):
            yield _row(case, runs, model, site)


def _sitting(place: Place, bench: Bench, model: str, asked: Sequence[Way], batches: int) -> Sitting:
    """Profile whole ops, and those of members of groups."""
    sitting = place.sit(bench, model)
    of_groups = dict.fromkeys(
        (rows_of(model, batches) // way.micro_batches, way.tensor_shares)
        for way in asked
        if way.tensor_shares
    )
    file = _sized(bench.work, model, batches)
    for rows, shares in of_groups:
        about = place.net, file, rows, place.work / model, ROUNDS
        profile_devices(*about, tensor_shares=shares, anew=False)
    if not of_groups:
        return sitting
    del place.sittings[model]  # the databases have the rates of the latest session
    return place.sit(bench, model)


@dataclass(frozen=True)
class Case:
    """A way, planned and written."""

    way: Way
    session: CaptureSession
    sitting: Sitting
    plan: Plan
    bundle: Path

    @classmethod
    def of(cls, way: Way, session: CaptureSession, sitting: Sitting, folder: Path) -> Case:
        """Plan a way and write its bundle."""
        plan = _planned(way, session, sitting)
        bundle = write_bundle(plan, session, folder / way.name.replace(" ", "-").replace(",", ""))
        return cls(way, session, sitting, plan, bundle)


def forecast_s(
    way: Way, session: CaptureSession, sitting: Sitting, reference_s: Sequence[float]
) -> float:
    """Return a step's seconds where the reference product takes so long, in the middle."""
    slower = statistics.median(reference_s) / sitting.reference_s
    with seated(sitting, slower):
        return round(_planned(way, session, sitting, slower).forecast.step_s, 5)


def _planned(way: Way, session: CaptureSession, sitting: Sitting, slower: float = 1.0) -> Plan:
    used = way.of(slower_cluster(sitting.cluster, slower))
    return make_plan(session.graph, used, source_of(session.facts), way.options(NAME))


@dataclass(frozen=True)
class Taken:
    """One run: its median step but the first, the reference beside it, how busy all was."""

    step_s: float
    reference_s: float
    busy: float


def in_turns(
    net: Network, cases: Sequence[Case], repeats: Repeats, folder: Path
) -> list[list[Taken]]:
    """Run all cases, round after round; return what each took."""
    taken: list[list[Taken]] = [[] for _ in cases]
    for turn in range(repeats.rounds):
        for number, case in enumerate(cases):
            logs = folder / f"logs-{turn}-{number}"
            with Reference() as beside:
                options = RunOptions(steps=1 + repeats.steps, threads=1, logs=logs)
                run = net.run(case.bundle, options)
            step_s = statistics.median(line.step_s for line in run.steps[1:])
            taken[number].append(Taken(step_s, beside.seconds, round(beside.busy, 3)))
    return taken


def _row(case: Case, runs: Sequence[Taken], model: str, site: str) -> Row:
    reference_s = tuple(run.reference_s for run in runs)
    return Row(
        model,
        site,
        case.way.name,
        tuple(round(run.step_s, 5) for run in runs),
        reference_s,
        forecast_s(case.way, case.session, case.sitting, reference_s),
        tuple(run.busy for run in runs),
        () if case.way.places else shares(case.plan),
        case.way.batches,
    )


def shares(plan: Plan) -> tuple[int, ...]:
    """Return the micro-batches of each replica, or the parts of a tensor group."""
    if plan.stages.micros:
        return tuple(len(own) for own in plan.stages.micros)
    return plan.placement.tensor.shares if plan.placement.tensor is not None else ()

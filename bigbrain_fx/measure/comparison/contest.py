"""One capture, a plan for each contender; if asked, their bundles written and run in turns."""

from __future__ import annotations

import os
import re
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from bigbrain_fx.bundles import (
    TIME_LIMIT_S,
    FoundModel,
    Loss,
    captured_model,
    checked,
    require_gpus,
    require_optimizer,
    run,
    with_tried_rules,
)
from bigbrain_fx.cluster import read_cluster
from bigbrain_fx.core import Cluster
from bigbrain_fx.emit import check_out, write_bundle
from bigbrain_fx.errors import BigBrainError, InputError
from bigbrain_fx.measure.comparison.contender import Comparison, Contender
from bigbrain_fx.measure.comparison.turns import Runner, Turns, in_turns
from bigbrain_fx.plan import Options, Plan, make_plan
from bigbrain_fx.planning import label, preset
from bigbrain_fx.weights import Scratch

if TYPE_CHECKING:
    from torch import nn

DEFAULT = ("naive", "analytical")
ROUNDS = 2
Say = Callable[[str], None]


def compare(
    model: str | Path | nn.Module,
    devices: str | Path | Cluster,
    partitioners: Sequence[str] = DEFAULT,
    options: Options | None = None,
    *,
    estimator: str | None = None,
    steps: int | None = None,
    rounds: int = ROUNDS,
    save: str | Path | None = None,
    example_batch: object = None,
    loss: Loss | None = None,
    time_limit_s: float = TIME_LIMIT_S,
    on_progress: Say | None = None,
    runner: Runner = run,
) -> Comparison:
    """Plan a model in several ways and put them side by side; optionally run them, too.

    A contender without a plan, or whose bundle does not run, is in the result with the reason.
    `Comparison.require_sound` raises when that is all there is.

    Args:
        model: as in `split`.
        devices: a cluster.json, or a Cluster.
        partitioners: presets and partitioners by name, third parties' included.
        options: what all have in common; its partitioner and estimator do not count.
        estimator: who judges all of them; None leaves each name its own.
        steps: run each bundle on this host, one process per device, for so many steps (batches of
            inference) in each round. The first step of a round does not count. 2 or more.
        rounds: how often; every other round goes backwards, so that a host that gets slower or
            faster treats all equally.
        save: keep the bundles, as folders in this folder by the contenders' names.
        example_batch: as in `split`.
        loss: as in `split`.
        time_limit_s: as in `split`.
        on_progress: receives a text on each thing that is done.
        runner: runs a bundle elsewhere than on this host as it is, like the `run` of an emulated
            cluster (`tools.studies.emulation`).

    Raises:
        BigBrainError: the input cannot be used or captured, or a name is not known.
    """
    _require_countable(steps, rounds)
    chosen, say = checked(options, model), on_progress or _silent
    entries = {name: _asked(name, chosen, estimator) for name in _distinct(partitioners)}
    cluster = devices if isinstance(devices, Cluster) else read_cluster(devices)
    if steps and runner is run and all(device.kind == "cuda" for device in cluster.devices):
        require_gpus(cluster.devices)  # of unlike kinds, a plan may use the CPUs alone
    kept = _kept(save, entries)
    with _folder(kept, steps) as folder:
        meta = folder is None
        with captured_model(model, chosen, example_batch, loss, time_limit_s, meta=meta) as found:
            contenders = _entered(found, cluster, entries, folder, say)
        turns = in_turns(contenders, steps, rounds, say, runner) if steps else Turns(contenders)
    return _compared(found, turns, steps, kept)


def _require_countable(steps: int | None, rounds: int) -> None:
    if steps is not None and steps < 2:
        raise InputError(
            f"{steps} step cannot be measured: the first one does not count",
            code="BX3814",
            help="run 2 steps or more",
        )
    if rounds < 1:
        raise InputError(f"there are no {rounds} rounds", code="BX3815", help="run 1 round or more")


def _distinct(partitioners: Sequence[str]) -> tuple[str, ...]:
    names = tuple(dict.fromkeys(name.strip() for name in partitioners if name.strip()))
    if not names:
        raise InputError(
            "there is nothing to compare",
            code="BX3816",
            help="name partitioners: naive,analytical,m-sct",
        )
    return names


def _asked(name: str, options: Options, estimator: str | None) -> Options:
    """Return the options of one contender; a name that is not known is an error for all."""
    partitioner, own = preset(name)
    return replace(options, partitioner=partitioner, estimator=estimator or own)


def _kept(save: str | Path | None, names: Iterable[str]) -> Path | None:
    """Return where bundles are kept; find out now, not after planning, that a place is taken."""
    if save is None:
        return None
    folder = Path(save).absolute()
    for name in names:
        check_out(folder / _folder_name(name), force=False)
    return folder


@contextmanager
def _folder(kept: Path | None, steps: int | None) -> Iterator[Path | None]:
    """Give a folder for the bundles: the user's, or one for as long as they run; None for none."""
    if kept is not None or steps is None:
        yield kept
        return
    with Scratch("compare") as folder:
        yield Path(folder)


def _entered(
    found: FoundModel,
    cluster: Cluster,
    entries: Mapping[str, Options],
    folder: Path | None,
    say: Say,
) -> list[Contender]:
    """Plan for each name; write the bundles, where there is a folder for them."""
    contenders = [_planned(found, cluster, name, entries[name], say) for name in entries]
    if folder is None:
        return contenders
    return [_written(found, each, folder) for each in contenders]


def _compared(found: FoundModel, turns: Turns, steps: int | None, kept: Path | None) -> Comparison:
    """Put together what was found; bundles that are not kept are gone by now."""
    contenders = [replace(each, bundle="") if kept is None else each for each in turns.contenders]
    return Comparison(
        found.graph.name,
        tuple(contenders),
        found.capture_s,
        steps,
        turns.agreements,
        found.warnings,
    )


def _planned(
    found: FoundModel, cluster: Cluster, name: str, options: Options, say: Say
) -> Contender:
    """Plan once, on a graph that nobody has looked at before: what it caches is worked out anew."""
    say(f"planning {name}")
    fresh = replace(found, graph=replace(found.graph))
    begun_s = time.perf_counter()
    try:
        plan, _ = _tried_plan(fresh, options, cluster=cluster)
    except Exception as error:  # a third party's partitioner raises anything
        took_s = time.perf_counter() - begun_s
        blank = Contender(name, label(options.partitioner), options.estimator, took_s)
        return _failed(blank, error)
    took_s = time.perf_counter() - begun_s
    return Contender(name, label(options.partitioner), plan.estimator, took_s, plan)


def _tried_plan(
    found: FoundModel, options: Options, cluster: Cluster
) -> tuple[Plan, tuple[str, ...]]:
    make = partial(make_plan, found.graph, cluster, found.source)
    return with_tried_rules(found, options, make)


def _failed(contender: Contender, error: Exception) -> Contender:
    if not isinstance(error, BigBrainError):
        reason = f"{type(error).__name__}: {error}"
        help_ = f"`bigbrain-fx estimate --debug --partitioner {contender.name}` shows where"
        return replace(contender, reason=reason, help=help_)
    notes = f" ({'; '.join(error.notes)})" if error.notes else ""
    reason = f"{error.what}{notes}"
    return replace(contender, reason=reason, help=error.help or "", code=error.code)


def _written(found: FoundModel, contender: Contender, folder: Path) -> Contender:
    if contender.plan is None:
        return contender
    try:
        require_optimizer(found, contender.plan)
    except InputError as error:
        return replace(_failed(contender, error), plan=None)
    out = folder / _folder_name(contender.name)
    write_bundle(contender.plan, found.weights, Path(os.path.abspath(out)))
    return replace(contender, bundle=str(out))


def _folder_name(name: str) -> str:
    """Return a name that is safe as a folder: a third party may call itself anything."""
    return re.sub(r"[^A-Za-z0-9_-]", "_", name)


def _silent(said: str) -> None:
    del said

"""The road as three verbs: `split` (model and cluster in, bundle out), `estimate`, `simulate`.

This module only joins the others; everything it does can be done by hand with their doors.
"""

from __future__ import annotations

import difflib
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from bigbrain_fx.bundles.found import (
    Given,
    captured_model,
    checkpoint_of,
    with_whole_file,
)
from bigbrain_fx.bundles.found_model import CompareLater, FoundModel, Loss, Recipe
from bigbrain_fx.bundles.micro_batches import planned_as_trained
from bigbrain_fx.bundles.opaque import (
    OF_ESTIMATES,
    planned_whole,
    with_loss_whole,
    with_modules_whole,
    with_one_micro_batch,
    with_opaque_step,
)
from bigbrain_fx.bundles.planned import planned, tried_plan
from bigbrain_fx.bundles.rehearsing import Rehearsal, is_off
from bigbrain_fx.bundles.target import Target
from bigbrain_fx.bundles.typed import of_its_types
from bigbrain_fx.cluster import read_cluster
from bigbrain_fx.core import Cluster, Stopwatch, Timing
from bigbrain_fx.errors import BigBrainError, InputError, warn_caller
from bigbrain_fx.frontend import TOO_LARGE, Room, is_hf, is_onnx
from bigbrain_fx.plan import (
    AUTO,
    SCHEDULES,
    Options,
    Plan,
    Request,
    read_plan,
    replan,
    require_compatible,
    require_countable,
    require_no_groups,
    require_placeable,
    require_sent_types,
    room_of_all,
    timeline,
    traits,
    with_placement,
)
from bigbrain_fx.planning import estimator, preset, require_ready

if TYPE_CHECKING:
    from torch import Tensor, nn


TIME_LIMIT_S = 600.0


@dataclass(frozen=True)
class Split:
    """Result of `split`: the plan, the folder of the bundle, and notes for the user.

    `parameters` counts trainable numbers, tied ones once. `capture_s` is the seconds that capture
    took in its child process (0 for a module in memory). `rehearsed` compares the training of the
    bundle with the model file's own loop; empty without a comparison. `timings` are the seconds of
    the steps of this process and of the one with the model.
    """

    plan: Plan
    bundle: Path
    warnings: tuple[str, ...]
    parameters: int
    capture_s: float
    rehearsed: str = ""
    timings: tuple[Timing, ...] = ()
    constants: Mapping[str, Tensor] = field(default_factory=dict, repr=False, compare=False)
    compare_later: CompareLater | None = field(default=None, repr=False, compare=False)

    def __str__(self) -> str:
        return f"{self.plan}\nwrote {self.bundle}"


def split(
    model: str | Path | nn.Module,
    devices: str | Path | Cluster | None,
    out: str | Path,
    options: Options | None = None,
    *,
    like: str | Path | Plan | None = None,
    example_batch: object = None,
    loss: Loss | None = None,
    recipe: Recipe | None = None,
    weights: str | Path | None = None,
    weights_by_reference: bool = False,
    force: bool = False,
    lean: bool = False,
    bare: bool = False,
    extras: Collection[str] = (),
    rehearse: bool = True,
    time_limit_s: float = TIME_LIMIT_S,
) -> Split:
    """Split a model over a cluster and write a bundle.

    Args:
        model: a model file ("model.py", "model.py:name"), run in a child process; a Hugging Face
            configuration ("hf:config.json"); or a module, captured here.
        devices: a cluster.json, or a Cluster; None takes that of `like`.
        out: the bundle's folder; must not exist, or be a bundle with `force`.
        options: mode, partitioner, estimator, schedule, micro-batches, seed.
        like: a plan or bundle of the same model to place the ops by, in place of a partitioner.
            Inference then runs where the weights were trained.
        example_batch: for a module: one mini-batch, of which dimension 0 is the batch.
        loss: for a module: what to train on, `loss(output, batch)`; else its scalar output, or
            its output's `.loss`.
        recipe: for a module: its optimizer and the like.
        weights: a safetensors checkpoint of the model, a file or a folder with shards; no process
            ever holds all of it then.
        weights_by_reference: leave the numbers in the checkpoint; the bundle says where each is.
        force: replace a bundle that is there.
        lean: leave out what replaces processes that die (launch.py, supervisor/ and its half of
            runtime/): torchrun starts it, or `run` without spares.
        bare: write the plain pipeline alone: at most 1,500 lines of runtime/, for torchrun.
        extras: files that a run may want and no plan needs: "hosts" (launch.py over several),
            "mpi" (`--transport mpi`), "suspicion"
            (`--suspect`), "pipelining" (a loop of torch.distributed.pipelining).
        rehearse: train a few steps of the bundle beside the model file's own loop in plain
            PyTorch, before it is moved to its place. Where their numbers differ the step is run
            whole on one device, or refused. A module's loop trains on the example batch; where
            they differ it is refused.
        time_limit_s: seconds for loading and capturing a model file.

    Each of the result's `warnings` is a `SplitWarning`, too.

    Raises:
        BigBrainError: the input cannot be used, captured or placed; nothing is written then.
    """
    target = Target(Path(out), force, lean, tuple(extras), bare)
    target.require()
    followed = read_plan(like) if isinstance(like, str | Path) else like
    cluster = _cluster_or(devices, followed)
    chosen = checked(options, model)
    _require_agreeing(chosen, cluster, followed, is_written=True)
    chosen = _of_whole_tensors(chosen) if weights_by_reference else chosen
    given = Given(checkpoint_of(model, weights), weights_by_reference)
    capture = partial(captured_model, model, example_batch=example_batch, loss=loss)
    capture = partial(capture, time_limit_s=time_limit_s, given=given, recipe=recipe)
    capture = partial(capture, is_rehearsed=rehearse and not is_off(), room=_room(cluster, chosen))
    is_open = followed is None and _has_code(model)
    make = partial(_made, partial(_written, capture, cluster, followed, target), is_open)
    make = partial(with_one_micro_batch, chosen, make, _told, is_open=is_open)
    made = with_opaque_step(chosen, make, is_open=is_open)
    _warn(made.warnings)
    return made


def _made(
    write: Callable[..., Split], is_open: bool, options: Options, refusal: BigBrainError | None
) -> Split:
    """Write a bundle; where that is refused, with opaque modules or an opaque loss."""
    make = partial(with_loss_whole, options, partial(write, options), is_open=is_open)
    return with_modules_whole(options, make, refusal, is_open=is_open)


def _written(
    capture: Callable[..., AbstractContextManager[FoundModel]],
    cluster: Cluster,
    followed: Plan | None,
    target: Target,
    options: Options,
    apart: Sequence[BigBrainError],
    refusal: BigBrainError | None,
    loss_apart: bool,
) -> Split:
    """Capture, plan and write: a trace, or the step as one op where a trace was refused.

    Modules that differ `apart` in bundles that were tried before are opaque. The loss is opaque,
    too, where entries that only it reads have other shapes in other batches: `loss_apart`.
    """
    watch = Stopwatch()
    start = watch.lap("start")
    with capture(options, refusal=refusal, apart=apart, loss_apart=loss_apart) as found:
        watch.lap("wait for the capture")
        plan, notes = planned(found, options, cluster, followed, refusal)
        require_sent_types(plan)
        plans = watch.lap("plan")
        plan, more, said = _rehearsed(found, plan, target)
        facts = found.parameters, found.capture_s, said
        late = [note for note in notes if not (said and note == TOO_LARGE)]  # it was compared now
        spent = () if found.session is None else found.session.spent
        laps = start, *spent, plans, watch.lap("write")
        held = found.constants, found.compare_later
        return Split(plan, target.out, (*late, *more), *facts, laps, *held)


def _rehearsed(found: FoundModel, plan: Plan, target: Target) -> tuple[Plan, tuple[str, ...], str]:
    """Write what trains as the user's loop: with lines of the model file, else with all of it.

    Returns:
        What was written, what the user should know, and how alike it is.
    """
    rehearsal = Rehearsal(found, plan)
    try:
        target.write(plan, found.weights, rehearsal.check, found.extras)
    except BigBrainError as error:
        error.apart = rehearsal.apart
        mends = rehearsal.failed and rehearsal.apart is None
        whole = with_whole_file(found, plan) if mends else None
        if whole is None:
            raise
    else:
        return plan, rehearsal.notes, rehearsal.said
    again = Rehearsal(found, whole[0])
    target.write(whole[0], found.weights, again.check, found.extras)
    return whole[0], (whole[1], *again.notes), again.said


def _room(cluster: Cluster, options: Options) -> Room | None:
    """Return what devices have for tensors; None where weights may lie elsewhere."""
    return None if "weights" in options.offload else Room(*room_of_all(cluster))


def _has_code(model: str | Path | nn.Module) -> bool:
    """Whether a model file says how the model is built: devices can build it, too."""
    return isinstance(model, str | Path) and not (is_hf(model) or is_onnx(model))


def _warn(notes: Sequence[str]) -> None:
    """Warn whoever called `split` or `estimate`, as the command line does."""
    for note in notes:
        warn_caller(note)


def _of_whole_tensors(options: Options) -> Options:
    """Return options without tensor groups; refuse them where they were asked for."""
    if options.wants_groups:
        raise InputError(
            "--weights-by-reference leaves whole tensors in the checkpoint, and --tensor-parallel "
            "cuts them",
            code="BX3007",
            help="leave --weights-by-reference out",
        )
    return replace(options, tensor=1)


def _require_agreeing(
    options: Options, cluster: Cluster, followed: Plan | None = None, *, is_written: bool = False
) -> None:
    """Refuse what options alone show not to go together, before a model is captured."""
    is_placed = followed is not None
    require_compatible(Request(options, cluster, is_placed=is_placed, is_written=is_written))
    require_placeable(options, cluster)
    require_countable(cluster, options)
    if followed is not None:
        require_no_groups(followed, "--like", "leave --like out, and place by a --partitioner")


def estimate(
    model: str | Path | nn.Module,
    devices: str | Path | Cluster,
    options: Options | None = None,
    *,
    example_batch: object = None,
    loss: Loss | None = None,
    time_limit_s: float = TIME_LIMIT_S,
) -> Plan:
    """Plan without weights: will it fit, and how fast? A model file's model is built on meta.

    Args:
        model: as in `split`.
        devices: as in `split`.
        options: as in `split`.
        example_batch: as in `split`.
        loss: as in `split`.
        time_limit_s: as in `split`.

    Raises:
        BigBrainError: the input cannot be used, captured or placed.
    """
    chosen, cluster = checked(options, model), _cluster(devices)
    _require_agreeing(chosen, cluster)

    def make(options: Options, refusal: BigBrainError | None) -> tuple[Plan, tuple[str, ...]]:
        capturing = captured_model(
            model,
            options,
            example_batch,
            loss,
            time_limit_s,
            meta=True,
            refusal=refusal,
            room=_room(cluster, options),
        )
        with capturing as found:
            plan = partial(tried_plan, cluster=cluster, followed=None)
            if refusal is not None:
                return planned_whole(found, options, plan, refusal)
            counts = options.micro_batches is None
            return planned_as_trained(found, options, plan, is_open=counts)

    is_open = _has_code(model)
    one = partial(with_one_micro_batch, chosen, make, _noted, is_open=is_open)
    plan, notes = with_opaque_step(chosen, one, is_open=is_open, final=OF_ESTIMATES)
    _warn(notes)
    return plan


def _told(made: Split, note: str) -> Split:
    return replace(made, warnings=(*made.warnings, note))


def _noted(made: tuple[Plan, tuple[str, ...]], note: str) -> tuple[Plan, tuple[str, ...]]:
    return made[0], (*made[1], note)


def simulate(
    plan: Plan, devices: str | Path | Cluster | None = None, *, again: bool = False
) -> Plan:
    """Run a plan's programs in the simulator: on its own cluster, or on another.

    On another cluster the ops stay together as they are. A device of the same name takes over its
    part. Where a name is missing, all parts go to the cluster's devices in order.

    Args:
        plan: what to run.
        devices: another cluster.json or Cluster.
        again: place the model again, for the other cluster.

    Returns:
        The plan with its forecast, `forecast.timeline` included; on another cluster its plan.

    Raises:
        InputError: the cluster has too few devices for the plan's parts.
        NoPlanError: it does not fit in memory there.
    """
    if devices is None:
        return replace(plan, forecast=timeline(plan))
    require_no_groups(plan, "a simulation of other devices", "split for those devices")
    cluster = _cluster(devices)
    moved = replan(plan, cluster) if again else _on(plan, cluster)
    return replace(moved, forecast=timeline(moved))


# --------------------------------------------------------------------------- what was asked


def checked(options: Options | None, model: str | Path | nn.Module) -> Options:
    """Check names before any work is done; the command line's presets are understood, too."""
    chosen = of_its_types(options or Options(), but=("partitioner",))
    estimator(chosen.estimator)
    if chosen.mode not in (None, "train", "eval"):
        raise InputError(
            f"there is no mode '{chosen.mode}'", code="BX3011", help="choose train or eval"
        )
    if chosen.schedule is not None and chosen.schedule not in SCHEDULES:
        close = difflib.get_close_matches(chosen.schedule, SCHEDULES, n=1, cutoff=0.5)
        listed = ", ".join(sorted(SCHEDULES))
        raise InputError(
            f"there is no schedule '{chosen.schedule}'",
            code="BX3012",
            help=(f"did you mean {close[0]}? " if close else "") + f"choose one of {listed}",
        )
    onnx = isinstance(model, str | Path) and is_onnx(model)
    mode = chosen.mode or ("eval" if onnx else "train")
    schedule = traits(chosen.schedule)
    if mode == "eval" and schedule.splits and not schedule.searches:
        raise InputError(
            f"schedule '{chosen.schedule}' splits backwards, and inference has none",
            code="BX3013",
            help="leave --schedule out, or use forward or list",
        )
    given = chosen.partitioner
    method = preset(given)[0] if isinstance(given, str) else given
    if method != AUTO:
        require_ready(method, **dict(chosen.partitioner_options))
    return replace(chosen, mode=mode, partitioner=method)


def _cluster_or(devices: str | Path | Cluster | None, followed: Plan | None) -> Cluster:
    if devices is not None:
        return _cluster(devices)
    if followed is None:
        raise InputError("no devices were given", code="BX3014", help="add --devices cluster.json")
    return followed.cluster


def _cluster(devices: str | Path | Cluster) -> Cluster:
    return devices if isinstance(devices, Cluster) else read_cluster(devices)


def _on(plan: Plan, cluster: Cluster) -> Plan:
    """Return the plan with its parts on another cluster's devices."""
    used, there = plan.stages.devices, [device.name for device in cluster.devices]
    if len(used) > len(there):
        raise InputError(
            f"the plan has parts for {len(used)} devices, the cluster has {len(there)}",
            code="BX3023",
            help="place the model again for that cluster: `bigbrain-fx simulate ... --again`",
        )
    same = set(used) <= set(there)
    to = {name: name if same else there[i] for i, name in enumerate(used)}

    def moved(homes: Mapping[str, str]) -> dict[str, str]:
        return {op: to.get(device, there[0]) for op, device in homes.items()}

    placement = replace(
        plan.placement,
        device_of=moved(plan.placement.device_of),
        replicas=tuple(replace(r, device_of=moved(r.device_of)) for r in plan.placement.replicas),
    )
    return with_placement(replace(plan, cluster=cluster), placement)

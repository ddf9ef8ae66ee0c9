"""The road as three verbs: `split` (model and cluster in, bundle out), `estimate`, `simulate`.

This room only joins the others; everything it does can be done by hand with their doors.
"""

from __future__ import annotations

import difflib
import os
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Protocol, cast

from bigbrain_fx.alike import place_like
from bigbrain_fx.capture import CaptureSession, ModelFacts, capture_file
from bigbrain_fx.capture.location import is_onnx
from bigbrain_fx.cluster import read_cluster
from bigbrain_fx.core import Cluster, Graph, Placement
from bigbrain_fx.emit import check_out, write_bundle
from bigbrain_fx.errors import InputError
from bigbrain_fx.plan import (
    Options,
    Plan,
    Source,
    plan_placed,
    read_plan,
    replan,
    timeline,
    with_placement,
)
from bigbrain_fx.plugins import estimator, preset
from bigbrain_fx.remedy import plan_or_remedy
from bigbrain_fx.schedule import SCHEDULES
from bigbrain_fx.weights import Checkpoint, FromCheckpoint, match, read_checkpoint

if TYPE_CHECKING:
    from torch import nn

    from bigbrain_fx.capture import Captured

TIME_LIMIT_S = 600.0
Loss = Callable[..., object]


@dataclass(frozen=True)
class Split:
    """What `split` made: the plan, where the bundle is, and what the user should know.

    `parameters` counts trainable numbers, tied ones once; `capture_s` is the seconds that capture
    took in its child process (0 for a module in memory).
    """

    plan: Plan
    bundle: Path
    warnings: tuple[str, ...]
    parameters: int
    capture_s: float

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
    weights: str | Path | None = None,
    weights_by_reference: bool = False,
    force: bool = False,
    time_limit_s: float = TIME_LIMIT_S,
) -> Split:
    """Split a model over a cluster and write a bundle.

    Args:
        model: a model file ("model.py", "model.py:name"), run in a child process; a Hugging Face
            configuration ("hf:config.json"); or a module, captured here.
        devices: a cluster.json, or a Cluster; None takes that of `like`.
        out: the bundle's folder; must not exist, or be a bundle with `force`.
        options: mode, partitioner, estimator, schedule, micro-batches, seed.
        like: a plan or bundle of the same model to place the ops by, in place of a partitioner: so
            that inference runs where the weights were trained.
        example_batch: for a module: one mini-batch, dimension 0 is the batch.
        loss: for a module: what to train on, `loss(output, batch)`; else its scalar output, or
            its output's `.loss`.
        weights: a safetensors checkpoint of the model: a file, or a folder with shards. The model
            is then captured without weights, and no process ever holds all of them.
        weights_by_reference: leave the numbers in the checkpoint; the bundle says where each is.
        force: replace a bundle that is there.
        time_limit_s: seconds for loading and capturing a model file.

    Raises:
        BigBrainError: the input cannot be used, captured or placed; nothing is written then.
    """
    check_out(Path(out), force=force)
    _require_writable(Path(out))
    followed = read_plan(like) if isinstance(like, str | Path) else like
    chosen, cluster = checked(options, model), _cluster_or(devices, followed)
    given = _Given(_checkpoint(model, weights), weights_by_reference)
    with captured_model(model, chosen, example_batch, loss, time_limit_s, given=given) as found:
        plan = _plan(found, cluster, chosen, followed)
        write_bundle(plan, found.weights, Path(os.path.abspath(out)), force=force)
        return Split(plan, Path(out), found.warnings, found.parameters, found.capture_s)


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
    with captured_model(model, chosen, example_batch, loss, time_limit_s, meta=True) as found:
        return plan_or_remedy(found.graph, cluster, found.source, chosen)


def simulate(
    plan: Plan, devices: str | Path | Cluster | None = None, *, again: bool = False
) -> Plan:
    """Run a plan's programs in the simulator: on its own cluster, or on another.

    On another cluster the ops stay together as they are: a device of the same name takes over its
    part, and where a name is missing all parts go to the cluster's devices in order.

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
    cluster = _cluster(devices)
    moved = replan(plan, cluster) if again else _on(plan, cluster)
    return replace(moved, forecast=timeline(moved))


def source_of(facts: ModelFacts) -> Source:
    """Return what a plan remembers of the model file."""
    location = facts.path if facts.name == "model" else f"{facts.path}:{facts.name}"
    return Source(
        location,
        facts.has_batches,
        facts.has_optimizer,
        facts.has_loss,
        facts.has_lr_scale,
        facts.clip_norm,
        facts.module,
        facts.optimizer_state,
        facts.optimizer_temporaries,
    )


# --------------------------------------------------------------------------- what was asked


def checked(options: Options | None, model: str | Path | nn.Module) -> Options:
    """Check names before any work is done; the command line's presets are understood, too."""
    chosen = options or Options()
    estimator(chosen.estimator)
    if chosen.mode not in (None, "train", "eval"):
        raise InputError(f"there is no mode '{chosen.mode}'", help="choose train or eval")
    if chosen.schedule is not None and chosen.schedule not in SCHEDULES:
        close = difflib.get_close_matches(chosen.schedule, SCHEDULES, n=1, cutoff=0.5)
        listed = ", ".join(sorted(SCHEDULES))
        raise InputError(
            f"there is no schedule '{chosen.schedule}'",
            help=f"did you mean {close[0]}?" if close else f"choose one of {listed}",
        )
    onnx = isinstance(model, str | Path) and is_onnx(model)
    mode = chosen.mode or ("eval" if onnx else "train")
    return replace(chosen, mode=mode, partitioner=preset(chosen.partitioner)[0])


def _cluster_or(devices: str | Path | Cluster | None, followed: Plan | None) -> Cluster:
    if devices is not None:
        return _cluster(devices)
    if followed is None:
        raise InputError("no devices were given", help="add --devices cluster.json")
    return followed.cluster


def _plan(found: Found, cluster: Cluster, options: Options, followed: Plan | None) -> Plan:
    """Plan as asked: with a partitioner, or as another plan placed the same model."""
    if followed is None:
        return plan_or_remedy(found.graph, cluster, found.source, options)
    same = followed.micro_batches
    fits = found.graph.static_batch is None and found.graph.batch % same == 0
    count = options.micro_batches or (same if fits else None)
    alike = replace(options, partitioner=followed.partitioner, micro_batches=count)
    placement = place_like(found.graph, followed)
    return plan_placed(found.graph, cluster, found.source, alike, placement)


def _cluster(devices: str | Path | Cluster) -> Cluster:
    return devices if isinstance(devices, Cluster) else read_cluster(devices)


def _require_writable(out: Path) -> None:
    """Find out now, not after a long capture."""
    folder = out.absolute().parent
    while not folder.exists():
        folder = folder.parent
    if not folder.is_dir():
        raise InputError(f"cannot write {out}: {folder} is not a folder", help="give another --out")
    if not os.access(folder, os.W_OK | os.X_OK):
        raise InputError(
            f"cannot write {out}: no permission to write in {folder}", help="give another --out"
        )


def _on(plan: Plan, cluster: Cluster) -> Plan:
    """Return the plan with its parts on another cluster's devices."""
    used, there = plan.stages.devices, [device.name for device in cluster.devices]
    if len(used) > len(there):
        raise InputError(
            f"the plan has parts for {len(used)} devices, the cluster has {len(there)}",
            help="place the model again for that cluster: `bigbrain-fx simulate ... --again`",
        )
    same = set(used) <= set(there)
    to = {name: name if same else there[i] for i, name in enumerate(used)}
    homes = {op: to.get(device, there[0]) for op, device in plan.placement.device_of.items()}
    placement = Placement(homes, plan.placement.reason)
    return with_placement(replace(plan, cluster=cluster), placement)


# --------------------------------------------------------------------------- what was captured


class _Weights(Protocol):
    def write_weights(self, folder: Path, files: Mapping[str, Sequence[str]]) -> None: ...

    def write_batch(self, path: Path) -> None: ...


@dataclass(frozen=True)
class _Given:
    """A checkpoint that the user gave, and whether its numbers stay in it."""

    checkpoint: Checkpoint | None
    by_reference: bool


def _checkpoint(model: str | Path | nn.Module, weights: str | Path | None) -> Checkpoint | None:
    """Read the checkpoint's headers before any work is done."""
    if weights is None:
        return None
    if not isinstance(model, str | Path):
        raise InputError(
            "a module in memory has its weights already",
            help="load them into it, or give the model file",
        )
    return read_checkpoint(weights)


def _weights(
    session: CaptureSession, given: _Given | None, scratch: Path
) -> tuple[_Weights, tuple[str, ...]]:
    """Return who writes the bundle's weights, and what to say of it."""
    if given is None or given.checkpoint is None:
        return session, ()
    checkpoint, params = given.checkpoint, session.graph.params
    fit = match(params, session.converted(checkpoint, scratch))
    found = FromCheckpoint(params, fit.sources, checkpoint, session, given.by_reference)
    return found, fit.notes


@dataclass(frozen=True)
class Found:
    """A captured model, from a file or from memory.

    `parameters` counts trainable numbers, tied ones once; `capture_s` is 0 for a module in memory.
    """

    graph: Graph
    source: Source
    weights: _Weights
    warnings: tuple[str, ...]
    parameters: int
    capture_s: float = 0.0


@contextmanager
def captured_model(
    model: str | Path | nn.Module,
    options: Options,
    example_batch: object,
    loss: Loss | None,
    time_limit_s: float,
    meta: bool = False,
    given: _Given | None = None,
) -> Iterator[Found]:
    """Capture a model as `split` does, or `estimate` with `meta`; inside, weights can be written.

    Raises:
        BigBrainError: the input cannot be used or captured.
    """
    if not isinstance(model, str | Path):
        yield _in_memory(model, options, example_batch, loss)
        return
    if example_batch is not None or loss is not None:
        raise InputError(
            "a model file defines its own example_batch and loss",
            at=str(model),
            help="leave the arguments out, or give the module itself",
        )
    checkpoint = given.checkpoint if given else None
    with (
        _session(model, options, time_limit_s, meta, checkpoint is not None) as session,
        tempfile.TemporaryDirectory(prefix="bigbrain-fx-weights-") as scratch,
    ):
        facts = session.facts
        weights, notes = _weights(session, given, Path(scratch))
        yield Found(
            session.graph,
            source_of(facts),
            weights,
            (*session.warnings, *notes),
            facts.parameters,
            session.capture_s,
        )


@contextmanager
def _session(
    model: str | Path, options: Options, time_limit_s: float, meta: bool, blank: bool = False
) -> Iterator[CaptureSession]:
    def start(rows: int | None) -> CaptureSession:
        return capture_file(
            model,
            time_limit_s=time_limit_s,
            meta=meta,
            blank=blank,
            training=options.mode == "train",
            seed=options.seed,
            micro_batch=rows,
            assume=dict(options.assume),
            leaves=options.leaves,
        )

    session = start(options.rows)
    rows = _other_rows(session.graph, options)
    if rows is not None:
        session.close()
        session = start(rows)
    with session:
        yield session


def _in_memory(
    module: nn.Module, options: Options, example_batch: object, loss: Loss | None
) -> Found:
    from torch import nn

    from bigbrain_fx.capture import capture

    if not isinstance(module, nn.Module):
        raise InputError(
            f"expected a model file or a torch.nn.Module, found {type(module).__name__}",
            help='give "model.py", or an instance of the module',
        )
    if example_batch is None:
        raise InputError(
            "a module in memory needs an example batch",
            help="split(module, devices, out, example_batch={...}, loss=...)",
        )
    trace = partial(
        capture,
        module,
        example_batch,
        cast("None", loss),
        training=options.mode == "train",
        assume=dict(options.assume),
        leaves=options.leaves,
    )
    captured = trace(micro_batch=options.rows)
    rows = _other_rows(captured.graph, options)
    if rows is not None:
        captured = trace(micro_batch=rows)
    count = sum(p.numel() for p in {id(p): p for p in module.parameters()}.values())
    weights = _InMemory(captured)
    return Found(captured.graph, Source(""), weights, captured.warnings, count)


def _other_rows(graph: Graph, options: Options) -> int | None:
    """Return the rows to trace again with, when a trace of fixed size has others than asked for."""
    count = options.micro_batches
    if graph.static_batch is None or count is None or count < 1 or graph.batch % count:
        return None
    rows = graph.batch // count
    return rows if rows != graph.static_batch else None


@dataclass(frozen=True)
class _InMemory:
    """The weights of a module captured in this process."""

    captured: Captured

    def write_weights(self, folder: Path, files: Mapping[str, Sequence[str]]) -> None:
        from safetensors.torch import save_file

        for name, tensors in files.items():
            found = {t: self.captured.tensors[t].detach().contiguous().clone() for t in tensors}
            save_file(found, folder / name)

    def write_batch(self, path: Path) -> None:
        from safetensors.torch import save_file

        batch = self.captured.inputs()
        save_file({name: tensor.contiguous().clone() for name, tensor in batch.items()}, path)

"""The road as two verbs: `split` (model and cluster in, bundle out) and `estimate` (the same without weights).

This room only joins the others; everything it does can be done by hand with their doors.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from bigbrain_fx.capture import ModelFacts, capture_file
from bigbrain_fx.cluster import read_cluster
from bigbrain_fx.core import Cluster
from bigbrain_fx.emit import check_out, write_bundle
from bigbrain_fx.plan import Options, Plan, Source, make_plan

if TYPE_CHECKING:
    from torch import nn

    from bigbrain_fx.capture import Captured

TIME_LIMIT_S = 600.0


@dataclass(frozen=True)
class Split:
    """What `split` made: the plan, where the bundle is, and what the user should know."""

    plan: Plan
    bundle: Path
    warnings: tuple[str, ...]
    parameters: int
    capture_s: float


def split(
    model: str | Path | nn.Module,
    devices: str | Path | Cluster,
    out: str | Path,
    options: Options | None = None,
    *,
    example_batch: object = None,
    loss: Callable[..., object] | None = None,
    force: bool = False,
    time_limit_s: float = TIME_LIMIT_S,
) -> Split:
    """Split a model over a cluster and write a bundle.

    Args:
        model: a model file ("model.py", "model.py:name"), run in a child process; or a module, captured here.
        devices: a cluster.json, or a Cluster.
        out: the bundle's folder; must not exist unless `force`.
        options: partitioner, estimator, schedule, micro-batches, seed.
        example_batch, loss: for a module, what a model file would define.

    Raises:
        BigBrainError: the input cannot be used, captured or placed; nothing is written then.
    """
    chosen = options or Options()
    check_out(Path(out), force=force)
    cluster = devices if isinstance(devices, Cluster) else read_cluster(devices)
    if isinstance(model, str | Path):
        with capture_file(
            model, time_limit_s=time_limit_s, seed=chosen.seed, micro_batch=chosen.rows
        ) as session:
            plan = make_plan(session.graph, cluster, source_of(session.facts), chosen)
            bundle = write_bundle(plan, session, Path(out), force=force)
            return Split(plan, bundle, session.warnings, session.facts.parameters, session.capture_s)
    return _split_module(model, cluster, Path(out), chosen, example_batch, loss, force)


def estimate(
    model: str | Path,
    devices: str | Path | Cluster,
    options: Options | None = None,
    *,
    time_limit_s: float = TIME_LIMIT_S,
) -> Plan:
    """Plan without weights: will it fit, and how fast? The model is built on the meta device."""
    chosen = options or Options()
    cluster = devices if isinstance(devices, Cluster) else read_cluster(devices)
    with capture_file(
        model, time_limit_s=time_limit_s, meta=True, seed=chosen.seed, micro_batch=chosen.rows
    ) as session:
        return make_plan(session.graph, cluster, source_of(session.facts), chosen)


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
    )


def _split_module(
    module: nn.Module,
    cluster: Cluster,
    out: Path,
    options: Options,
    example_batch: object,
    loss: Callable[..., object] | None,
    force: bool,
) -> Split:
    from bigbrain_fx.capture import capture

    captured = capture(module, example_batch, loss, micro_batch=options.rows)  # type: ignore[arg-type]
    plan = make_plan(captured.graph, cluster, Source(""), options)
    bundle = write_bundle(plan, _InProcess(captured), out, force=force)
    count = sum(p.numel() for p in {id(p): p for p in module.parameters()}.values())
    return Split(plan, bundle, captured.warnings, count, 0.0)


@dataclass(frozen=True)
class _InProcess:
    """The weights of a module captured in this process."""

    captured: Captured

    def write_weights(self, folder: Path, files: Mapping[str, Sequence[str]]) -> None:
        from safetensors.torch import save_file

        for name, tensors in files.items():
            found = {t: self.captured.tensors[t].detach().contiguous().clone() for t in tensors}
            save_file(found, folder / name)

    def write_batch(self, path: Path) -> None:
        from safetensors.torch import save_file

        save_file({name: tensor.contiguous().clone() for name, tensor in self.captured.inputs().items()}, path)

"""Model files and bundles -> who gets which devices of one cluster, and a cluster file for each."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from bigbrain_fx.bundles.compile import TIME_LIMIT_S, checked
from bigbrain_fx.bundles.found import captured_model
from bigbrain_fx.cluster import read_cluster, to_json
from bigbrain_fx.core import Cluster
from bigbrain_fx.errors import InputError, os_error_as
from bigbrain_fx.plan import (
    AUTO,
    Options,
    PackedJob,
    Packing,
    PackJob,
    pack as pack_jobs,
    part_of,
    read_plan,
    require_no_groups,
)


def pack(
    models: Sequence[str | Path],
    devices: str | Path | Cluster,
    steps: Sequence[int] = (1000,),
    options: Options | None = None,
    *,
    time_limit_s: float = TIME_LIMIT_S,
) -> Packing:
    """Divide a cluster's devices among several jobs; nothing is written.

    Args:
        models: bundles (their number of micro-batches stays), and what `estimate` takes.
        devices: cluster.json or a Cluster.
        steps: of each job, or one number for all.
        options: effort, estimator and mode of those that are no bundles.
        time_limit_s: seconds for loading and capturing a model file.

    Raises:
        InputError: fewer than two jobs, or another number of steps.
        NoPlanError: they do not fit together; the arithmetic.
    """
    cluster = devices if isinstance(devices, Cluster) else read_cluster(devices)
    if len(models) < 2:
        raise InputError(
            f"expected several jobs, found {len(models)}",
            code="BX3089",
            help="for one, `estimate` says what it takes",
        )
    if len(steps) not in (1, len(models)):
        raise InputError(
            f"expected the steps of each of {len(models)} jobs, found {len(steps)} numbers",
            code="BX3090",
            help="repeat --steps in the order of the jobs, or give one for all",
        )
    chosen = replace(options or Options(effort="fast"), partitioner=AUTO)
    each = list(steps) * (len(models) if len(steps) == 1 else 1)
    names = _names(models)
    jobs = [
        _job(model, name, count, chosen, time_limit_s)
        for model, name, count in zip(models, names, each, strict=True)
    ]
    return pack_jobs(jobs, cluster)


def _job(
    model: str | Path, name: str, steps: int, options: Options, time_limit_s: float
) -> PackJob:
    if _is_bundle(model):
        plan = read_plan(model)
        require_no_groups(plan, "pack", "split it without --tensor-parallel")
        own = replace(
            options,
            estimator=plan.estimator,
            micro_batches=plan.micro_batches,
            seed=plan.seed,
            mode=plan.mode,
        )
        return PackJob(name, plan.graph, plan.source, own, steps)
    own = checked(options, model)
    with captured_model(model, own, None, None, time_limit_s, meta=True) as found:
        return PackJob(name, found.graph, found.source, own, steps)


def _is_bundle(model: str | Path) -> bool:
    path = Path(model)
    return (path / "plan.json").is_file() or path.name == "plan.json"


def _names(models: Sequence[str | Path]) -> list[str]:
    """Name jobs by their folders and files; numbers tell apart what has one name."""
    found: list[str] = []
    for model in models:
        path = Path(str(model).removeprefix("hf:").partition(":")[0])
        own = path.parent if path.name == "plan.json" else path
        base = own.absolute().name.removesuffix(".py") or "job"
        again = sum(name == base or name.startswith(f"{base}-") for name in found)
        found.append(f"{base}-{again + 1}" if base in found else base)
    return found


def require_free_parts(models: Sequence[str | Path], folder: str | Path) -> None:
    """Refuse to replace a job's cluster file, before anything is computed for it."""
    for name in _names(models):
        path = Path(folder) / f"{name}.json"
        if path.exists():
            raise InputError(
                f"{path} exists already",
                code="BX3091",
                help="give another folder, or --force to replace it",
            )


def write_parts(
    packing: Packing, devices: str | Path | Cluster, folder: str | Path
) -> dict[str, Path]:
    """Write a cluster file for each job, with its devices as they are beside the other jobs.

    Raises:
        InputError: a file cannot be written.
    """
    cluster = devices if isinstance(devices, Cluster) else read_cluster(devices)
    out = Path(folder)
    paths = {job.name: out / f"{job.name}.json" for job in packing.jobs}
    texts = {job.name: to_json(_part(job, packing, cluster)) for job in packing.jobs}
    with os_error_as(f"cannot write {out}", code="BX3092", help="give another --out"):
        out.mkdir(parents=True, exist_ok=True)
        for name, text in texts.items():
            paths[name].write_text(text, encoding="utf-8")
    return paths


def _part(job: PackedJob, packing: Packing, cluster: Cluster) -> Cluster:
    others = [_devices(other) for other in packing.jobs if other is not job]
    return part_of(cluster, _devices(job), others)


def _devices(job: PackedJob) -> tuple[str, ...]:
    return tuple(device.name for device in job.plan.cluster.devices)

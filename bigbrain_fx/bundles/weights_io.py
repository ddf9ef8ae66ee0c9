"""A bundle's weights as one checkpoint of the model, and a checkpoint of the model into a bundle.

This module joins plans and `weights`; it moves no bytes itself and knows no processes.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from bigbrain_fx.bundles.dcp_import import dcp_tensors, is_dcp
from bigbrain_fx.emit import cut_weights, weight_files, weight_index
from bigbrain_fx.errors import InputError
from bigbrain_fx.plan import Plan, plain_params, read_plan, require_float, require_no_groups
from bigbrain_fx.weights import (
    Checkpoint,
    Copy,
    FromCheckpoint,
    Joined,
    Stored,
    match,
    part_name,
    read_checkpoint,
    replace_folder,
    require_one_save,
    rewrite_index,
    scratch_folder,
    state,
    stored_tensors,
    whole_tensors,
    write_file,
    write_joined,
)


def export_weights(
    bundle: str | Path,
    to: str | Path,
    *,
    weights: str | Path | None = None,
    shard_bytes: int | None = None,
) -> Joined:
    """Join the weights of all devices to one checkpoint, under the names of the user's model.

    `model.load_state_dict(safetensors.torch.load_file(to))` takes it: tied tensors are there under
    each of their names.

    Args:
        bundle: the folder that `split` wrote.
        to: the safetensors file to write.
        weights: what `run --save` wrote; the bundle's own weights when left out.
        shard_bytes: the most that one file holds: writes shards and an index, as Hugging Face does.

    Raises:
        InputError: a tensor is missing, a file is there already, or the disk is full.
    """
    folder, out = Path(bundle), Path(to)
    if not out.name.endswith(".safetensors"):
        raise InputError(
            f"expected a name that ends in .safetensors, found {out.name}",
            code="BX3148",
            help="--to model.safetensors",
        )
    plan = read_plan(folder)
    found = stored_tensors(folder / "weights")
    if weights is not None:
        saved = stored_tensors(Path(weights))
        _require_all(plan, saved, Path(weights))
        require_one_save(Path(weights))
        found = {**found, **saved}
    with _wholes(plan, found, out.parent) as whole:
        return write_joined(state(plain_params(plan.graph), whole), out, shard_bytes)


def load_weights(
    bundle: str | Path, checkpoint: str | Path, *, by_reference: bool = False
) -> tuple[str, ...]:
    """Put a checkpoint of the model into a bundle, in place of its weights.

    All or nothing: the bundle keeps its weights when anything is wrong.

    Args:
        bundle: the folder that `split` wrote.
        checkpoint: as `split --weights` takes it; or what `run --save` or
            torch.distributed.checkpoint wrote.
        by_reference: leave the numbers in the checkpoint.

    Returns:
        What the user should know, a sentence each.

    Raises:
        InputError: names or shapes do not fit the model, or the disk is full.
    """
    folder = Path(bundle).resolve()
    plan = read_plan(folder)
    require_float(plan, "load")
    if by_reference:
        require_no_groups(plan, "--by-reference", "leave it out: parts of tensors are written")
    with (
        scratch_folder(folder / "weights") as scratch,
        _given(plan, checkpoint, folder, by_reference=by_reference) as given,
        _wholes(plan, stored_tensors(folder / "weights"), folder) as held,
        _wholes(plan, given.tensors, folder) as told,
    ):
        own, given = _Unsaved(held), Checkpoint(given.path, told)
        fit = match(plan.graph.params, _whole(plan, given, own.tensors))
        writer = FromCheckpoint(plan.graph.params, fit.sources, given, own, by_reference)
        writer.write_weights(scratch, weight_files(plan))
        cut_weights(scratch, plan)
        owner = weight_index(plan) if plan.mode == "train" else {}
        rewrite_index(scratch, folder / "weights", owner)
        replace_folder(folder / "weights", scratch)
    return fit.notes


@contextmanager
def _given(
    plan: Plan, checkpoint: str | Path, beside: Path, *, by_reference: bool
) -> Iterator[Checkpoint]:
    """Yield a checkpoint; chunks of one are put together in a file, while it is needed."""
    if not is_dcp(checkpoint):
        yield read_checkpoint(checkpoint)
        return
    if by_reference:
        raise InputError(
            "--by-reference: a checkpoint of torch.distributed.checkpoint holds chunks of tensors",
            code="BX3149",
            at=str(checkpoint),
            help="leave it out: their numbers are put together and copied",
        )
    names = {p.name: p.canonical for p in plan.graph.params if p.kind != "constant"}
    with scratch_folder(beside / "dcp") as scratch:
        file = scratch / "dcp.safetensors"
        found = dcp_tensors(Path(checkpoint), names, file, weights_alone=True)
        yield Checkpoint(Path(checkpoint).resolve(), found.model)


@contextmanager
def _wholes(
    plan: Plan, found: Mapping[str, Stored], beside: Path
) -> Iterator[Mapping[str, Stored]]:
    """Yield tensors by the model's names; parts on several ranks are put together.

    Joined tensors are in a file of their own, on the disk that is written to, while they are
    needed.
    """
    if plan.placement.tensor is None:
        yield found
        return
    shapes = {p.name: [int(n) for n in p.spec.shape] for p in plan.graph.params}
    beside.mkdir(parents=True, exist_ok=True)
    with scratch_folder(beside / "joined") as folder:
        scratch = folder / "joined.safetensors"
        yield whole_tensors(found, plan.sharded.shards, shapes, scratch)


@dataclass(frozen=True)
class _Unsaved:
    """The tensors that a bundle has already: those outside the state dict stay as they are."""

    tensors: Mapping[str, Stored]

    def write_weights(self, folder: Path, files: Mapping[str, Sequence[str]]) -> None:
        for file, names in files.items():
            found = {name: self.tensors[name] for name in names}
            write_file(folder / file, [Copy(n, s.dtype, s) for n, s in found.items()])

    def write_batch(self, path: Path) -> None:
        raise TypeError("a bundle has its batch")


def _whole(plan: Plan, given: Checkpoint, own: Mapping[str, Stored]) -> Checkpoint:
    """Add the state that no device has to what a run saved: it is as it was in the bundle."""
    if not all((given.path / f"{name}.safetensors").is_file() for name in plan.stages.devices):
        return given
    held = {name for stage in plan.stages.stages for name in stage.params}
    unused = {name: stored for name, stored in own.items() if name not in held}
    return Checkpoint(given.path, {**unused, **given.tensors})


def _require_all(plan: Plan, saved: Mapping[str, Stored], folder: Path) -> None:
    """A run saves every tensor of every device: less is another bundle's, or a part of a run's."""
    held = _held(plan)
    lost = sorted(held - set(saved))
    if lost:
        raise InputError(
            f"{folder} lacks {len(lost)} of the {len(held)} tensors that the devices hold",
            code="BX3150",
            at=str(folder),
            notes=(f"missing: {', '.join(lost[:5])}",),
            help="gather the files of all devices in one folder: "
            + ", ".join(f"{name}.safetensors" for name in plan.stages.devices),
        )


def _held(plan: Plan) -> set[str]:
    """Return the tensors that any device has, by the names under which they are stored."""
    parts = {(shard.param, shard.member) for shard in plan.sharded.shards}
    held = {(name, stage.member) for stage in plan.stages.stages for name in stage.params}
    return {part_name(*each) if each in parts else each[0] for each in held}

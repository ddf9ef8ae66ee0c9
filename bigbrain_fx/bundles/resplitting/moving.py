"""The verb: plan the graph again, and write bundle, weights and commit for the new devices."""

from __future__ import annotations

import mmap
import os
import shutil
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

from bigbrain_fx.bundles.found import with_tried_rules
from bigbrain_fx.bundles.resplitting.from_dcp import read_dcp
from bigbrain_fx.bundles.resplitting.named import Named
from bigbrain_fx.bundles.resplitting.newest import newest_state, scratch_beside
from bigbrain_fx.bundles.resplitting.order import order_notes
from bigbrain_fx.bundles.resplitting.parts import Division
from bigbrain_fx.bundles.resplitting.trying import trying
from bigbrain_fx.cluster import read_cluster
from bigbrain_fx.core import OPAQUE_MODULE, Cluster
from bigbrain_fx.emit import check_out, write_bundle
from bigbrain_fx.errors import InputError, os_error_as
from bigbrain_fx.plan import (
    Options,
    Plan,
    read_plan,
    replan,
    require_no_overlap,
    to_json,
    updating,
    with_frozen,
)
from bigbrain_fx.runtime import (
    FORMAT,
    CheckpointStore,
    Disk,
    about_of,
    graph_hash,
    layout_of,
)
from bigbrain_fx.weights import Copy, Stored, note_trained, read_header, stored_tensors, write_file

COMMITS = "commits"  # in a bundle


@dataclass(frozen=True)
class Resplit:
    """Result of `resplit`: a bundle that goes on at `step` from the commits in `commits`."""

    plan: Plan
    bundle: Path
    commits: Path
    step: int
    warnings: tuple[str, ...]

    def __str__(self) -> str:
        return f"{self.plan}\nwrote {self.bundle}, which goes on at step {self.step}"


_FROM_WEIGHTS = (
    "go on with the weights alone: `run --resume --save FOLDER` writes a checkpoint's, `export "
    "--weights FOLDER --to FILE` joins them, and `split --weights FILE` begins with them"
)


def resplit(
    bundle: str | Path,
    devices: str | Path | Cluster,
    out: str | Path,
    commits: str | Path | None = None,
    *,
    from_dcp: str | Path | None = None,
    partitioner: str | None = None,
    freeze: Sequence[str] = (),
    tensor: int | None = None,
    force: bool = False,
) -> Resplit:
    """Move a training run to other devices: fewer, more, or others.

    The graph is that of the bundle's plan; the model file is not read. Weights, the optimizer's
    state, seed and place in the data come from the last commit, by parameter name. Micro-batches
    stay as many as they were.

    Args:
        bundle: that was trained.
        devices: a cluster.json, or a Cluster: where to go on.
        out: the new bundle's folder; must not exist, or be a bundle with `force`.
        commits: the folder of `--checkpoint-dir`; without it the folder "commits" of the bundle.
        from_dcp: go on from what torch.distributed.checkpoint saved of this model and optimizer
            instead of from a commit.
        partitioner: another one than the plan's.
        freeze: modules ("blocks.0-5") that train no more from here on: they have no gradients and
            no optimizer's state then, and may lie on other devices.
        tensor: how many devices compute each stage together, 1 for none. Left out: as many as in
            the bundle if the devices allow it. Other numbers start a process with torch,
            in which the rules that divide ops are tried, and the bundle's optimizer.
        force: replace a bundle that is there.

    Raises:
        InputError: no bundle for training, no whole commit of it, or states that cannot be moved.
        NoPlanError: the model does not fit on the devices.
    """
    old, place, target = Path(bundle), Path(out), Path(os.path.abspath(out))
    check_out(place, force=force)
    plan = _training_plan(old)
    require_no_overlap(plan, "resplit", _FROM_WEIGHTS)
    _require_no_state(plan)
    cluster = devices if isinstance(devices, Cluster) else read_cluster(devices)
    asked = plan if partitioner is None else replace(plan, partitioner=partitioner, search=None)
    if freeze:
        asked = replace(asked, graph=with_frozen(asked.graph, freeze))
    with _state(plan, old, commits, from_dcp, target) as (named, notes):
        again, kept = _planned(asked, cluster, tensor, old)
        moved = replace(again, seed=int(named.facts["seed"]))
        _require_micro_batches(moved, named)
        write_bundle(moved, _Moved(moved, named, old), target, force=force, like=old)
    said = (*notes, *kept, *order_notes(plan, moved))
    return Resplit(moved, place, place / COMMITS, named.step, said)


def write_commit(plan: Plan, named: Named, to: Path) -> None:
    """Write a state by name as the first commit of a plan's devices, in a new folder."""
    _Moved(plan, named, to).write_commit(to)


def _require_no_state(plan: Plan) -> None:
    """Refuse a plan whose commits hold what modules keep in attributes: each of its own device."""
    op = next((op for op in plan.graph.ops if op.state), None)
    if op is not None:
        raise InputError(
            f"the opaque module {op.target.removeprefix(OPAQUE_MODULE)} keeps state in attributes, "
            "which checkpoints hold for the devices of this bundle only",
            code="BX3167",
            at=op.source or None,
            help="go on with this bundle (train.py --resume), or split the model anew with its "
            "weights (--weights), where the attributes begin as model() makes them",
        )


def _planned(
    plan: Plan, cluster: Cluster, members: int | None, old: Path
) -> tuple[Plan, tuple[str, ...]]:
    """Plan for the other cluster; by what new groups divide ops is tried first."""
    tensor, said = plan.placement.tensor, dict[str, None]()  # tried again, it is said again
    make = partial(replan, plan, cluster, members, say=said.setdefault)
    if members in (None, 1, 1 if tensor is None else tensor.members):
        return make(), tuple(said)
    with trying(old) as trials:
        found, kept = with_tried_rules(trials, Options(), lambda o: make(o.tensor_whole))
        trials.try_optimizer(found)
    return found, (*said, *kept)


@contextmanager
def _state(
    plan: Plan,
    old: Path,
    commits: str | Path | None,
    from_dcp: str | Path | None,
    target: Path,
) -> Iterator[tuple[Named, list[str]]]:
    """Give what the model was at its last step, and what to say of it."""
    if from_dcp is None:
        folder = Path(commits) if commits is not None else old / COMMITS
        with newest_state(plan, old, folder, target) as found:
            yield found
        return
    with scratch_beside(target) as scratch:
        named = read_dcp(Path(from_dcp), plan, old, scratch / "state.safetensors")
        has_scaler = bool(plan.source.grad_scaler)
        yield named, ["the loss scale begins anew: DCP keeps none"] * has_scaler


def _training_plan(bundle: Path) -> Plan:
    plan = read_plan(bundle)
    if plan.mode != "train":
        raise InputError(
            "this bundle is for inference: it has no run to go on with",
            code="BX3096",
            at=str(bundle),
            help="split the model for the other devices with --mode eval",
        )
    if not bundle.is_dir():
        raise InputError(
            f"{bundle} is no folder", code="BX3097", help="give the bundle, not its plan.json"
        )
    return plan


def _require_micro_batches(plan: Plan, named: Named) -> None:
    """The mean over micro-batches is part of what is computed; a state says how many it had."""
    found = named.facts["micro_batches"]
    if plan.micro_batches != found:
        raise InputError(
            f"micro_batches: expected {plan.micro_batches}, found {found} in the checkpoint",
            code="BX3098",
            help="give the checkpoints of this bundle",
        )


@dataclass(frozen=True)
class _Moved:
    """Write the new bundle's weights/ out of a commit and, beside it, that commit for the plan."""

    plan: Plan
    named: Named
    old: Path

    def write_weights(self, folder: Path, files: Mapping[str, Sequence[str]]) -> None:
        """Write the tensors of each device, and its state in a folder of commits.

        Raises:
            InputError: the disk is full.
        """
        with os_error_as(
            "cannot write the bundle",
            code="BX3099",
            at=folder,
            help="free some space, or give another --out",
        ):
            rest = stored_tensors(self.old / "weights")
            trained = {name: read_header(path) for name, path in self.named.files.items()}
            for file, names in files.items():
                copies = [self._copy(name, trained, rest) for name in names]
                write_file(folder / file, copies)
            note_trained(folder, self.named.step)
            self.write_commit(folder.parent / COMMITS)

    def write_batch(self, path: Path) -> None:
        """Take along the example batch."""
        shutil.copyfile(self.old / "example.safetensors", path)

    def _copy(
        self, name: str, trained: Mapping[str, Mapping[str, Stored]], rest: Mapping[str, Stored]
    ) -> Copy:
        full = self.named.find(self.plan.graph.param[name].canonical)
        found = rest.get(name)  # state that no device reads
        if full is not None:
            found = next(header[full] for header in trained.values() if full in header)
        if found is None:
            raise InputError(
                f"{name} is neither in the checkpoint nor in the bundle's weights",
                code="BX3100",
                at=str(self.old),
                help="give the checkpoints of this bundle",
            )
        return Copy(name, found.dtype, found)

    def write_commit(self, folder: Path) -> None:
        """Write the state of each device in a new folder of commits."""
        folder.mkdir()
        text = to_json(self.plan)
        about = {"plan": self.plan.key, "graph": graph_hash(text)}
        store, parts = CheckpointStore(folder), {}
        generation = store.begin_generation()
        for device in self.plan.stages.devices:
            image = folder / f".{device}.image.tmp"
            self._write_image(image, device, about)
            self.named.forget()
            with image.open("rb") as file:
                data = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
            parts[device] = store.write_part(device, data, generation)
            data.close()
            image.unlink()
        agreed = about_of({**self.named.facts, **about})
        store.commit(parts, generation, agreed)

    def updated(self, device: str) -> set[str]:
        """Return what a device's optimizer has the state of: with ZeRO its replica's share."""
        param, stages = self.plan.graph.param, self.plan.stages
        own = stages.of(device)
        used = (param[name] for stage in own for name in stage.params)
        held = {each.canonical for each in used if each.spec.requires_grad}
        if not stages.zero_stage:
            return held
        updates = updating(self.plan.sharded.members[0], stages)
        shard = stages.shard_of(own[0].replica)
        return {name for name in held if updates.get(name) == shard}

    def _kept(self, device: str) -> list[str]:
        """Return the tensors that a device has between two steps, by canonical name."""
        param, stages = self.plan.graph.param, self.plan.stages
        held = sorted({param[n].canonical for stage in stages.of(device) for n in stage.params})
        if not stages.gathers:
            return held
        updates = updating(self.plan.sharded.members[0], stages)
        own = stages.shard_of(stages.of(device)[0].replica)
        return [name for name in held if updates.get(name, own) == own]

    def _write_image(self, path: Path, device: str, about: Mapping[str, Any]) -> None:
        """Write the image of one device's state, a tensor at a time."""
        param = self.plan.graph.param
        used = {name for stage in self.plan.stages.of(device) for name in stage.params}
        names = self._kept(device)
        lost = [name for name in names if self.named.find(name) is None]
        if lost:
            raise InputError(
                f"the checkpoint lacks {lost[0]}",
                code="BX3101",
                at=str(next(iter(self.named.files.values())).parent),
                help="give the checkpoints of this bundle",
            )
        aliases = {name: param[name].canonical for name in sorted(used)}
        aliases = {name: canonical for name, canonical in aliases.items() if name != canonical}
        updated = [name for name in names if name in self.updated(device)]
        member, division = self.plan.stages.of(device)[0].member, Division.of(self.plan)
        tensors = division.parts(self.named.tensors_of(names, updated), member)
        facts = {**self.named.facts_of(updated), **about, "aliases": aliases}
        facts["optimizer"] = division.part_of_facts(facts["optimizer"], tensors)
        facts.update({"format": FORMAT, "step": self.named.step})
        layout = layout_of([place.entry for place in tensors.values()], facts)
        pieces = (tensors[name].data for name in layout.entries)
        Disk().write(path, (part for group in ([layout.head], pieces) for part in group))

"""A commit of a run -> files for plain PyTorch, and an older commit -> the newest one again.

    model.safetensors       for model.load_state_dict, as `export` writes it
    optimizer.safetensors   state by parameter name, hyperparameters, how many steps are done
    load_optimizer.py       what reads the latter: it needs torch and safetensors only

This module reads commits and writes files; it knows no processes and imports no torch.
"""

from __future__ import annotations

import hashlib
import mmap
import os
import re
import shutil
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

from bigbrain_fx.bundles.resplitting import Named, newest_state
from bigbrain_fx.errors import InputError, os_error_as
from bigbrain_fx.plan import (
    Plan,
    plain_params,
    read_plan,
    require_no_overlap,
)
from bigbrain_fx.runtime import (
    ASIDE,
    FORMAT,
    BrokenError,
    CheckpointStore,
    CommitError,
    Disk,
    Record,
    about_of,
    graph_hash,
    layout_of,
    locked,
    read_layout,
)
from bigbrain_fx.weights import Joined, Stored, read_header, state, stored_tensors, write_joined

LOADER = "load_optimizer.py"
_PLAIN = Path(__file__).resolve().parents[1] / "runtime" / "plain.py"


@dataclass(frozen=True)
class TrainingState:
    """Files of `export_training`, the number of finished steps, and further state."""

    model: Joined
    optimizer: Path
    loader: Path
    step: int
    warnings: tuple[str, ...]
    scheduler: str = ""  # how to make what sets the rates
    has_scaler: bool = False


def export_training(
    bundle: str | Path,
    to: str | Path,
    optimizer: str | Path,
    commits: str | Path,
    *,
    shard_bytes: int | None = None,
) -> TrainingState:
    """Write the newest whole commit of a run as a checkpoint and an optimizer's state.

    Args:
        bundle: that was trained.
        to: the safetensors file of the model.
        optimizer: the safetensors file of the optimizer; its loader goes beside it.
        commits: the folder that `--checkpoint-dir` had.
        shard_bytes: as in `export_weights`.

    Raises:
        InputError: no commit of this bundle, a file is there already, or the disk is full.
    """
    folder, out = Path(bundle), Path(optimizer)
    for path in (Path(to), out):
        if path.suffix != ".safetensors":
            raise InputError(
                f"expected a name that ends in .safetensors, found {path.name}",
                code="BX3038",
                help="--to model.safetensors --optimizer optimizer.safetensors",
            )
    _require_apart(Path(to), out)
    plan = read_plan(folder)
    with newest_state(plan, folder, Path(commits), out) as (named, notes):
        remedy = "export the weights alone: leave --optimizer out"
        require_no_overlap(plan, "export --optimizer", remedy)
        if named.optimizer is None:
            raise InputError(
                "no device of this run has an optimizer",
                code="BX3039",
                at=str(commits),
                help="leave --optimizer and --checkpoint-dir out",
            )
        tensors = state(plain_params(plan.graph), _trained(plan, named, folder))
        with _all_or_nothing(out, out.parent / LOADER):
            _write_optimizer(named, out)
            model = write_joined(tensors, Path(to), shard_bytes)
    has_scaler = named.facts.get("loss_scale") is not None
    more = tuple(notes), _scheduler(plan), has_scaler
    return TrainingState(model, out, out.parent / LOADER, named.step, *more)


def _scheduler(plan: Plan) -> str:
    if plan.source.has_scheduler:
        return "the one of training, made anew of optimizer"
    return "LambdaLR(optimizer, lr_scale)" if plan.source.has_lr_scale else ""


def _require_apart(to: Path, out: Path) -> None:
    """Refuse an optimizer's file that would be the model's, and one that is there already."""
    stem = re.escape(to.name.removesuffix(".safetensors"))
    is_name = re.fullmatch(rf"{stem}(-\d{{5,}}-of-\d{{5,}})?\.safetensors", out.name)
    if out.resolve() == to.resolve() or (is_name and out.parent.resolve() == to.parent.resolve()):
        raise InputError(
            f"{out} would be a file of the model and the optimizer's",
            code="BX3040",
            help="give --to and --optimizer two names",
        )
    if os.path.lexists(out):
        raise InputError(f"{out} exists already", code="BX3041", help="give another --optimizer")
    loader = out.parent / LOADER
    if os.path.lexists(loader) and not (loader.is_file() and _is_ours(loader)):
        raise InputError(
            f"{loader} exists already, and is another file",
            code="BX3042",
            help="name another folder for --optimizer, or move that file away",
        )


def _is_ours(loader: Path) -> bool:
    with suppress(OSError):
        return loader.read_bytes() == _PLAIN.read_bytes()
    return False


@contextmanager
def _all_or_nothing(*files: Path) -> Iterator[None]:
    """Remove those of the files that were not there before, if not all can be written."""
    made = [file for file in files if not file.exists()]
    try:
        yield
    except BaseException:
        for file in made:
            with suppress(OSError):
                file.unlink(missing_ok=True)
        raise


def export_commit(
    bundle: str | Path, to: str | Path, commits: str | Path, *, shard_bytes: int | None = None
) -> tuple[Joined, int]:
    """Write the model of the newest whole commit as a checkpoint; of older versions it has none.

    Returns:
        What was written, and how many steps are done.

    Raises:
        InputError: as `export_training`.
    """
    plan, out = read_plan(bundle), Path(to)
    with newest_state(plan, Path(bundle), Path(commits), out) as (named, _):
        tensors = state(plain_params(plan.graph), _trained(plan, named, Path(bundle)))
        return write_joined(tensors, out, shard_bytes), named.step


def commit_held(bundle: Path, folder: Path, files: Mapping[str, int]) -> None:
    """Write the state that all devices hold in memory at one step as a commit.

    If the run has gone on without replicas, the record names them.

    Raises:
        OSError: it cannot be written.
    """
    folder.mkdir(parents=True)
    plan = (bundle / "plan.json").read_bytes()
    about = {"plan": hashlib.sha256(plan).hexdigest()[:16], "graph": graph_hash(plan)}
    store, parts, facts = CheckpointStore(folder), {}, {}
    generation = store.begin_generation()
    for device, file in files.items():
        with mmap.mmap(file, 0, access=mmap.ACCESS_READ) as image:
            facts = dict(read_layout(image).facts)
            parts[device] = store.write_part(device, image, generation, about)
    lost = [name for name in read_plan(bundle).stages.devices if name not in files]
    agreed = about_of({**facts, **about})
    store.commit(parts, generation, {**agreed, "without": lost} if lost else agreed)


def _trained(plan: Plan, named: Named, bundle: Path) -> dict[str, Stored]:
    """Return where each tensor of the model is: in the commit, or, if no device reads it, here."""
    headers = [read_header(path) for path in named.files.values()]
    found = dict(stored_tensors(bundle / "weights"))
    for param in plan.graph.params:
        full = named.find(param.canonical)
        if full is not None:
            found[param.name] = next(header[full] for header in headers if full in header)
    return found


def _write_optimizer(named: Named, out: Path) -> None:
    own = {n: place for n, place in named.tensors.items() if n.startswith("optimizer:")}
    facts = {"format": FORMAT, "step": named.step, "optimizer": named.optimizer, **named.facts}
    layout = layout_of([place.entry for place in own.values()], facts)

    def pieces() -> Iterator[bytes | memoryview]:
        yield layout.head
        for name in layout.entries:
            yield own[name].data

    try:
        out.parent.mkdir(parents=True, exist_ok=True)
        Disk().put(out, pieces())
        if not (out.parent / LOADER).exists():
            shutil.copyfile(_PLAIN, out.parent / LOADER)
    except OSError as error:
        raise InputError(
            f"cannot write {out}: {error.strerror or error}",
            code="BX3043",
            help="give another --optimizer",
        ) from error
    finally:
        named.forget()


# --------------------------------------------------------------------------- going back


def list_commits(folder: str | Path, say: Callable[[str], None]) -> list[Record]:
    """Return the commits of a folder, the one that a run would go on from first.

    Raises:
        InputError: there are none.
    """
    try:
        return CheckpointStore(Path(folder)).to_resume(say)
    except CommitError as error:
        raise InputError(
            str(error), code=error.code, at=str(folder), help="give another folder"
        ) from error


def rollback(folder: str | Path, step: int, say: Callable[[str], None]) -> list[Path]:
    """Make an earlier commit the newest; a run that still writes there ends.

    Newer records are set aside under another name, not removed: renamed back they count again, as
    long as no run has gone on.

    Returns:
        The records that were set aside.

    Raises:
        InputError: there is no whole commit of that step.
    """
    place = Path(folder)
    found = list_commits(place, say)
    wanted = next((record for record in found if record.step == step), None)
    if wanted is None:
        steps = ", ".join(str(record.step) for record in found)
        raise InputError(
            f"there is no checkpoint of step {step}",
            code="BX3044",
            at=str(place),
            help=f"there are those of {steps}",
        )
    _require_whole(place, wanted, say)
    newer = found[: found.index(wanted)]
    with os_error_as(
        "checkpoints cannot be set aside", code="BX3045", at=str(place), help="see who owns it"
    ):
        if newer:
            CheckpointStore(
                place
            ).begin_generation()  # whoever still writes there is of an older one, and stops
        with locked(place):  # the newest last: until then a run would go on from it, as before
            return [_set_aside(place, record) for record in reversed(newer)][::-1]


def _require_whole(folder: Path, record: Record, say: Callable[[str], None]) -> None:
    for device in record.devices:
        try:
            CheckpointStore(folder).load(record, device, {}, say).forget()
        except (BrokenError, CommitError) as error:
            raise InputError(
                f"the checkpoint of step {record.step} is broken: {error}",
                code="BX3046",
                at=str(folder),
                help="choose another",
            ) from error


def _set_aside(folder: Path, record: Record) -> Path:
    path = folder / f"commit-{record.step}.json"
    aside = path.with_name(path.name + ASIDE)
    with suppress(FileNotFoundError):
        path.replace(aside)
    return aside


@contextmanager
def replacing(to: Path, optimizer: Path | None) -> Iterator[tuple[Path, Path | None]]:
    """Give names to write to: names beside files that are there, which they replace at the end."""
    names = {path: path.with_name(f".new-{path.name}") for path in (to, optimizer) if path}
    names = {path: new for path, new in names.items() if path.is_file()}
    for new in names.values():
        new.unlink(missing_ok=True)  # of a save that was killed
    try:
        yield names.get(to, to), optimizer and names.get(optimizer, optimizer)
        for path, new in names.items():
            new.replace(path)
    finally:
        for new in names.values():
            new.unlink(missing_ok=True)

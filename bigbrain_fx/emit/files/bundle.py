"""Write a bundle: all of it or nothing, and only inside the folder asked for."""

from __future__ import annotations

import json
import shutil
import tokenize
from collections.abc import Callable, Collection, Mapping, Sequence
from pathlib import Path
from typing import Protocol

from bigbrain_fx.emit.files.again import shipped_like
from bigbrain_fx.emit.files.bare import bare_files, is_bare, require_plain
from bigbrain_fx.emit.files.copied import door, room_files, runtime_files, supervisors_door
from bigbrain_fx.emit.files.model_file import source_file, users_code, without_marks
from bigbrain_fx.emit.files.parts import UNIMPORTED, Copied, extras_of, left_out
from bigbrain_fx.emit.files.texts import buckets_json, bundle_texts, weight_files, weight_index
from bigbrain_fx.errors import InputError, os_error_as
from bigbrain_fx.plan import Plan, chrome_trace, report, timeline, to_json
from bigbrain_fx.weights import cut_file, new_folder, replace_folder, write_index

PARTS = ("plan.json", "runtime", "weights")  # what every bundle has
ENTRIES = ("train.py", "infer.py")  # and one of these
ROOMS = Path(__file__).resolve().parents[2]  # of which some are copied
NO_ROOM = "free some disk space there, or give another --out"


class Weights(Protocol):
    """Source of the model's tensors: the capture session."""

    def write_weights(self, folder: Path, files: Mapping[str, Sequence[str]]) -> None:
        """Write tensors by name into safetensors files."""

    def write_batch(self, path: Path) -> None:
        """Write the example batch's tensors into one safetensors file, by input name."""


def check_out(out: Path, *, force: bool) -> None:
    """Refuse a folder that is there already, before any work is done."""
    if out.is_symlink():
        raise InputError(f"{out} is a symbolic link", code="BX3606", help="give the folder itself")
    if out.exists() and not force:
        raise InputError(
            f"{out} exists already",
            code="BX3607",
            help="give another --out" + (", or --force to replace it" if _is_bundle(out) else ""),
        )
    if out.exists() and not _is_bundle(out):
        raise InputError(
            f"{out} is not a bundle: --force replaces bundles only",
            code="BX3608",
            help="give another --out",
        )


def _is_bundle(folder: Path) -> bool:
    has_entry = any((folder / name).exists() for name in ENTRIES)
    return has_entry and all((folder / name).exists() for name in PARTS)


def write_bundle(
    plan: Plan,
    weights: Weights,
    out: Path,
    *,
    force: bool = False,
    like: Path | None = None,
    lean: bool = False,
    bare: bool = False,
    extras: Collection[str] = (),
    check: Callable[[Path], None] | None = None,
) -> Path:
    """Write the bundle beside its place and move it there in one step; return its path.

    With `like`, a bundle of the same graph, the user's code comes from there, and the model file is
    not read. The new bundle is as lean or bare as that, and has its extras. A `lean` bundle has
    nothing that replaces processes; nor has one whose gradients torch's collectives sum. A `bare`
    one has the plain pipeline alone; see `bare`. `extras`: of `EXTRAS`. `check` is asked of the
    folder before it is in its place.

    Raises:
        InputError: `out` exists and `force` is off, it cannot be written, or the plan needs more
            than a bare bundle has. Nothing is left of it.
    """
    check_out(out, force=force)
    _check_devices(plan)
    bare = bare if like is None else is_bare(like)
    if bare:
        require_plain(plan)
    texts, shipped = _texts(plan, like, lean or bare or plan.stages.by_backend, bare)
    _check_names(shipped, texts)
    bundle = Copied(plan, "launch.py" in texts, extras if like is None else extras_of(like))
    with os_error_as(f"cannot write in {out.parent}", code="BX3609", help="give another --out"):
        out.parent.mkdir(parents=True, exist_ok=True)
        scratch = new_folder(out)
    try:
        with os_error_as(f"cannot write {out}", code="BX3610", at=str(out), help=NO_ROOM):
            _fill(scratch, plan, texts, shipped, weights)
            if not bare:
                _copy_rooms(scratch, texts, bundle)
            elif check is not None:  # in one process, as a lean bundle
                others = _texts(plan, like, lean=True, bare=False)[0]
                (scratch / "train.py").write_text(others["train.py"], encoding="utf-8")
                _copy_rooms(scratch, others, bundle)
            if check is not None:
                check(scratch)
            if bare:
                _write_bare(scratch, texts)
            replace_folder(out, scratch)
    finally:
        shutil.rmtree(scratch, ignore_errors=True)
    return out


def _texts(
    plan: Plan, like: Path | None, lean: bool, bare: bool
) -> tuple[dict[str, str], Sequence[Path]]:
    """Return the bundle's own files, and what it takes along from beside the model file."""
    if like is not None:
        return bundle_texts(plan, like, lean=lean, bare=bare), shipped_like(like)
    own = users_code(plan)
    return bundle_texts(plan, own=own, lean=lean, bare=bare), own.files


def _check_devices(plan: Plan) -> None:
    """Refuse device names that would lead out of the bundle: a Cluster made in Python holds any.

    Raises:
        InputError: names the device.
    """
    for device in plan.stages.devices:
        if not device or set(device) & set("/\\\0") or device.startswith("."):
            raise InputError(
                f"device {device!r} cannot be the name of a file",
                code="BX3611",
                help="use letters, digits, '-' and '_' in device names",
            )


def _check_names(shipped: Sequence[Path], texts: Mapping[str, str]) -> None:
    """Refuse a module of the user's that would take the place of one of the bundle's.

    Raises:
        InputError: names the module.
    """
    ours = {
        *_copied(texts),
        "weights",
        *(Path(name).stem for name in texts if name.endswith(".py")),
    }
    for path in shipped:
        if path.stem in ours:
            raise InputError(
                f"the model file needs {path.name}, but a bundle has a {path.stem} of its own",
                code="BX3612",
                at=str(path),
                help=f"rename it: {', '.join(sorted(ours))} are taken",
            )


def _copied(texts: Mapping[str, str]) -> tuple[str, ...]:
    """Return the rooms of ours that a bundle takes along."""
    return ("runtime", "supervisor") if "launch.py" in texts else ("runtime",)


def _write_bare(folder: Path, texts: Mapping[str, str]) -> None:
    """Write the entry point and the runtime of a plain pipeline, in place of others."""
    own = [text for name, text in texts.items() if name.endswith(".py")]
    (folder / "train.py").write_text(texts["train.py"], encoding="utf-8")
    shutil.rmtree(folder / "runtime", ignore_errors=True)
    (folder / "runtime").mkdir()
    for name, text in bare_files(ROOMS / "runtime", own).items():
        (folder / "runtime" / name).write_text(text, encoding="utf-8")


def _copy_rooms(folder: Path, texts: Mapping[str, str], bundle: Copied) -> None:
    """Copy what the bundle's files need of the runtime, and of the supervisor."""
    own = [text for name, text in texts.items() if name.endswith(".py")]
    without = left_out(bundle, "runtime")
    asked = [file for file in UNIMPORTED["runtime"] if file not in without]
    files = {"runtime": runtime_files(ROOMS / "runtime", own, asked, without)}
    if bundle.supervised:
        without = left_out(bundle, "supervisor")
        files["supervisor"] = room_files(ROOMS / "supervisor", UNIMPORTED["supervisor"], without)
    for room, names in files.items():
        (folder / room).mkdir()
        for name in sorted(names):
            shutil.copyfile(ROOMS / room / name, folder / room / name)
    if bundle.supervised:
        text = supervisors_door(ROOMS / "supervisor")
        (folder / "supervisor" / "__init__.py").write_text(text, encoding="utf-8")
    text = door(ROOMS / "runtime", own, files["runtime"])
    (folder / "runtime" / "__init__.py").write_text(text, encoding="utf-8")


def _fill(
    folder: Path, plan: Plan, texts: Mapping[str, str], shipped: Sequence[Path], weights: Weights
) -> None:
    for name, text in texts.items():
        (folder / name).write_text(text, encoding="utf-8")
    (folder / "__init__.py").write_text(
        f'"""{plan.graph.name!r}, split by bigbrain-fx; see README.md."""\n'
    )
    (folder / "plan.json").write_bytes(to_json(plan))
    if plan.stages.micros:
        (folder / "buckets.json").write_text(buckets_json(plan), encoding="utf-8")
    forecast = timeline(plan)
    (folder / "timeline.json").write_text(json.dumps(chrome_trace(forecast)) + "\n")
    (folder / "report.html").write_text(report(plan, forecast=forecast), encoding="utf-8")
    for path in shipped:
        if path.is_dir():
            shutil.copytree(path, folder / path.name, ignore=shutil.ignore_patterns("__pycache__"))
        else:
            shutil.copyfile(path, folder / path.name)
        if path == source_file(plan):
            _free_of_marks(folder / path.name)
    (folder / "weights").mkdir()
    weights.write_weights(folder / "weights", weight_files(plan))
    cut_weights(folder / "weights", plan)
    write_index(folder / "weights", weight_index(plan) if plan.mode == "train" else {})
    if not (plan.source.has_batches or plan.graph.is_opaque_step):
        weights.write_batch(folder / "example.safetensors")


def _free_of_marks(file: Path) -> None:
    """Let a model file that marks leaves run where bigbrain-fx is not installed."""
    with tokenize.open(file) as read:
        text, encoding = read.read(), read.encoding
    free = without_marks(text) if "bigbrain_fx" in text else text
    if free != text:
        file.write_text(free, encoding=encoding)


def cut_weights(folder: Path, plan: Plan) -> None:
    """Leave in each device's file its own parts of tensors, where groups divide them."""
    for stage in plan.stages.stages if plan.placement.tensor else ():
        if stage == plan.stages.of(stage.device)[0]:
            own = [s for s in plan.sharded.shards if s.member == stage.member]
            cut_file(folder / f"{stage.device}.safetensors", own)

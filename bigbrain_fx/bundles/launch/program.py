"""The program of a bundle: its name, its arguments, who reports, and what it leaves behind."""

from __future__ import annotations

import ast
import json
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from bigbrain_fx.bundles.launch.options import RunOptions
from bigbrain_fx.core import words
from bigbrain_fx.errors import InputError
from bigbrain_fx.plan import Plan

_PATHS = words("save first_gradients inputs outputs commits store")
_PLAIN = words("commit_every keep on_nan")
OBSERVER = Path(__file__).with_name("observer.py")


def entry(plan: Plan) -> str:
    """Return the name of a bundle's program."""
    return "train.py" if plan.mode == "train" else "infer.py"


def require_program(bundle: Path, plan: Plan) -> None:
    """Refuse a bundle without its program, or with a file that is no Python.

    Raises:
        InputError: the file and the line.
    """
    if not (bundle / entry(plan)).is_file():
        raise InputError(
            f"{bundle} is not a bundle: it has no {entry(plan)}",
            code="BX3056",
            help="make one with `bigbrain-fx split`",
        )
    for file in sorted(bundle.glob("*.py")):
        try:
            ast.parse(file.read_bytes(), str(file))
        except (SyntaxError, ValueError, RecursionError) as error:
            line = f":{error.lineno}" if isinstance(error, SyntaxError) and error.lineno else ""
            raise InputError(
                f"{file.name} cannot be imported: {error}",
                code="BX3057",
                at=f"{file}{line}",
                help="undo what was edited, copy the bundle again, or split again",
            ) from error


def reporter(plan: Plan) -> str:
    """Return the device that reports: it makes the loss, or collects the outputs."""
    if plan.mode == "eval":
        return plan.stages.stages[-1].device
    for stage in plan.stages.stages:
        if plan.graph.loss in stage.ops:
            return stage.device
    raise InputError(
        f"{plan.graph.name} has no loss to train on",
        code="BX3059",
        help="add `loss(output, batch)` to the model file, or split it with --mode eval",
    )


NOTES = "notes"  # the folder in that of the logs for what `observer` notes


def command_of(plan: Plan, options: RunOptions, logs: Path) -> tuple[str, ...]:
    """Return what starts the program of a device; a run with a trace has its observer in front."""
    observed = (str(OBSERVER), str(logs.resolve() / NOTES)) if options.trace is not None else ()
    return (sys.executable, *observed, entry(plan))


def arguments(options: RunOptions, logs: Path) -> Sequence[str]:
    """Return what a bundle's program is given; it writes its report to `logs`."""
    paths = {name: getattr(options, name) for name in _PATHS}
    here = replace(options, **{name: path and path.resolve() for name, path in paths.items()})
    given = here.flags("steps", "seed", "deadline_s", "threads", *_PATHS, *_PLAIN)
    given += transport_of(options)
    return [*given, "--report", str(logs.resolve()), *(["--resume"] if options.resume else [])]


def transport_of(options: RunOptions) -> list[str]:
    """Return what tells a bundle's program over what messages go."""
    return [] if options.backend is None else ["--transport", options.backend]


def peaks(plan: Plan, logs: Path) -> dict[str, int]:
    """Return the largest resident memory of each device's process, in bytes, if it reported it."""
    return _reported(plan, logs, "max_rss_bytes")


def allocated(plan: Plan, logs: Path) -> dict[str, int]:
    """Return the most that tensors took of each GPU, in bytes; other devices are left out."""
    return _reported(plan, logs, "max_allocated_bytes")


def _reported(plan: Plan, logs: Path, what: str) -> dict[str, int]:
    found = {}
    for name in plan.stages.devices:
        try:
            report = json.loads((logs / f"{name}.json").read_text())
        except (
            OSError,
            ValueError,
            RecursionError,
        ):  # a full disk, or somebody has removed the logs
            continue
        if what in report:
            found[name] = report[what]
    return found

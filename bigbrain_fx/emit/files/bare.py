"""The runtime of a bundle of `split --bare`: the files of a plain pipeline, and nothing else.

The files are those that other bundles are built on, too. Only `runtime/__init__.py` is written for
the bundle: it names what the bundle's own files import.
"""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

from bigbrain_fx.emit.files.copied import ROOM, imported_names, imports_of, room_files
from bigbrain_fx.emit.files.parts import beyond_bare
from bigbrain_fx.errors import InputError
from bigbrain_fx.plan import Plan

HOMES = {  # name in a bundle's files -> the file of the runtime that has it, and its name there
    "BatchError": ("stream", "BatchError"),
    "Bundle": ("pipeline", "Pipeline"),
    "Channel": ("channel", "Channel"),
    "Device": ("pipeline_device", "PipelineDevice"),
    "OptimizerGroups": ("optimizer_groups", "OptimizerGroups"),
    "Region": ("modules", "Region"),
    "Stage": ("modules", "Stage"),
    "Tensors": ("modules", "Tensors"),
    "Training": ("recipe", "Training"),
    "adamw": ("recipe", "adamw"),
    "buffer": ("modules", "buffer"),
    "example_batches": ("example_data", "example_batches"),
    "main": ("pipeline", "main"),
    "marking": ("marks", "marking"),
    "parameter": ("modules", "parameter"),
}
FILE = "pipeline.py"  # that only the runtime of such a bundle has
_DOOR = '"""What this bundle runs on: a plain pipeline over torch.distributed; see `pipeline`."""'


def is_bare(bundle: Path) -> bool:
    """Whether a bundle was written by `split --bare`."""
    return (bundle / ROOM / FILE).is_file()


def require_plain(plan: Plan) -> None:
    """Refuse a plan that needs more than the plain pipeline.

    Raises:
        InputError: names the feature.
    """
    feature = beyond_bare(plan) if plan.mode == "train" else "inference"
    if feature is not None:
        raise InputError(
            f"--bare writes a plain pipeline, and this plan has {feature}",
            code="BX3697",
            help="split with --lean, which has it, in place of --bare",
        )


def bare_files(runtime: Path, texts: Iterable[str]) -> dict[str, str]:
    """Return the text of each file of the runtime that a bundle needs, by file name.

    Args:
        runtime: the folder.
        texts: the bundle's own Python.

    Raises:
        InputError: a text imports what the plain pipeline has not: code of the user's own.
    """
    names = sorted({name for text in texts for name in imported_names(text)})
    lacking = [name for name in names if name not in HOMES]
    if lacking:
        raise InputError(
            f"--bare writes a plain pipeline, and stages call {lacking[0]} of the runtime",
            code="BX3698",
            help="split with --lean, which has it, in place of --bare",
        )
    files = room_files(runtime, (HOMES[name][0] for name in names), door=False)
    found = {name: (runtime / name).read_text(encoding="utf-8") for name in sorted(files)}
    door = "\n".join([_DOOR, "", *imports_of(names, HOMES)]) + "\n"
    return {"__init__.py": door, **found}

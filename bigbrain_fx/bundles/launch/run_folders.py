"""Folders of a run's logs without --logs: a numbered folder in the bundle, of the last few runs.

    bundle/runs/1, bundle/runs/2, ...

A bundle that takes no folder, or that lives as long as this process only, has them in the folder of
temporary files.
"""

from __future__ import annotations

import tempfile
from contextlib import suppress
from pathlib import Path
from shutil import rmtree

from bigbrain_fx.bundles.launch.status import RUNS, TEMPORARY, read_status
from bigbrain_fx.errors import InputError
from bigbrain_fx.weights import is_scratch

KEPT_RUNS = 5  # older ones that have ended are removed as the next one begins


def run_folder(bundle: Path) -> Path:
    """Make the folder for the logs of a run of a bundle.

    Raises:
        OSError: neither the bundle nor the folder of temporary files takes one.
    """
    if (bundle / "plan.json").is_file() and not is_scratch(bundle):
        with suppress(OSError):
            return _numbered(bundle.absolute() / RUNS)
    return Path(tempfile.mkdtemp(prefix=TEMPORARY))


def _numbered(runs: Path) -> Path:
    runs.mkdir(exist_ok=True)
    _remove_old(runs)
    number = max(_by_number(runs), default=0) + 1
    while True:
        folder = runs / str(number)
        with suppress(FileExistsError):  # another run was faster
            folder.mkdir()
            return folder
        number += 1


def _by_number(runs: Path) -> dict[int, Path]:
    """Return the folders of runs by their numbers; whatever else is there is the user's."""
    return {int(path.name): path for path in runs.iterdir() if path.name.isdecimal()}


def _remove_old(runs: Path) -> None:
    """Remove the logs of ended runs, so that with the next one `KEPT_RUNS` are there."""
    found = _by_number(runs)
    for number in sorted(found)[: 1 - KEPT_RUNS]:
        if _has_ended(found[number]):
            rmtree(found[number], ignore_errors=True)


def _has_ended(folder: Path) -> bool:
    """Whether a run has ended; one without a status may be beginning."""
    try:
        return read_status(folder).has_ended
    except InputError:
        return False

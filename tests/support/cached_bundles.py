"""What many tests need, made once in a run of tests: bundles, and the graphs of models/.

It is found by the hash of what made it: the text of the model file, the devices and the options.
The product does not change while its tests run.
"""

from __future__ import annotations

import fcntl
import hashlib
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import bigbrain_fx
from bigbrain_fx.core import Cluster
from bigbrain_fx.plan import Options

FOLDER = "BIGBRAIN_TESTS_BUNDLES"  # names a folder that all processes of a run share


class Wanted(NamedTuple):
    """A model file, by name and text, and how it is split."""

    name: str
    text: str
    devices: Cluster
    options: Options
    extras: tuple[str, ...] = ()


def once(key: object, fill: Callable[[Path], object]) -> Path | None:
    """Return the folder that `fill` has filled for this key, once a run; None outside of a run."""
    if FOLDER not in os.environ:
        return None
    digest = hashlib.sha256(repr(key).encode()).hexdigest()
    folder = Path(os.environ[FOLDER]) / digest
    folder.mkdir(parents=True, exist_ok=True)
    with (folder / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # another process of the run may be filling it
        if not (folder / "full").exists():
            fill(folder)
            (folder / "full").touch()
    return folder


def split_once(folder: Path, wanted: Wanted) -> Path:
    """Copy the bundle of a model file into a folder; its plan names the file that was split."""
    common = once(wanted, lambda empty: split(empty, wanted))
    if common is None:
        return split(folder, wanted)
    return shutil.copytree(common / "bundle", folder / "bundle")


def split(folder: Path, wanted: Wanted) -> Path:
    """Write a model file into a folder and split it there, into `bundle`."""
    file, bundle = folder / wanted.name, folder / "bundle"
    file.write_text(wanted.text)
    options, extras = wanted.options, wanted.extras
    return bigbrain_fx.split(file, wanted.devices, bundle, options, extras=extras).bundle

"""Bundles that many tests need, each split once in a run of tests and copied from then on.

A bundle is found by the hash of what made it: the text of the model file, the devices and the
options. The product does not change while its tests run.
"""

from __future__ import annotations

import fcntl
import hashlib
import os
import shutil
from pathlib import Path

import bigbrain_fx
from bigbrain_fx.core import Cluster
from bigbrain_fx.plan import Options

FOLDER = "BIGBRAIN_TESTS_BUNDLES"  # names a folder that all processes of a run share


def split_once(
    folder: Path,
    name: str,
    text: str,
    devices: Cluster,
    options: Options,
    extras: tuple[str, ...] = (),
) -> Path:
    """Copy the bundle of a model file into a folder; its plan names the file that was split."""
    if FOLDER not in os.environ:
        return split(folder, name, text, devices, options, extras)
    made = hashlib.sha256(repr((name, text, devices, options, extras)).encode()).hexdigest()
    kept = Path(os.environ[FOLDER]) / made
    kept.mkdir(parents=True, exist_ok=True)
    with (kept / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # another process of the run may be splitting it
        if not (kept / "bundle").is_dir():
            split(kept, name, text, devices, options, extras)
    return shutil.copytree(kept / "bundle", folder / "bundle")


def split(
    folder: Path,
    name: str,
    text: str,
    devices: Cluster,
    options: Options,
    extras: tuple[str, ...] = (),
) -> Path:
    """Write a model file into a folder and split it there, into `bundle`."""
    (folder / name).write_text(text)
    made = bigbrain_fx.split(folder / name, devices, folder / "bundle", options, extras=extras)
    return made.bundle

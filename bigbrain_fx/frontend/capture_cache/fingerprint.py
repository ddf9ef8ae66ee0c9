"""Key of a capture: it changes with the model, the file, the version and the machine.

    the built model with its numbers, the example, the first three batches  by value
    other names that the file defines                                       by value
    Python files that it loaded, but for those of installed packages        by their text
    installed packages; our own files                                       by version; by time
    working folder, threads, options and environment                        by value

The file was run and the model built before, in this process: data that both read is in their
values. Data that the user's code reads only in later calls is not seen.
"""

from __future__ import annotations

import hashlib
import json
import os
import sys
from collections.abc import Iterator, Mapping
from dataclasses import fields
from functools import partial
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from bigbrain_fx.frontend.digests import digest
from bigbrain_fx.frontend.forked import is_of
from bigbrain_fx.frontend.tracing.state.python_rng import random_state_kept
from bigbrain_fx.runtime import left_alone

if TYPE_CHECKING:
    from bigbrain_fx.frontend.modelfile import ModelFile

_FIRST = 3
_NOT_OF_A_CAPTURE = ("graph", "room")  # where it goes, and what may not be captured at all
_OURS = Path(__file__).resolve().parents[2]


def fingerprint(file: ModelFile, wanted: Mapping[str, object]) -> str:
    """Return a text of everything that the capture of a model file depends on.

    Args:
        file: as it was loaded.
        wanted: the options of the capture.
    """
    found = hashlib.blake2b(digest_size=20)
    for part in _parts(file, wanted):
        found.update(part.encode("utf-8", "surrogatepass") + b"\0")
    return found.hexdigest()


def content(path: Path) -> str:
    """Return a text of a file's bytes, or of all files in a folder and their names."""
    files = [path] if path.is_file() else sorted(each for each in path.rglob("*") if each.is_file())
    found = hashlib.blake2b(digest_size=20)
    for each in files:
        found.update(str(each.relative_to(path)).encode() + b"\0")
        with each.open("rb") as stream:
            found.update(hashlib.file_digest(stream, "sha256").digest())
    return found.hexdigest()


def options_text(wanted: Mapping[str, object]) -> str:
    """Return the options of a capture as text."""
    return json.dumps({k: v for k, v in sorted(wanted.items()) if k not in _NOT_OF_A_CAPTURE})


def _parts(file: ModelFile, wanted: Mapping[str, object]) -> Iterator[str]:
    yield options_text(wanted)
    yield f"{sys.version} {torch.__version__} {torch.get_num_threads()} {torch.cuda.is_available()}"
    yield os.getcwd()
    is_own = partial(is_of, folder=file.path.parent)
    yield digest({each.name: getattr(file, each.name) for each in fields(file)}, is_own)
    yield _first_batches(file, wanted)
    yield digest({name: module for name, module in _modules() if is_own(module)}, is_own)
    yield from _installed()
    yield from _files()


def _first_batches(file: ModelFile, wanted: Mapping[str, object]) -> str:
    """Return a text of the first batches: comparisons and constants of a trace depend on them."""
    if file.batches is None or not wanted.get("training"):
        return ""
    with random_state_kept(), left_alone(file.batches):
        try:
            return digest(list(islice(file.batches(int(str(wanted["seed"]))), _FIRST)))
        except Exception as error:  # whoever reads them for a run says what is wrong
            return f"{type(error).__name__}: {error}"


def _modules() -> list[tuple[str, object]]:
    return sorted(sys.modules.items())


def _files() -> Iterator[str]:
    """Yield a text for each Python file that the user's code loaded, and each of bigbrain_fx."""
    yield from (f"{path} {_marked(path)}" for path in sorted(_OURS.rglob("*.py")))
    for _, module in _modules():
        path = Path(str(getattr(module, "__file__", None) or ""))
        if path.is_file() and not _is_installed(path):
            yield f"{path} {content(path)}"


def _is_installed(path: Path) -> bool:
    """Whether a file belongs to Python, to an installed package, or to bigbrain_fx."""
    places = (_OURS, Path(sys.base_prefix), *_site_folders())
    return any(path.is_relative_to(place) for place in places)


def _site_folders() -> list[Path]:
    return [Path(entry) for entry in sys.path if entry.endswith("-packages")]


def _installed() -> Iterator[str]:
    """Yield the names of the installed packages, each with its version."""
    for folder in _site_folders():
        yield from sorted(path.name for path in folder.glob("*.dist-info"))


def _marked(path: Path) -> str:
    found = path.stat()
    return f"{found.st_size} {found.st_mtime_ns}"

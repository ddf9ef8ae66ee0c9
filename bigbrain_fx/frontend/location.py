"""Locations of models: "model.py", "model.py:name", "hf:path", "m.onnx". Imports no torch.

hf:path/to/config.json            a Hugging Face model, from its configuration alone
hf:path/to/folder?batch=4&seq=64  the folder with that file; rows and length of the example
path/to/m.onnx?batch=4&seq=64     an ONNX file; likewise for sizes that it leaves free
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from functools import partial
from pathlib import Path
from typing import Any, ClassVar, TypeVar
from urllib.parse import parse_qsl

from bigbrain_fx.errors import InputError

HF = "hf:"
Location = TypeVar("Location", bound="SizedLocation")
FLOATS = ("float32", "bfloat16", "float16")


@dataclass(frozen=True)
class SizedLocation:
    """A file with free sizes, and the sizes chosen for them.

    Attributes:
        path: the file, absolute.
        batch: rows of the example batch; None for the default.
        seq: tokens of a row, or any other free size; None for the default.
    """

    path: Path
    batch: int | None = None
    seq: int | None = None
    prefix: ClassVar[str] = ""

    @property
    def sizes(self) -> dict[str, object]:
        """Return the sizes that may be chosen, by the words of a location."""
        return {entry.name: getattr(self, entry.name) for entry in fields(self)[1:]}

    def __str__(self) -> str:
        words = [f"{key}={value}" for key, value in self.sizes.items() if value is not None]
        return f"{self.prefix}{self.path}" + (f"?{'&'.join(words)}" if words else "")


@dataclass(frozen=True)
class HfLocation(SizedLocation):
    """A Hugging Face configuration; `dtype` is of the weights, None the configuration's."""

    dtype: str | None = None
    prefix = HF


@dataclass(frozen=True)
class OnnxLocation(SizedLocation):
    """An ONNX file."""


def is_onnx(location: str | Path) -> bool:
    """Whether a location names an ONNX file."""
    return str(location).partition("?")[0].endswith(".onnx") and not is_hf(location)


def onnx_location(text: str) -> OnnxLocation:
    """Read "path/m.onnx?batch=4&seq=64".

    Raises:
        InputError: there is no such file, or a word after the question mark is unknown.
    """
    place, _, query = text.partition("?")
    if not Path(place).is_file():
        raise InputError(
            f"expected an ONNX file at {place}, found nothing",
            code="BX2060",
            at=place,
            help="give the path of an .onnx file, or of a model file",
        )
    words = dict(parse_qsl(query, keep_blank_values=True))
    return _chosen(OnnxLocation(Path(place).resolve()), words, text)


def is_hf(location: str | Path) -> bool:
    """Whether a location names a Hugging Face configuration."""
    return str(location).startswith(HF)


def resolved(
    location: str | Path, batch: int | None = None, seq: int | None = None, dtype: str | None = None
) -> tuple[Path, str]:
    """Return the file that a location names, and the location with an absolute path.

    Raises:
        InputError: there is no such file; or batch, seq and dtype are given for a model file, which
            defines them itself.
    """
    given = {k: v for k, v in (("batch", batch), ("seq", seq), ("dtype", dtype)) if v is not None}
    if is_hf(location) or is_onnx(location):
        read = hf_location if is_hf(location) else onnx_location
        words = {key: str(value) for key, value in given.items()}
        found = _chosen(read(str(location)), words, str(location))
        return found.path, str(found)
    if given:
        raise InputError(
            f"--{next(iter(given))} is for hf:config.json and ONNX files, "
            f"and {location} is a model file",
            code="BX2061",
            help="write it into example_batch() or model() of the model file",
        )
    path, name = split_location(location)
    return path, f"{path}:{name}" if name else str(path)


def hf_location(text: str) -> HfLocation:
    """Read "hf:path?batch=4&seq=64&dtype=float32".

    Raises:
        InputError: there is no config.json, or a word after the question mark is unknown.
    """
    place, _, query = text.removeprefix(HF).partition("?")
    words = dict(parse_qsl(query, keep_blank_values=True))
    return _chosen(HfLocation(_config(Path(place))), words, text)


def _chosen(found: Location, words: Mapping[str, str], at: str) -> Location:
    """Return a location with these words in place of its own."""
    for key, value in words.items():
        if key not in found.sizes:
            raise InputError(f"{key!r} is none of {', '.join(found.sizes)}", code="BX2062", at=at)
        read = _float if key == "dtype" else partial(_number, key)
        chosen: dict[str, Any] = {key: read(value, at)}
        found = replace(found, **chosen)
    return found


def _number(key: str, value: str, at: str) -> int:
    if value.isdecimal() and int(value) > 0:
        return int(value)
    raise InputError(
        f"expected {key} to be a number above 0, found {value!r}", code="BX2063", at=at
    )


def _float(value: str, at: str) -> str:
    if value in FLOATS:
        return value
    raise InputError(
        f"expected dtype to be one of {', '.join(FLOATS)}, found {value!r}", code="BX2064", at=at
    )


def _config(place: Path) -> Path:
    path = place / "config.json" if place.is_dir() else place
    if not path.is_file():
        raise InputError(
            f"expected a Hugging Face configuration at {path}, found nothing",
            code="BX2065",
            at=str(place),
            notes=("models are not downloaded: this is a path on this machine",),
            help="give a config.json, or a folder that has one: hf:path/to/config.json",
        )
    return path.resolve()


def split_location(location: str | Path) -> tuple[Path, str | None]:
    """Return the model file, resolved, and the name behind the colon (None without one).

    Raises:
        InputError: there is no such file, it is no Python, or the name is no Python name.
    """
    text = str(location)
    head, colon, tail = text.rpartition(":")
    path, name = (Path(head), tail) if colon and head.endswith(".py") else (Path(text), None)
    if name is not None and not name.isidentifier():
        raise InputError(
            f"expected a Python name after the colon, found {name!r}",
            code="BX2066",
            at=text,
            help=f"write {path.name}:model",
        )
    if not path.is_file():
        found = "a folder" if path.is_dir() else "nothing"
        beside = (
            sorted(entry.name for entry in path.parent.glob("*.py"))[:8]
            if path.parent.is_dir()
            else []
        )
        raise InputError(
            f"expected a model file at {path}, found {found}",
            code="BX2067",
            at=str(path),
            notes=(f"Python files there: {', '.join(beside)}",) if beside else (),
            help=_as_hf(path)
            or "give the path of a Python file that defines model() and example_batch()",
        )
    if path.suffix != ".py":
        raise InputError(
            f"expected a model file that ends in .py or .onnx, found {path.name}",
            code="BX2068",
            at=text,
            help=_as_hf(path) or "give a Python file that defines model() and example_batch()",
        )
    return _traceable(path.resolve()), name


def _traceable(path: Path) -> Path:
    """Require a path that torch.export can write into its stack traces and read again."""
    folder = os.fsencode(path)
    if b"\n" not in folder and os.fsdecode(folder).encode(errors="replace") == folder:
        return path
    what = "has a line break" if b"\n" in folder else "is not UTF-8"
    raise InputError(
        f"the model file's full path {what}, and torch.export reads it in stack traces",
        code="BX2069",
        at=str(path).replace("\n", "\\n"),
        help="copy the model file and what it imports into another folder, and split it there",
    )


def _as_hf(path: Path) -> str | None:
    """Return how to name the Hugging Face model that a path is a part of, if it is one."""
    folder = path if path.is_dir() else path.parent
    if not (folder / "config.json").is_file():
        return None
    place = path if path.name == "config.json" else folder
    weights = path.suffix in (".safetensors", ".bin", ".pt") or path.name.endswith(".index.json")
    with_weights = f", and its weights by `split --weights {folder}`" if weights else ""
    return f"a Hugging Face configuration is named by hf:{place}{with_weights}"

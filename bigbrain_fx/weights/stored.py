"""Position of a tensor in a safetensors file, by the file's header, which is JSON.

This file reads headers only; it knows no models. Format: github.com/huggingface/safetensors.
"""

from __future__ import annotations

import json
import math
import stat
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from bigbrain_fx.core import DTYPE_BYTES, once, words
from bigbrain_fx.errors import InputError

HEADER_LIMIT = 100_000_000  # bytes; the format's own limit

_NAMES = words(
    """
    F64 float64 F32 float32 F16 float16 BF16 bfloat16 F8_E4M3 float8_e4m3fn F8_E5M2 float8_e5m2
    C64 complex64 I64 int64 I32 int32 I16 int16 I8 int8 U64 uint64 U32 uint32 U16 uint16 U8 uint8
    BOOL bool
    """
)
DTYPES: Mapping[str, tuple[str, int]] = {
    code: (name, DTYPE_BYTES[name]) for code, name in zip(_NAMES[::2], _NAMES[1::2], strict=True)
}
"""safetensors' name -> torch's name, bytes of one element."""
CODES: Mapping[str, str] = {name: code for code, (name, _) in DTYPES.items()}


@dataclass(frozen=True, slots=True)
class Stored:
    """One tensor in a file: its element type by torch's name, and where its bytes are."""

    file: Path
    key: str
    dtype: str
    shape: tuple[int, ...]
    start: int

    @property
    def size(self) -> int:
        """How many bytes it has."""
        return size_of(self.shape, self.dtype)


def size_of(shape: tuple[int, ...], dtype: str) -> int:
    """Return the bytes of a tensor."""
    return math.prod(shape) * DTYPES[CODES[dtype]][1]


def require_regular(path: Path) -> None:
    """Refuse what is no file with bytes in it: opening a pipe would wait for ever.

    Raises:
        OSError: it is not there, or no regular file.
    """
    if not stat.S_ISREG(path.stat().st_mode):
        raise OSError(None, "it is no regular file", str(path))


def read_json(path: Path) -> Any:  # noqa: ANN401  # whatever it holds
    """Read a JSON file.

    Raises:
        OSError: it cannot be read, or is no regular file.
        ValueError: it is no JSON.
    """
    require_regular(path)
    try:
        return json.loads(path.read_text(encoding="utf-8"), object_pairs_hook=once)
    except RecursionError as error:
        raise ValueError("it is nested too deeply") from error


def read_header(path: Path) -> dict[str, Stored]:
    """Return the tensors of a safetensors file by name, in the order of the file.

    Raises:
        InputError: it cannot be read, or is no whole safetensors file.
    """
    try:
        require_regular(path)
        with path.open("rb") as file:
            length = int.from_bytes(file.read(8), "little")
            if length > HEADER_LIMIT:
                raise _broken(path, f"its header claims {length} bytes", code="BX3738")
            text = file.read(length)
        total = path.stat().st_size
        entries = json.loads(text)
    except OSError as error:
        raise InputError(
            f"cannot read {path}: {error.strerror or error}", code="BX3739", help="look at the path"
        ) from error
    except (ValueError, RecursionError) as error:
        raise _broken(path, "its header is no JSON", code="BX3740") from error
    if not isinstance(entries, dict):
        raise _broken(path, "its header is no JSON object", code="BX3741")
    entries.pop("__metadata__", None)
    return {key: _stored(path, key, entry, 8 + length, total) for key, entry in entries.items()}


def facts_of(path: Path) -> str:
    """Return what a file of `--save` says of the run that it is of; nothing if it says nothing."""
    with path.open("rb") as file:
        length = int.from_bytes(file.read(8), "little")
        entries = json.loads(file.read(min(length, HEADER_LIMIT)))
    try:
        facts = json.loads(entries["__metadata__"]["facts"])
        told = f"--steps {int(facts['steps'])}, seed {int(facts['seed'])}"
        return f"{told}, numbers {facts['contents']:012x}" if "contents" in facts else told
    except (KeyError, TypeError, ValueError):  # another program's, or of an older bundle
        return ""


def _stored(path: Path, key: str, entry: object, base: int, total: int) -> Stored:
    try:
        code, shape, (start, end) = entry["dtype"], entry["shape"], entry["data_offsets"]  # type: ignore[index]
        dtype, width = DTYPES[code]
        found = Stored(path, key, dtype, tuple(int(n) for n in shape), base + int(start))
        is_whole = end - start == math.prod(found.shape) * width and start >= 0
        is_whole = is_whole and base + end <= total and all(n >= 0 for n in found.shape)
    except (KeyError, TypeError, ValueError) as error:
        raise _broken(path, f"its entry {key!r} cannot be read", code="BX3742") from error
    if not is_whole:
        raise _broken(path, f"the bytes of {key!r} are not all there", code="BX3743")
    return found


def _broken(path: Path, why: str, *, code: str) -> InputError:
    return InputError(
        f"{path.name} is no whole safetensors file: {why}",
        code=code,
        at=str(path),
        help="copy or download it again; .bin and .pt files: save them with safetensors first",
    )

"""A device's own tensors, from its file in weights/ or straight from the checkpoint it refers to.

    weights/index.json   "owner": who answers for each trained parameter, in the model's order
                         "checksums": of each tensor that was written here, by its name

Nothing else is read: a process never holds the tensors of other devices. Each tensor is compared
with its checksum: a flipped bit of a weight would show nowhere else.
"""

from __future__ import annotations

import json
from collections import deque
from collections.abc import Iterator, Mapping
from concurrent.futures import Executor, Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open
from torch import Tensor

from .checksum import checksum
from .disk import read_regular, require_regular
from .json_once import once
from .modules import AGAIN, HeldWeights, WeightsError

BY_REFERENCE = (
    "--weights-by-reference; put the checkpoint back, or put one into the bundle with "
    "`bigbrain-fx load`"
)
CHECKED_BEHIND = 2  # tensors that are read and not yet checked
COPY = "copy the bundle again"  # `load` takes what no checkpoint has from the file that is there
IN_UNICODE = "its name is not UTF-8, and safetensors takes no other: move the bundle elsewhere"


@dataclass(frozen=True)
class Index:
    """Contents of weights/index.json; of a bundle that is older than checksums, None of them."""

    owner: Mapping[str, str]
    checksums: Mapping[str, str] | None


def read_index(folder: Path) -> Index:
    """Read the index of a weights/ folder; one that is not there says nothing.

    Raises:
        WeightsError: it cannot be read.
    """
    path = folder / "index.json"
    if not path.exists():
        return Index({}, None)
    found = _json(path)
    if set(found) == {"owner", "checksums"} and isinstance(found["owner"], dict):
        return Index(_texts(found["owner"], path), _texts(found["checksums"], path))
    return Index(_texts(found, path), None)


def _json(path: Path) -> dict[str, Any]:
    try:
        found = json.loads(read_regular(path), object_pairs_hook=once)
    except (OSError, ValueError, RecursionError) as error:
        raise WeightsError(
            f"{path} cannot be read ({_why(error)}): {AGAIN}", code="BX5175"
        ) from error
    if not isinstance(found, dict):
        raise WeightsError(f"{path} is no JSON object: {AGAIN}", code="BX5176")
    return found


def _whole(key: str) -> str:
    """Return the model's name for a tensor, or for one of which a part is stored."""
    name, bracket, member = key.removesuffix("]").rpartition("[")
    return name if bracket and key.endswith("]") and member.isdecimal() else key


def _texts(found: object, path: Path) -> dict[str, str]:
    if not isinstance(found, dict) or not all(isinstance(text, str) for text in found.values()):
        raise WeightsError(f"{path} is not as it was written: {AGAIN}", code="BX5177")
    return found


def _why(error: Exception) -> str:
    return str(getattr(error, "strerror", None) or error).splitlines()[0][:200]


class OwnWeights(Mapping[str, Tensor]):
    """The tensors of one device by the model's names; each is read when it is asked for.

    A tensor lies in `weights/<device>.safetensors`, or `weights/<device>.references.json` says in
    which file of the user's checkpoint it is, and under which key.

    Args:
        folder: weights/ of a bundle.
        device: whose they are.
        pool: checks tensors while the next are read; see `checked_weights`. None: at once.

    Raises:
        WeightsError: a file cannot be read; and when a tensor is read, that it is not as written.
    """

    def __init__(self, folder: Path, device: str, pool: Executor | None = None) -> None:
        self.pool = pool
        self.checks: deque[Future[None]] = deque()
        self.own = folder / f"{device}.safetensors"
        if not (folder / "index.json").exists():
            raise WeightsError(f"{folder / 'index.json'} is missing: {COPY}", code="BX5178")
        self.checksums = read_index(folder).checksums
        with _opened(self.own, COPY) as file:
            keys = list(file.keys())  # a name may look like a part's
        self._places = {_whole(key): (self.own, key) for key in keys}
        self._places.update({key: (self.own, key) for key in keys if key not in self._places})
        references = folder / f"{device}.references.json"
        if references.exists():
            self._places.update(_referred(references))

    def __getitem__(self, name: str) -> Tensor:
        if name not in self._places:
            raise WeightsError(f"{self.own} has no tensor {name!r}: {AGAIN}", code="BX5179")
        path, key = self._places[name]
        is_own = path == self.own
        found = _read(path, key, COPY if is_own else f"{name} was left there by {BY_REFERENCE}")
        if self.pool is None:
            self._require_whole(name, found)
        else:
            self.settle(CHECKED_BEHIND)
            self.checks.append(self.pool.submit(self._require_whole, name, found))
        return found

    @property
    def divided(self) -> dict[str, str]:
        """Tensors of which there is a part only -> the name it is stored under, "NAME[MEMBER]"."""
        own = {name: key for name, (path, key) in self._places.items() if path == self.own}
        return {name: key for name, key in own.items() if name != key}

    def __contains__(self, name: object) -> bool:
        """Whether there is such a tensor; nothing is read."""
        return name in self._places

    def settle(self, behind: int = 0) -> None:
        """Wait until all that was read is checked, but for so many.

        Raises:
            WeightsError: a tensor is not as it was written.
        """
        while len(self.checks) > behind:
            self.checks.popleft().result()

    def _require_whole(self, name: str, found: Tensor) -> None:
        """Refuse a tensor that is not the one that was written."""
        path, key = self._places[name]
        is_own = path == self.own
        expected = (self.checksums or {}).get(key if is_own else name)
        if expected is None and (self.checksums is None or not is_own):
            return  # of an older bundle, or left in a checkpoint
        if expected is None or checksum(found) != expected:
            index = self.own.with_name("index.json")
            said = f"is {expected}" if expected else "is missing"
            raise WeightsError(
                f"{path}: tensor {name!r} is not as it was written (its checksum in {index} "
                f"{said}): {AGAIN}; that is also how to replace weights by hand",
                code="BX5180",
            )

    def __iter__(self) -> Iterator[str]:
        return iter(self._places)

    def __len__(self) -> int:
        return len(self._places)


@contextmanager
def checked_weights(folder: Path, device: str) -> Iterator[OwnWeights]:
    """Give a device's tensors; one is checked while the next is read, and all at the end.

    Raises:
        WeightsError: as `OwnWeights`.
    """
    with ThreadPoolExecutor(1, "weights") as pool:
        found = OwnWeights(folder, device, pool)
        yield found
        found.settle()


def _referred(listing: Path) -> dict[str, tuple[Path, str]]:
    """Return where the tensors are that a device reads from the user's checkpoint."""
    try:
        return {name: (Path(at["file"]), str(at["key"])) for name, at in _json(listing).items()}
    except (KeyError, TypeError) as error:
        raise WeightsError(
            f"{listing} names no file and key for each tensor: {AGAIN}", code="BX5181"
        ) from error


@contextmanager
def _opened(path: Path, remedy: str) -> Iterator[Any]:
    """Open a safetensors file; a name may lead to anything, and opening a pipe waits for ever."""
    try:
        require_regular(path)
        with safe_open(path, framework="pt") as file:
            yield file
    except (OSError, SafetensorError) as error:
        remedy = remedy if _is_unicode(path) else IN_UNICODE
        raise WeightsError(
            f"{path} cannot be read ({_why(error)}): {remedy}", code="BX5182"
        ) from error


def _is_unicode(path: Path) -> bool:
    """Whether safetensors can be told a path at all; Python can name any."""
    try:
        return bool(str(path).encode())
    except UnicodeEncodeError:
        return False


def _read(path: Path, key: str, remedy: str) -> Tensor:
    with _opened(path, remedy) as file:
        tensor: Tensor = file.get_tensor(key)
        return tensor


def require_owners(held: HeldWeights) -> None:
    """Refuse an index that names parameters not held by this device, or none at all.

    The index lacks parameters that no gradient reaches (used under `no_grad` only): nobody trains
    them.

    Raises:
        WeightsError: the index is such a one.
    """
    if held.untrained and not held.owner:
        raise WeightsError(
            f"weights/index.json: expected the owner of each trained parameter, as of "
            f"{min(held.untrained)!r}, found none: {AGAIN}",
            code="BX5045",
        )
    wrong = {n for n in held.owned_by(held.device) if held.parameter_of(n) not in held.parameters}
    if wrong:
        raise WeightsError(
            f"weights/index.json: {min(wrong)!r} has the owner {held.device}, "
            f"which holds none of that name: {AGAIN}",
            code="BX5046",
        )

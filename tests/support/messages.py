"""Errors in tests: assert the code, and hold the wording in one snapshot per test package.

    with refused("BX1203") as caught:            # an InputError with this code
        parse_cluster(text, "cluster.json")
    assert caught.value.at == "cluster.json:2"   # place and fields are the test's own business

    shows("BX3501", call("split", "model.py").err)       # a command's `error[BX3501]: ...`

The wording is compared with `tests/<package>/messages.json`. `pytest --update-messages` writes it
anew for the tests that run. An entry of it that its test no longer asserts fails the run, and is
named; `tests.support.message_plugin` does that. What differs from run to run is masked.
"""

from __future__ import annotations

import json
import re
import sys
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple, TypeVar, overload

import pytest

from bigbrain_fx.errors import InputError

ROOT = Path(__file__).resolve().parents[2]
FILE = "messages.json"
UPDATE = "--update-messages"
E = TypeVar("E", bound=BaseException)

_PART = r"/[^/\s:;,'\"()]+"  # of a path
_CHECKOUT = (  # before folders of temporary files, in one of which it may be
    (re.escape(sys.executable), "<python>"),
    (re.escape(str(ROOT)), "<root>"),
)
_MASKS = (
    (re.escape(tempfile.gettempdir()) + _PART, "<tmp>"),
    (r"\b0x[0-9a-f]{6,}\b", "<id>"),
    (r"\b(test_\w+\.py):\d+", r"\1:<line>"),  # a test's own lines move
)


class Entry(NamedTuple):
    """One assertion: in which package, which code, what words, and by which test."""

    package: str
    code: str
    text: str
    test: str


@dataclass
class Recorder:
    """What the tests of this process have asserted.

    Attributes:
        root: of the checkout.
        updates: nothing is compared: the snapshots are written anew.
        test: the node id of the test that runs.
        folders: of the session's temporary folders: a worker's own, and those of all workers.
    """

    root: Path = ROOT
    updates: bool = False
    test: str = ""
    folders: tuple[Path, ...] = ()
    asserted: set[Entry] = field(default_factory=set)
    _stored: dict[str, set[Entry]] = field(default_factory=dict)

    def stored(self, package: str) -> set[Entry]:
        """Return the snapshot of a package."""
        if package not in self._stored:
            self._stored[package] = read(self.root, package)
        return self._stored[package]

    def check(self, code: str, text: str) -> None:
        """Compare the wording of an error with the snapshot."""
        entry = Entry(package_of(self.test), code, text, name_of(self.test))
        self.asserted.add(entry)
        if self.updates or entry in self.stored(entry.package):
            return
        known = [each.text for each in self.stored(entry.package) if each.code == code]
        raise pytest.fail.Exception(
            f"the wording of {code} is not that of {entry.package}/{FILE}:\n\nfound:\n{text}\n\n"
            f"there, of this code:\n{'; '.join(known) or 'nothing'}\n\n"
            f"if it should be so: pytest {UPDATE} {entry.package}, and review `git diff`",
            pytrace=False,
        ) from None


recorder = Recorder()


@overload
def refused(
    code: str, *, words: bool = True, vary: tuple[str, ...] = ()
) -> AbstractContextManager[pytest.ExceptionInfo[InputError]]: ...


@overload
def refused(
    code: str, kind: type[E], *, words: bool = True, vary: tuple[str, ...] = ()
) -> AbstractContextManager[pytest.ExceptionInfo[E]]: ...


def refused(
    code: str,
    kind: type[BaseException] = InputError,
    *,
    words: bool = True,
    vary: tuple[str, ...] = (),
) -> AbstractContextManager[pytest.ExceptionInfo[BaseException]]:
    """Assert that an error is raised inside, of this kind and code, in the words of the snapshot.

    Args:
        code: of the error.
        kind: its class.
        words: whether the wording is compared; not for examples that are drawn anew in each run.
        vary: regular expressions of what differs from run to run.
    """
    return _refused(code, kind, words, vary)


@contextmanager
def _refused(
    code: str, kind: type[E], words: bool, vary: tuple[str, ...]
) -> Iterator[pytest.ExceptionInfo[E]]:
    with pytest.raises(kind) as caught:
        yield caught
    reports(code, caught.value, words=words, vary=vary)


def reports(
    code: str, error: BaseException | None, *, words: bool = True, vary: tuple[str, ...] = ()
) -> None:
    """Assert an error's code and wording."""
    found = getattr(error, "code", None)
    assert found == code, f"expected {code}, found {found}: {error}"
    if words:
        recorder.check(code, masked(_words(error), vary))


def _words(error: BaseException | None) -> str:
    """Return all that an error says; some leave what to do to who shows them."""
    said, help_ = str(error), getattr(error, "help", None)
    return said if not help_ or help_ in said else f"{said}\n  help: {help_}"


def shows(code: str, text: str, *, words: bool = True, vary: tuple[str, ...] = ()) -> None:
    """Assert that a command has printed an error with this code; from there on, its wording."""
    _, shown, said = text.partition(f"error[{code}]: ")
    assert shown, f"expected error[{code}], found: {text}"
    if words:
        recorder.check(code, masked(said.rstrip("\n"), vary))


def masked(text: str, vary: tuple[str, ...] = ()) -> str:
    """Return a text without what differs from run to run, and from machine to machine."""
    folders = ((re.escape(str(folder)) + _PART, "<tmp>") for folder in recorder.folders)
    for pattern, mask in (*_CHECKOUT, *folders, *((each, "<...>") for each in vary), *_MASKS):
        text = re.sub(pattern, mask, text)
    return text


# --------------------------------------------------------------------------- the files


def package_of(test: str) -> str:
    """Return the folder of a test's snapshot: tests/plan of tests/plan/tensor/test_a.py::test_b."""
    return "/".join(test.partition("::")[0].split("/")[:2])


def name_of(test: str) -> str:
    """Return a test's node id within its package."""
    return test.removeprefix(f"{package_of(test)}/")


def read(root: Path, package: str) -> set[Entry]:
    """Return the entries of a package's snapshot; none where there is no file."""
    path = root / package / FILE
    if not path.exists():
        return set()
    found: Mapping[str, list[dict[str, list[str]]]] = json.loads(path.read_text(encoding="utf-8"))
    return {
        Entry(package, code, "\n".join(each["text"]), test)
        for code, wordings in found.items()
        for each in wordings
        for test in each["tests"]
    }


def write(root: Path, package: str, entries: set[Entry]) -> None:
    """Write a package's snapshot: code -> wordings, each with the tests that assert it."""
    wordings: dict[str, dict[str, list[str]]] = {}
    for entry in sorted(entries):
        wordings.setdefault(entry.code, {}).setdefault(entry.text, []).append(entry.test)
    body = {
        code: [{"text": text.split("\n"), "tests": tests} for text, tests in found.items()]
        for code, found in wordings.items()
    }
    path = root / package / FILE
    if body:
        text = json.dumps(body, indent=1, ensure_ascii=False) + "\n"
        path.write_text(text, encoding="utf-8")
    else:
        path.unlink(missing_ok=True)

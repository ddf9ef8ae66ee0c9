"""Snapshots of messages: compared, written by one flag, and stale entries named; in two workers."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.support.messages import FILE, UPDATE, masked

ROOT = Path(__file__).resolve().parents[2]
CONFTEST = """
from pathlib import Path

import pytest

from tests.support.message_plugin import MessagesPlugin
from tests.support.messages import UPDATE, recorder


def pytest_addoption(parser):
    parser.addoption(UPDATE, action="store_true")


def pytest_configure(config):
    recorder.root = Path(__file__).parent
    recorder.updates = config.getoption(UPDATE)
    config.addinivalue_line("markers", "nightly: not each time")
    config.pluginmanager.register(MessagesPlugin(config))


@pytest.fixture
def shared(tmp_path_factory, request):  # by all workers
    own = tmp_path_factory.getbasetemp()
    return (own.parent if hasattr(request.config, "workerinput") else own) / "shared"
"""
FIRST = """
import pytest

from bigbrain_fx.errors import CaptureError, InputError
from tests.support.messages import refused, reports, shows


@pytest.mark.parametrize("name", ["a", "b"])
def test_refusal(name, tmp_path, shared):
    with refused("BX1001") as caught:
        raise InputError(f"no file {tmp_path}/{name}", code="BX1001", at=f"{shared}/x:1")
    assert caught.value.at == f"{shared}/x:1"


@pytest.mark.nightly
def test_other_kind():
    with refused("BX1002", CaptureError):
        raise CaptureError("it cannot be traced", code="BX1002", help="change it")
"""
SECOND = """
from bigbrain_fx.errors import InputError
from tests.support.messages import refused, reports, shows


def test_shown():
    shows("BX1003", "1 step\\nerror[BX1003]: it is over\\n  help: begin anew\\n")


def test_varies():
    with refused("BX1004", vary=(r"\\d+ s",)):
        raise InputError("took 17 s", code="BX1004")


def test_drawn():
    reports("BX1005", InputError("3 is not 4", code="BX1005"), words=False)
"""


@dataclass(frozen=True)
class Ran:
    """What a run of pytest came to."""

    code: int
    text: str


TWO = ("-n", "2", "--dist", "loadfile")


def run(folder: Path, *words: str) -> Ran:
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", *words]
    done = subprocess.run(
        [*command, "--import-mode=importlib"],
        cwd=folder,
        env={**os.environ, "PYTHONPATH": str(ROOT), "PYTHONDONTWRITEBYTECODE": "1"},
        capture_output=True,
        text=True,
        timeout=300,
    )
    return Ran(done.returncode, done.stdout + done.stderr)


@pytest.fixture(scope="module")
def checkout(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkout, before its tests have written a snapshot."""
    folder = tmp_path_factory.mktemp("checkout")
    package = folder / "checks" / "files"
    package.mkdir(parents=True)
    (folder / "conftest.py").write_text(CONFTEST)
    (folder / "pytest.ini").write_text("[pytest]\n")
    (package / "test_first.py").write_text(FIRST)
    (package / "test_second.py").write_text(SECOND)
    return folder


@pytest.fixture(scope="module")
def written(checkout: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The checkout with its snapshot."""
    folder = Path(shutil.copytree(checkout, tmp_path_factory.mktemp("written") / "checkout"))
    run(folder, UPDATE)
    return folder


@pytest.fixture
def folder(written: Path, tmp_path: Path) -> Path:
    """A copy of the checkout with its snapshot."""
    return Path(shutil.copytree(written, tmp_path / "copy"))


def snapshot(folder: Path) -> dict[str, list[dict[str, list[str]]]]:
    found: dict[str, list[dict[str, list[str]]]] = json.loads(
        (folder / "checks" / "files" / FILE).read_text()
    )
    return found


def edit(folder: Path, name: str, old: str, new: str) -> None:
    path = folder / "checks" / "files" / name
    text = path.read_text()
    assert old in text
    path.write_text(text.replace(old, new))


@pytest.mark.nightly
def test_two_workers_write_one_file(checkout: Path) -> None:
    folder, without, written = checkout, run(checkout, *TWO), run(checkout, *TWO, UPDATE)
    assert without.code == 1
    assert "the wording of BX1001 is not that of checks/files/messages.json" in without.text
    assert written.code == 0, written.text
    assert "checks/files: 5 added, 0 removed" in written.text
    found = snapshot(folder)
    assert list(found) == ["BX1001", "BX1002", "BX1003", "BX1004"]
    assert [each["text"] for each in found["BX1001"]] == [
        ["no file <tmp>/a", "  at: <tmp>/x:1"],
        ["no file <tmp>/b", "  at: <tmp>/x:1"],
    ]
    assert found["BX1001"][0]["tests"] == ["test_first.py::test_refusal[a]"]
    assert found["BX1003"][0]["text"] == ["it is over", "  help: begin anew"]
    assert found["BX1004"][0]["text"] == ["took <...>"]


def test_another_wording_and_another_code_fail(folder: Path) -> None:
    edit(folder, "test_second.py", "it is over", "it has ended")
    edit(folder, "test_second.py", 'code="BX1004")', 'code="BX1009")')
    failed = run(folder)
    assert failed.code == 1
    assert "it has ended" in failed.text
    assert "it is over" in failed.text
    assert "expected BX1004, found BX1009" in failed.text
    assert "2 failed" in failed.text


@pytest.mark.nightly
def test_entries_that_no_test_asserts_are_named(folder: Path) -> None:
    edit(folder, "test_first.py", 'refused("BX1002", CaptureError)', "pytest.raises(CaptureError)")
    edit(folder, "test_second.py", "test_varies", "test_renamed")
    edit(folder, "test_second.py", 'vary=(r"\\d+ s",)', "words=False")
    stale = run(folder, *TWO)
    assert stale.code == 1, stale.text
    about = "is asserted no more: BX1002 of checks/files/test_first.py::test_other_kind"
    assert about in stale.text
    gone = "has no test any more: BX1004 of checks/files/test_second.py::test_varies"
    assert gone in stale.text
    updated = run(folder, *TWO, UPDATE)
    assert "checks/files: 0 added, 2 removed" in updated.text
    assert list(snapshot(folder)) == ["BX1001", "BX1003"]


@pytest.mark.gate("keyword")
@pytest.mark.parametrize(
    "words",
    [
        ("checks/files/test_second.py",),
        ("checks/files/test_first.py::test_other_kind",),
        ("-m", "not nightly"),
        ("-k", "shown or varies"),
    ],
    ids=["file", "test", "marker", "keyword"],
)
def test_part_of_the_tests_leaves_other_entries(folder: Path, words: tuple[str, ...]) -> None:
    before = snapshot(folder)
    part = run(folder, *words, UPDATE)
    assert part.code == 0, part.text
    assert snapshot(folder) == before


def test_masks_hide_what_differs_from_run_to_run(tmp_path: Path) -> None:
    text = (
        f"{tmp_path}/a/b.py:3 by {sys.executable}, {ROOT}/docs, <f at 0x7f00deadbeef>, 12 s, "
        "test_a.py:14"
    )
    said = masked(text, (r"\d+ s",))
    assert said == "<tmp>/a/b.py:3 by <python>, <root>/docs, <f at <id>>, <...>, test_a.py:<line>"

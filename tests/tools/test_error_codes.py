"""Every error that a user can see has a code, and each code stands at one place."""

from __future__ import annotations

from pathlib import Path

import pytest

from tools import reference
from tools.error_codes import Codes, collected

ROOT = Path(__file__).resolve().parents[2]

ERRORS = """
class BigBrainError(Exception):
    def __init__(self, what, *, code=None): ...

class InputError(BigBrainError): ...

class OutdoneError(InputError):
    def __init__(self, least_s):
        super().__init__(f"takes {least_s} s", code="BX1001")
"""
FILE = """
WHY = "why {name}"

def refuse(what, *, code):
    return InputError(f"no file: {what}", code=code)

def first(name):
    raise InputError(f"found {name!r}, " "expected 'a'", code="BX1002")

def second(error):
    raise refuse("it is gone", code="BX1003") from error

def third(error):
    raise InputError(error.what, code=error.code)

def fourth():
    raise OutdoneError(3.0)

def fifth():
    print("error[BX1004]: this is printed\\n")

def sixth(error):
    raise InputError(WHY.format(name=3), code="BX1005a")

def branches(error):
    return error.code == "BX1002" or error.family == "BX1005"
"""


def checkout(folder: Path, text: str) -> Path:
    for name, content in (("errors.py", ERRORS), ("file.py", text)):
        path = folder / "bigbrain_fx" / name
        path.parent.mkdir(exist_ok=True)
        path.write_text(content)
    return folder


@pytest.fixture(scope="module")
def codes() -> Codes:
    return collected(ROOT)


def test_every_error_has_a_literal_code_of_its_own_and_comparisons_name_such(codes: Codes) -> None:
    assert (codes.uncoded, codes.repeated, codes.unknown) == ((), (), ())


def test_the_page_of_errors_is_that_of_the_code(codes: Codes) -> None:
    assert reference.ERRORS.read_text() == reference.errors_page(codes.sites), (
        "run `python -m tools.reference`"
    )


def test_every_package_has_codes(codes: Codes) -> None:
    found = {site.path.split("/")[1] for site in codes.sites if site.path.startswith("bigbrain")}
    rooms = {path.name for path in (ROOT / "bigbrain_fx").iterdir() if path.is_dir()}
    assert found >= rooms - {"core", "processes", "__pycache__"}


def test_sentences_are_those_of_the_places(tmp_path: Path) -> None:
    found = collected(checkout(tmp_path, FILE))
    assert (found.uncoded, found.repeated, found.unknown) == ((), (), ())
    assert [(site.code, site.text) for site in found.sites] == [
        ("BX1001", "takes {least_s} s"),
        ("BX1002", "found {name}, expected 'a'"),
        ("BX1003", "no file: it is gone"),
        ("BX1004", "this is printed"),
        ("BX1005a", "why {name}"),
    ]


def test_each_fault_is_found(tmp_path: Path) -> None:
    faults = {
        'raise InputError("none")\n': ("uncoded", "InputError(...) has no literal code"),
        'raise InputError("computed", code=f"BX{n}")\n': ("uncoded", "has no literal code"),
        'raise errors.InputError("none", help="it")\n': ("uncoded", "has no literal code"),
        'raise InputError("twice", code="BX1001")\n': ("repeated", "BX1001 stands elsewhere, too"),
        'if error.code == "BX1999": ...\n': ("unknown", "no error has the code BX1999"),
    }
    for number, (text, (kind, words)) in enumerate(faults.items()):
        folder = tmp_path / str(number)
        folder.mkdir()
        found = getattr(collected(checkout(folder, text)), kind)
        assert any(
            fault.startswith("bigbrain_fx/file.py:1: ") and words in fault for fault in found
        )

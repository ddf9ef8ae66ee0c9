"""The house: what it may not grow past, doors that hold, and a count that sees what it counts."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

from tools.house import House, counted, picture

ROOT = Path(__file__).resolve().parents[2]
MOST_NAMES = 18
MOST_LAYERS = 12


@pytest.fixture(scope="module")
def house() -> House:
    return counted(ROOT)


def test_a_newcomer_meets_few_names_and_layers(house: House) -> None:
    assert len(house.names) <= MOST_NAMES
    assert house.layers <= MOST_LAYERS


def test_rooms_are_entered_by_their_doors(house: House) -> None:
    assert house.side_entrances == ()


def test_no_files_go_round_in_circles(house: House) -> None:
    assert house.circles == ()


def test_every_room_has_its_tests_in_one_place(house: House) -> None:
    rooms = {path.name for path in (ROOT / "bigbrain_fx").iterdir() if path.is_dir()}
    without = rooms - {"__pycache__", "core", "emit"}
    assert without <= {path.name for path in (ROOT / "tests").iterdir()}
    assert not list((ROOT / "tests").glob("test_*.py"))


@pytest.fixture
def small(tmp_path: Path) -> Path:
    """A checkout with one fault of each kind."""
    files = {
        "bigbrain_fx/__init__.py": "",
        "bigbrain_fx/plan/__init__.py": "from .cut import cut\n",
        "bigbrain_fx/plan/cut.py": "class Room: ...\n\n\ndef cut():\n    return 1\n",
        "bigbrain_fx/plan/one.py": "from bigbrain_fx.plan.two import b\na = 1\n",
        "bigbrain_fx/plan/two.py": "def b():\n    from bigbrain_fx.plan.one import a\n",
        "bigbrain_fx/emit/__init__.py": "from bigbrain_fx.plan.cut import cut\n",
        "bigbrain_fx/emit/file.py": "from bigbrain_fx.plan import cut\n\n\nclass Room: ...\n",
        "partitioners/__init__.py": "from bigbrain_fx.plan import two\n",
        "estimators/__init__.py": "def f(x):\n    return " + " or ".join("x" * 22) + "\n",
        "pyproject.toml": '[[tool.importlinter.contracts]]\nid = "road"\nlayers = ["a", "b"]\n',
    }
    for name, text in files.items():
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return tmp_path


def test_each_fault_is_seen(small: Path) -> None:
    house = counted(small)
    assert house.names == ("emit", "plan")
    assert house.layers == 2
    assert house.defined_twice == ("Room",)
    assert house.branching == ("estimators:f",)
    assert house.circles == (("bigbrain_fx.plan.one", "bigbrain_fx.plan.two"),)
    assert house.side_entrances == (
        "bigbrain_fx.emit -> bigbrain_fx.plan.cut",
        "partitioners -> bigbrain_fx.plan.two",
    )


@pytest.mark.nightly
def test_the_picture_of_the_rooms_is_drawn_by_the_imports() -> None:
    text = (ROOT / "docs/explanation/architecture.md").read_text(encoding="utf-8")
    drawn = picture(ROOT)
    assert drawn in text, "python -m tools.house --picture docs/explanation/architecture.md"
    assert "    emit --> plan" in drawn
    assert not re.search(r"--> cli", drawn)


def test_every_file_of_text_says_its_encoding() -> None:
    """Else a locale decides how the product's own files are read."""
    ruff = [sys.executable, "-m", "ruff", "check", "--preview", "--select", "PLW1514"]
    done = subprocess.run([*ruff, str(ROOT / "bigbrain_fx")], capture_output=True, text=True)
    assert done.returncode == 0, done.stdout

"""Nothing that decides in a run reads the wall clock, which may be set back; nor a file's times."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2] / "bigbrain_fx"
ROOMS = ("runtime", "supervisor", "bundles/launch")
CLOCKS = {"time": {"time", "time_ns"}, "datetime": {"now", "utcnow", "today"}}
TIMES = {"st_mtime", "st_mtime_ns", "st_ctime", "st_ctime_ns", "getmtime", "getctime"}
SAID = {  # what is only told: in an event, beside a status, in a trace
    "supervisor/events.py",
    "bundles/launch/status.py",
    "bundles/launch/tracing.py",
}


def wall_clock(text: str) -> Iterator[int]:
    """Yield the lines that read it: `time.time()`, `from time import time`, a file's times."""
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Attribute):
            owner = node.value.id if isinstance(node.value, ast.Name) else ""
            if node.attr in TIMES | CLOCKS.get(owner, set()):
                yield node.lineno
        if isinstance(node, ast.ImportFrom):
            named = {*CLOCKS.get(str(node.module), ()), "datetime"}
            yield from (node.lineno for name in node.names if name.name in named)


def test_the_wall_clock_is_only_told() -> None:
    files = [path for room in ROOMS for path in sorted((ROOT / room).rglob("*.py"))]
    found = {str(path.relative_to(ROOT)) for path in files if any(wall_clock(path.read_text()))}
    assert found == SAID


def test_a_clock_that_jumps_would_be_found() -> None:
    for text in (
        "import time\nif time.time() > 1: pass",
        "from time import time",
        "p.stat().st_mtime",
        "from datetime import datetime",
    ):
        assert [*wall_clock(text)], text
    assert not [
        *wall_clock("import time\ntime.monotonic()\nself.now()\nfrom datetime import timedelta")
    ]

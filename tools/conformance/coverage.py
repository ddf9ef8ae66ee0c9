"""Coverage: every model of the zoo captured, split over unlike devices, trained and compared.

    python -m tools.conformance coverage [--case NAME ...] [--fast | --capture] [--resume FILE]

For every case: capture, split on 2 and on 3 CPU devices with the presets naive and analytical,
train each bundle for two steps (real processes over gloo; `--fast`: all devices in one process),
and compare module, graph, reference and bundle bit for bit. A case runs in a process of its own
under a deadline. Statuses:

    verified   everything is equal in every split
    refused    an error that names the user's line and says what to do
    failed     anything else
    captured   with `--capture`, which stops there: what a capture takes on a quiet machine

Capture time leaves out the import of torch, transformers and diffusers, and building the model.
"""

from __future__ import annotations

import gc
import importlib
import json
import multiprocessing
import statistics
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from dataclasses import asdict, dataclass, field
from functools import partial
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, Literal

import click
from rich.console import Console
from rich.table import Table

from tools.conformance.zoo import FAMILIES, Case, cases, find

DEADLINE_S = 300.0
Depth = Literal["whole", "fast", "capture"]
IMPORTED = ("torch", "torch._dynamo", "torch.export", "networkx", "transformers", "diffusers")


@dataclass(frozen=True)
class Row:
    """Outcome of a case.

    Attributes:
        status: verified, refused or failed.
        expected: whether that is what the zoo says of the case.
        ops: in the captured graph.
        capture_s: seconds to capture the model once it is built.
        lines: of the longest device file of all splits.
        grows: whether twice the layers make longer files; None where there is no such knob.
        detail: why it was refused or has failed; warnings of the capture.
        device_lines: for each split ("naive/2") the lines of its device files.
    """

    case: str
    family: str
    status: str
    expected: bool = True
    ops: int = 0
    capture_s: float = 0.0
    lines: int = 0
    grows: bool | None = None
    detail: str = ""
    seconds: float = 0.0
    device_lines: dict[str, list[int]] = field(default_factory=dict)


def run_case(case: Case, depth: Depth, deadline_s: float) -> Row:
    """Run one case in a forked process; whatever happens to that process, return a row."""
    start = time.perf_counter()
    row = in_a_process(partial(_examined, depth=depth), case, deadline_s)
    fields = {"seconds": round(time.perf_counter() - start, 1), **row}
    best = "captured" if depth == "capture" else "verified"
    expected = row["status"] == ("refused" if case.refused else best)
    return Row(case.name, case.family, expected=expected, **fields)


def _examined(case: Case, depth: Depth) -> dict[str, object]:
    from tools.conformance.coverage_case import examine

    return examine(case, depth)


def in_a_process(
    examine: Callable[[Case], dict[str, object]], case: Case, deadline_s: float
) -> dict[str, Any]:
    """Return what a function says of a case, in a forked process; or how that process ended."""
    context = multiprocessing.get_context("fork")
    ours, theirs = context.Pipe(duplex=False)
    child = context.Process(target=_in_child, args=(examine, case, theirs))
    child.start()
    theirs.close()
    try:
        return _received(ours, deadline_s, child)
    finally:
        _end(child)
        ours.close()


def _received(
    pipe: Connection, deadline_s: float, child: multiprocessing.process.BaseProcess
) -> dict[str, Any]:
    if not pipe.poll(deadline_s):
        return {"status": "failed", "detail": f"took longer than {deadline_s:g} s"}
    try:
        found: dict[str, Any] = json.loads(pipe.recv_bytes())
    except EOFError:
        child.join(10)
        return {"status": "failed", "detail": f"its process ended with {child.exitcode}"}
    return found


def _end(child: multiprocessing.process.BaseProcess) -> None:
    child.join(5)
    if child.is_alive():
        child.kill()
        child.join()


def _in_child(examine: Callable[[Case], dict[str, object]], case: Case, pipe: Connection) -> None:
    pipe.send_bytes(json.dumps(examine(case)).encode())


def warm() -> None:
    """Import what every case needs before the first fork: it is no part of any capture.

    Torch imports a part of itself when it first traces, so a model of one layer is captured, too.
    """
    for name in IMPORTED:
        importlib.import_module(name)
    import torch

    from bigbrain_fx.frontend import capture

    torch.set_num_threads(1)
    gc.set_threshold(200_000, 20, 100)  # as the process has that captures for the command line
    capture(torch.nn.Linear(4, 1), (torch.ones(4, 4),), lambda out, _: out.sum())


def rows(
    wanted: Iterable[Case], done: dict[str, Row], depth: Depth, deadline_s: float
) -> Iterator[Row]:
    """Yield the row of every case, those of a former run first-hand."""
    for case in wanted:
        yield done.get(case.name) or run_case(case, depth, deadline_s)


def table(found: list[Row]) -> Table:
    """Return the table of all rows."""
    made = Table("case", "family", "status", "ops", "capture s", "lines", "grows", "detail")
    for row in found:
        grows = {None: "", True: "yes", False: "no"}[row.grows]
        status = row.status if row.expected else f"[red]{row.status}"
        numbers = (str(row.ops), f"{row.capture_s:.2f}", str(row.lines), grows)
        first = (row.detail.splitlines() or [""])[0]
        made.add_row(row.case, row.family, status, *numbers, first[:120])
    return made


def summary(found: list[Row]) -> str:
    """Say in one line how many cases do what."""
    counts = Counter(row.status for row in found)
    times = [row.capture_s for row in found if row.capture_s]
    knobs = [row.grows for row in found if row.grows is not None]
    found_statuses = ("verified", "refused", "failed", *(["captured"] * ("captured" in counts)))
    parts = [f"{counts[status]} {status}" for status in found_statuses]
    if times:
        parts.append(f"capture median {statistics.median(times):.2f} s")
    if knobs:
        parts.append(f"lines do not grow with layers in {knobs.count(False)} of {len(knobs)}")
    return f"{len(found)} cases: {', '.join(parts)}"


def _former(path: Path | None) -> dict[str, Row]:
    if path is None or not path.is_file():
        return {}
    found = (Row(**json.loads(line)) for line in path.read_text().splitlines() if line.strip())
    return {row.case: row for row in found}


@click.command()
@click.option("--case", "names", multiple=True, help="This case only; more than once for more.")
@click.option("--family", "families", multiple=True, type=click.Choice(FAMILIES))
@click.option("--fast", is_flag=True, help="All devices in one process instead of real ones.")
@click.option("--capture", is_flag=True, help="Capture only, and time it.")
@click.option("--json", "as_json", is_flag=True, help="JSON lines only.")
@click.option("--resume", type=click.Path(path_type=Path), help="Skip its cases; add to it.")
@click.option("--deadline", default=DEADLINE_S, show_default=True, help="Seconds for a case.")
def main(
    names: tuple[str, ...],
    families: tuple[str, ...],
    fast: bool,
    capture: bool,
    as_json: bool,
    resume: Path | None,
    deadline: float,
) -> None:
    """Run the table; exit code 1 where a case failed or did what the zoo does not expect."""
    warm()
    wanted = [find(name) for name in names] or [
        case for case in cases() if not families or case.family in families
    ]
    done, found = _former(resume), []
    with tempfile.TemporaryDirectory(prefix="coverage-"):
        depth: Depth = "capture" if capture else "fast" if fast else "whole"
        for row in rows(wanted, done, depth, deadline):
            found.append(row)
            line = json.dumps(asdict(row))
            if resume is not None and row.case not in done:
                with resume.open("a") as file:
                    file.write(line + "\n")
            click.echo(line if as_json else _line(row))
    if not as_json:
        Console().print(table(found))
    click.echo(summary(found), err=as_json)
    sys.exit(1 if any(row.status == "failed" or not row.expected for row in found) else 0)


def _line(row: Row) -> str:
    first = (row.detail.splitlines() or [""])[0]
    return f"{row.case:24} {row.status:9} {row.ops:5} ops {row.seconds:6.1f} s  {first[:100]}"


if __name__ == "__main__":
    main()

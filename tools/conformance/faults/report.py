"""Output of the fault matrix: a line a row, JSON, and a page of results."""

from __future__ import annotations

import os
import platform
import re
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from tools.conformance.faults.matrix import Result
from tools.conformance.faults.verdicts import KEPT, SKIPPED, Times

START, END = "<!-- made by tools.conformance.faults -->", "<!-- until here -->"
OTHERS = "Under other schedules"
HEAD = ("#", "fault", "phase", "outcome", "detected", "formed", "caught up", "again", "bound")


def cells(result: Result) -> tuple[str, ...]:
    """Return a row's cells: times are the longest of its strikes."""
    row, verdict = result.row, result.verdict
    again = [t.steps_again for t in verdict.strikes if t.steps_again is not None]
    return (
        str(row.number),
        row.fault,
        row.phase,
        verdict.outcome,
        longest(verdict.strikes, lambda t: t.detected_s),
        longest(verdict.strikes, lambda t: t.formed_s),
        longest(verdict.strikes, lambda t: t.caught_up_s),
        str(max(again)) if again else "-",
        f"{row.bound}{_measured(result)}",
        _yes(verdict.same_bits),
        _yes(verdict.survivors_kept),
        verdict.status,
    )


def _measured(result: Result) -> str:
    verdict = result.verdict
    if verdict.measured_s is None or verdict.bound_s is None:
        return ""
    return f": {verdict.measured_s:.2f}"


def longest(strikes: Sequence[Times], of: Callable[[Times], float | None]) -> str:
    """Return the longest of some times, in seconds."""
    found = [value for t in strikes if (value := of(t)) is not None]
    return f"{max(found):.3f}" if found else "-"


def _yes(value: bool | None) -> str:
    return "-" if value is None else "yes" if value else "NO"


def line(result: Result) -> str:
    """Return a row as text, with what is wrong with it below."""
    number, fault, phase, outcome, detected, formed, caught_up, again, bound, *rest = cells(result)
    bits, survivors, status = rest
    text = (
        f"{number:>2} {status:9} {fault}, {phase}: {outcome} | detected {detected} "
        f"formed {formed} caught up {caught_up} s, {again} again | bound {bound} | "
        f"same bits {bits}, survivors kept {survivors} | {result.took_s:.0f} s"
    )
    problems = (problem for problem in result.verdict.problems)
    return "\n     ".join((text, *problems))


def summary(results: Sequence[Result]) -> dict[str, Any]:
    """Return how many rows are what; `passed` is that none is broken or not built."""
    counts = Counter(result.verdict.status for result in results)
    return {
        "rows": len(results),
        **{status.replace(" ", "_"): count for status, count in counts.items()},
        "passed": all(result.verdict.status in (KEPT, SKIPPED) for result in results),
        "host": f"{os.cpu_count()} cores, {platform.machine()}, Python {platform.python_version()}",
    }


def table(results: Sequence[Result]) -> str:
    """Return the rows as a table of Markdown."""
    head = (*HEAD, "same bits", "survivors", "status")
    lines = [_joined(head), _joined(["---"] * len(head))]
    return "\n".join((*lines, *(_joined(cells(result)) for result in results)))


def _joined(words: Sequence[str]) -> str:
    return "| " + " | ".join(word.replace("|", "/") for word in words) + " |"


def with_others(page: Path, name: str, results: Sequence[Result]) -> str:
    """Return the section of other schedules with the rows of one of them added to those it has."""
    text = page.read_text() if page.exists() else ""
    known = text.partition(f"## {OTHERS}\n")[2].partition("\n## ")[0]
    found = _rows_by_name(known)
    mine = found.setdefault(name, {})
    mine |= {result.row.number: result.verdict.status == KEPT for result in results}
    above = known.partition("|")[0].strip()  # what somebody has written over the table
    return "\n\n".join(filter(None, (above, others_table(found))))


def others_table(found: Mapping[str, Mapping[int, bool]]) -> str:
    """Return a table: of each bundle the rows that were run, and whether they were kept."""
    lines = [_joined(("struck", "rows kept", "rows not kept", "run / kept")), _joined(["---"] * 4)]
    for name, rows in found.items():
        kept, broken = (
            sorted(n for n, is_kept in rows.items() if is_kept is k) for k in (True, False)
        )
        cells = (", ".join(map(str, numbers)) or "-" for numbers in (kept, broken))
        lines.append(_joined((f"`{name}`", *cells, f"{len(rows)} / {len(kept)}")))
    every = [is_kept for rows in found.values() for is_kept in rows.values()]
    return "\n".join((*lines, _joined(("in all", "", "", f"{len(every)} / {sum(every)}"))))


def _rows_by_name(text: str) -> dict[str, dict[int, bool]]:
    found: dict[str, dict[int, bool]] = {}
    for name, kept, broken in re.findall(r"^\| `(.+?)` \| (.+?) \| (.+?) \|", text, re.MULTILINE):
        told = (kept, True), (broken, False)
        found[name] = {int(n): held for numbers, held in told for n in re.findall(r"\d+", numbers)}
    return found


def write_page(path: Path, sections: Mapping[str, str]) -> None:
    """Put measured sections into a page, by title, between its marks.

    What was measured before and is not among them stays; of a table, rows of other numbers do.
    """
    text = path.read_text() if path.exists() else f"{INTRODUCTION}\n\n{START}\n{END}\n"
    if START not in text or END not in text:
        raise ValueError(f"{path} has no place for the table: {START} ... {END}")
    before, _, rest = text.partition(START)
    old, _, after = rest.partition(END)
    known = dict(_section(part) for part in old.split("\n## ")[1:])
    known |= {title: merged(known.get(title, ""), new) for title, new in sections.items()}
    made = "\n\n".join(f"## {title}\n\n{body}" for title, body in known.items())
    path.write_text(f"{before}{START}\n\n{made}\n\n{END}{after}")


def _section(part: str) -> tuple[str, str]:
    title, _, body = part.partition("\n")
    return title.strip(), body.strip()


def merged(old: str, new: str) -> str:
    """Return a new section with the old one's table rows whose numbers it does not have."""
    rows = _numbered(old) | _numbered(new)
    text = [line for line in new.splitlines() if line not in _numbered(new).values()]
    return "\n".join((*text, *(rows[number] for number in sorted(rows)))).strip()


def _numbered(text: str) -> dict[int, str]:
    found = (re.match(r"\| (\d+) \|", line) for line in text.splitlines())
    return {int(match[1]): match.string for match in found if match}


INTRODUCTION = """# Replay on failure: what was measured

A process that dies is replaced; the others keep theirs, and what comes out is the same bit for bit.
Every figure comes from one command, as a whole, or a row or a section at a time (others stay):

    python -m tools.conformance faults --write results.md [--row N] [--chaos 50]
    python -m tools.conformance faults --write results.md --row N --of zb-v   (other schedules)

Each row is a run of a GPT with dropout, a tied weight and clipping, on four devices, with a real
fault: SIGKILL, SIGSTOP, a full tmpfs, flipped bytes, a namespace that drops packets, calls to the
system that fail. Faults strike at counted instructions. Times are seconds from the strike, the
longest of the row: until it was noticed, until all devices were connected again, until the device
was where it had been; *again* is how many finished steps it did again (snapshots in memory every 2
steps). *Same bits* compares the SHA-256 of parameters, optimizer state, buffers and positions with
a run in one process where nothing happened; *survivors*: nobody else's process was replaced or did
a forward twice. *bound* is the limit and, after the colon, what came out; T_hang and T_op are
`--hang`, here 5 s (60 by default); *cold* is a process that no spare had prepared. A row that is
not built counts as failed; row 24 is skipped where there is no GPU, and runs over nccl are not
supervised. How many steps lie between snapshots in memory is chosen by what copying took in that
run, so it differs between sections. *Chaos* strikes in all ways at once: SIGKILL and SIGSTOP to
devices, SIGTERM to the supervisor (the run is then gone on with from its newest commit), a disk of
commits that is full for a while. *Under other schedules* the same strikes hit other
bundles of that GPT (of steps that overlap without its tied weight and clipping, `offload` of
activations and state), and it is said which rows ended as above."""

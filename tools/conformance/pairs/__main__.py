"""Run every pair of features, or some; say which are not as the table has them.

    python -m tools.conformance pairs [R+Z1 ...] [--feature S] [--write docs/reference/pairs.md]
    python -m tools.conformance pairs --remedies

Exit code 1 where one is not. A pair takes some 2 to 10 seconds of processor time.
"""

from __future__ import annotations

import os
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

import click

from tools.conformance.coverage import warm
from tools.conformance.pairs import Pair, judge, pairs
from tools.conformance.pairs.comparing import MICRO_BATCHES
from tools.conformance.pairs.judge import STEPS, split
from tools.conformance.pairs.table import expected, fault, page


@click.command()
@click.argument("names", nargs=-1)
@click.option("--feature", "letters", multiple=True, help="Pairs with this one only.")
@click.option("--remedies", is_flag=True, help="Split with what refusals advise, instead.")
@click.option("--write", type=click.Path(path_type=Path), help="Write the table here.")
def main(
    names: tuple[str, ...], letters: tuple[str, ...], remedies: bool, write: Path | None
) -> None:
    """Run pairs, each in processes of its own."""
    _with_one_thread()
    wanted = [
        pair
        for pair in pairs()
        if (not names or pair.name in names)
        and (not letters or set(letters) & set(pair.name.split("+")))
    ]
    warm()
    faults = _tried(wanted) if remedies else _run(wanted)
    click.echo(f"{len(wanted)} pairs, {len(faults)} not as the table has them")
    if write is not None:
        write.write_text(page(MICRO_BATCHES, STEPS))
    sys.exit(bool(faults))


def _with_one_thread() -> None:
    """Begin anew where OpenMP has several: a fork's own threads would have other bits than it."""
    if os.environ.get("OMP_NUM_THREADS") != "1":
        words = [sys.executable, "-m", "tools.conformance.pairs", *sys.argv[1:]]
        os.execve(sys.executable, words, {**os.environ, "OMP_NUM_THREADS": "1"})


def _run(wanted: Sequence[Pair]) -> list[str]:
    faults = []
    for pair in wanted:
        found = judge(pair)
        wrong = fault(pair, found.status, found.detail)
        first = (found.detail.splitlines() or [""])[0][:100]
        click.echo(f"{pair.name:7} {found.status:10}{found.seconds:5.1f} s  {wrong or first}")
        faults += [wrong] * bool(wrong)
    return faults


def _tried(wanted: Sequence[Pair]) -> list[str]:
    faults = []
    for pair in wanted:
        words = expected()[pair.name].remedy
        if not words:
            continue
        with tempfile.TemporaryDirectory(prefix="remedy-") as folder:
            found = split(pair, Path(folder), words.split())
        click.echo(f"{pair.name:7} {words}  {found.get('detail', 'split')}")
        faults += [pair.name] * bool(found)
    return faults


if __name__ == "__main__":
    main()

"""Strike a small training run in every way of the fault matrix, and say what came out.

    python -m tools.conformance faults [--row N ...] [--of interleaved] [--write results.md]
    python -m tools.conformance faults --chaos 50 --steps 200 [--seed S] [--of zb-v]

The design is in docs/explanation/fault-tolerance.md; the figures of one machine are in
tools/studies/fault_costs. The exit code is 1 if anything is broken or not built.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from pathlib import Path

from tools.conformance.faults import chaos
from tools.conformance.faults.bundle import BUNDLES
from tools.conformance.faults.matrix import Result, results
from tools.conformance.faults.report import OTHERS, line, summary, table, with_others, write_page
from tools.conformance.faults.verdicts import SKIPPED, ground

MATRIX = "The fault matrix"
PLAIN = "1f1b"


def main() -> None:
    """Do what the command line says."""
    given = _parser().parse_args()
    passed = True
    if given.row or not given.chaos:
        passed = _matrix(given)
    if given.chaos or (given.write and not given.row):
        passed = _chaos(given) and passed
    sys.exit(0 if passed else 1)


def _matrix(given: argparse.Namespace) -> bool:
    found = []
    with ground(options=BUNDLES[given.of]) as here:
        for result in results(here, given.row):
            found.append(result)
            print(json.dumps(result.facts()) if given.json else line(result), flush=True)
            if given.write:  # what was measured stays, whatever comes next
                write_page(given.write, _sections(given, found))
    short = summary(found)
    print(json.dumps(short) if given.json else _text(short), flush=True)
    return bool(short["passed"])


def _sections(given: argparse.Namespace, found: Sequence[Result]) -> dict[str, str]:
    """Return what goes into the page: the whole rows of 1F1B; of others whether they are kept."""
    if given.of == PLAIN:
        return {MATRIX: _section(found)}
    done = [result for result in found if result.verdict.status != SKIPPED]
    return {OTHERS: with_others(given.write, given.of, done)}


def _section(found: Sequence[Result]) -> str:
    return f"On {summary(found)['host']}.\n\n{table(found)}"


def _chaos(given: argparse.Namespace) -> bool:
    found = chaos.measure(given.chaos or 50, given.steps, given.seed, given.of)
    print(json.dumps(found.facts) if given.json else found.text, flush=True)
    if given.write:
        write_page(given.write, {found.title: found.text})
    return found.passed


def _text(facts: dict[str, object]) -> str:
    return ", ".join(f"{key} {value}" for key, value in facts.items())


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="tools.conformance.faults", description=__doc__.splitlines()[0] if __doc__ else ""
    )
    parser.add_argument("--row", type=int, nargs="+", default=[], help="these rows only")
    parser.add_argument("--json", action="store_true", help="an object a row, and a summary")
    parser.add_argument("--write", type=Path, help="put all that is measured into this page")
    parser.add_argument("--chaos", type=int, help="so many random strikes of all kinds")
    parser.add_argument(
        "--of", choices=BUNDLES, default=PLAIN, help="what is struck (default 1f1b)"
    )
    parser.add_argument("--steps", type=int, default=200, help="of --chaos (default 200)")
    parser.add_argument("--seed", type=int, default=0, help="of --chaos (default 0)")
    return parser


if __name__ == "__main__":
    main()

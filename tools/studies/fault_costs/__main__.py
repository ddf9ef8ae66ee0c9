"""What supervision costs when nothing fails, and a kill beside torchrun's restart of all.

python -m tools.studies.fault_costs --overhead [--rounds 20] [--write results.md]
python -m tools.studies.fault_costs --against-torchrun [--state-mb 100] [--write results.md]
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path

from tools.conformance.faults.report import write_page
from tools.studies.fault_costs import against, overhead


def main() -> None:
    """Measure what the command line names; exit 1 where a bound is not kept."""
    parser = argparse.ArgumentParser(prog="tools.studies.fault_costs")
    parser.add_argument("--overhead", action="store_true", help="what it costs if nothing happens")
    parser.add_argument("--rounds", type=int, default=20, help="of --overhead (default 20)")
    parser.add_argument(
        "--against-torchrun", action="store_true", help="beside torchrun's restart of all processes"
    )
    parser.add_argument("--state-mb", type=float, default=100.0, help="of a device (default 100)")
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--write", type=Path, help="put all that is measured into this page")
    given = parser.parse_args()
    found = [overhead.measure(given.rounds)] if given.overhead else []
    found += [against.measure(given.state_mb)] if given.against_torchrun else []
    for each in found:
        print(json.dumps(each.facts) if given.json else each.text, flush=True)
        if given.write:
            write_page(given.write, {each.title: each.text})
    sys.exit(0 if all(each.passed for each in found) else 1)


if __name__ == "__main__":
    main()

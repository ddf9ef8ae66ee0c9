"""Hash every plan of many cases, and say which plans are other than before.

    python -m tools.plan_digest [-j 2] [--models "gpt;digits"]
    python -m tools.plan_digest --against main
    python -m tools.plan_digest --write

Plans are compared with the table in tests/tools/plan_digests.json, or with those that another
revision makes. `--write` puts the table right where plans were changed on purpose; what
`--against` says belongs into the commit's text then. Exit code 1 where plans differ, 2 where a
revision does not run. All of it takes some three minutes of processor time, twice `--against`.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping
from pathlib import Path

import click

from tools.plan_digest.case_list import ALL_MODELS, cases
from tools.plan_digest.hashing import Digest, digests
from tools.plan_digest.revision import RevisionError, digests_of
from tools.plan_digest.tables import TABLE, changes, listed, read_table, write_table


@click.command()
@click.option("-j", "processes", type=click.IntRange(1), default=2, show_default=True)
@click.option("--models", default=";".join(ALL_MODELS), help="With a semicolon between them.")
@click.option("--against", metavar="REV", help="Compare with a revision's plans, not the table's.")
@click.option("--json", "out", type=click.Path(path_type=Path), help="Write digests, compare none.")
@click.option("--write", is_flag=True, help="Write the table anew.")
def main(processes: int, models: str, against: str | None, out: Path | None, write: bool) -> None:
    """Hash plans, and compare them."""
    names = tuple(models.split(";"))
    unknown = [name for name in names if name not in ALL_MODELS]
    if unknown:
        raise click.BadParameter(f"there is no model {unknown[0]!r}", param_hint="--models")
    before = _before(against, names, processes)
    found = digests(cases(names), processes)
    if out is not None:
        write_table(found, out)
        return
    if write:
        write_table({**_table(), **found})
    differing = changes(before, found)
    click.echo("\n".join(listed(differing, len(found))))
    sys.exit(bool(differing) and not write)


def _before(against: str | None, names: tuple[str, ...], processes: int) -> Mapping[str, Digest]:
    if against is not None:
        try:
            return digests_of(against, names, processes)
        except RevisionError as error:
            click.echo(error, err=True)
            sys.exit(2)
    return {key: found for key, found in _table().items() if key.partition(" | ")[0] in names}


def _table() -> Mapping[str, Digest]:
    return read_table() if TABLE.is_file() else {}


if __name__ == "__main__":
    main()

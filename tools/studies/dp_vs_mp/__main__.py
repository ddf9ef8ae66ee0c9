"""The command of `tools.studies.dp_vs_mp`: measure what lacks, write the page."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any

import click
import torch

from tools.bench.json_lines import read_lines
from tools.studies.dp_vs_mp import __doc__ as about
from tools.studies.dp_vs_mp.cells import MODELS, StudyRow, cells
from tools.studies.dp_vs_mp.emulating import measured
from tools.studies.dp_vs_mp.page import draw, page
from tools.studies.dp_vs_mp.scaling import Scaled, scaled, wanted
from tools.studies.emulation import missing

PATH = click.Path(path_type=Path)
DIGITS = "digits"


def row_of(found: dict[str, Any]) -> StudyRow | Scaled:
    """Return what a line of the file says."""
    if "every" in found:
        return Scaled(**{**found, "steps": tuple(found["steps"])})
    return StudyRow(**found)


def lacking(only: tuple[str, ...], rows: list[StudyRow | Scaled]) -> Iterator[StudyRow | Scaled]:
    """Measure what is asked for and not there."""
    done = {row.key for row in rows}
    if DIGITS in (only or (DIGITS,)):
        yield from (scaled(*key) for key in wanted() if key not in done)
    left = [c for c in cells() if c.model in (only or MODELS) and c.key not in done]
    if left:
        yield from measured(left)


@click.command(help=about)
@click.option("--out", type=PATH, required=True, help="The file of rows; is added to.")
@click.option("--only", multiple=True, type=click.Choice([*MODELS, DIGITS]))
@click.option("--write", type=PATH, help="The page; its plot stands beside it.")
@click.option("--rows-only", is_flag=True, help="Measure nothing: write the page of what is there.")
def main(out: Path, only: tuple[str, ...], write: Path | None, rows_only: bool) -> None:
    """Measure what lacks; write the page."""
    torch.set_num_threads(1)
    rows = read_lines(out, "tools.studies.dp_vs_mp", row_of)
    if not rows_only:
        if set(only) != {DIGITS} and (reason := missing()):
            raise click.ClickException(f"{reason}; --only digits needs no emulation")
        for row in lacking(only, rows):
            with out.open("a") as file:
                file.write(json.dumps(asdict(row)) + "\n")
            rows.append(row)
            click.echo(f"{time.strftime('%H:%M:%S')} {row}", err=True)
    if write is not None:
        cells_of = [row for row in rows if isinstance(row, StudyRow)]
        curve = [row for row in rows if isinstance(row, Scaled)]
        draw(write.with_suffix(".svg"), cells_of, curve)
        write.write_text(page(cells_of, curve, write.with_suffix(".svg").name))


if __name__ == "__main__":
    main()

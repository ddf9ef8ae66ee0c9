"""The command of `tools.studies.divided`: measure what lacks, write the page."""

from __future__ import annotations

import time
from dataclasses import asdict
from pathlib import Path
from typing import Any

import click
import torch

from bigbrain_fx.planning.registry import load
from tools.bench.json_lines import append_line, read_lines
from tools.studies.divided import __doc__ as about
from tools.studies.divided.cells import Row, wanted
from tools.studies.divided.measuring import Repeats, forecast_again, measured
from tools.studies.divided.page import page
from tools.studies.emulation import missing

PATH = click.Path(path_type=Path)


def row_of(found: dict[str, Any]) -> Row:
    """Return what a line of the file says."""
    content: dict[str, Any] = {k: tuple(v) if isinstance(v, list) else v for k, v in found.items()}
    return Row(**content)


@click.command(help=about)
@click.option("--out", type=PATH, required=True, help="The file of rows; is added to.")
@click.option("--only", multiple=True, help="Models and clusters with this text: unet/uneven2.")
@click.option("--way", "names", multiple=True, help="Ways with this text only.")
@click.option("--rounds", default=3, show_default=True, help="Runs of each way, in turn.")
@click.option("--steps", default=3, show_default=True, help="Of a run, besides its first.")
@click.option("--batches", default=1, show_default=True, help="Batches so many times larger.")
@click.option("--write", type=PATH, help="The page.")
@click.option("--forecast", is_flag=True, help="Forecast the rows at hand anew; run nothing.")
@click.option("--rows-only", is_flag=True, help="Measure nothing: write the page of what is there.")
def main(
    out: Path,
    only: tuple[str, ...],
    names: tuple[str, ...],
    rounds: int,
    steps: int,
    batches: int,
    write: Path | None,
    forecast: bool,
    rows_only: bool,
) -> None:
    """Measure what lacks; write the page."""
    torch.set_num_threads(1)
    rows = read_lines(out, "tools.studies.divided", row_of)
    done = {row.cell for row in rows}
    pairs = [pair for pair in wanted(only) if (*pair, batches) not in done]
    work = out.with_suffix(".work").resolve()
    if forecast:
        _prepare()
        rows = forecast_again(rows, work, _say)
        aside = out.with_suffix(".again")
        for row in rows:
            append_line(aside, asdict(row))
        aside.replace(out)
    elif pairs and not rows_only:
        _prepare()
        work.mkdir(parents=True, exist_ok=True)
        for row in measured(pairs, work, Repeats(rounds, steps, names, batches), _say):
            append_line(out, asdict(row))
            rows.append(row)
            what = f"{row.model}/{row.site}/{row.way}"
            _say(f"{what}: {row.measured_s:.3f} s, forecast {row.forecast_s:.3f}")
    if write is not None:
        write.write_text(page(rows))


def _prepare() -> None:
    if reason := missing():
        raise click.ClickException(f"{reason}; --rows-only writes the page of rows at hand")
    load("partitioner")
    load("estimator")


def _say(text: str) -> None:
    click.echo(f"{time.strftime('%H:%M:%S')} {text}", err=True)


if __name__ == "__main__":
    main()

"""Hold our forecasts of clusters against published measurements.

    python -m tools.studies.published_clusters --data DIR [--group sailor] [--nic] [--profile FILE]

DIR (or BIGBRAIN_GPU_DATA) has others' rows, which are not ours to ship. Models are captured from
`models` on the meta device; no GPU.
"""

from __future__ import annotations

import os
import time
from collections.abc import Sequence
from pathlib import Path
from statistics import fmean

import click

from tools.bench.published_gpus.rows import VARIABLE
from tools.studies.published_clusters.forecasts import ClusterSaid, folder_links, forecast
from tools.studies.published_clusters.models import graph_of
from tools.studies.published_clusters.rows import folder_of, read_rows


@click.command()
@click.option("--data", type=click.Path(path_type=Path), help=f"Folder of rows; or {VARIABLE}.")
@click.option("--group", default="", help="Only rows of groups that begin so.")
@click.option("--row", default="", help="Only rows whose name has this.")
@click.option("--nic/--no-nic", default=False, help="Whether a host's devices share its NIC.")
@click.option("--profile", type=click.Path(path_type=Path), help="Of layers, as estimate takes it.")
def main(data: Path | None, group: str, row: str, nic: bool, profile: Path | None) -> None:
    """Print a line for each row, then errors by group."""
    named = data or (Path(os.environ[VARIABLE]) if VARIABLE in os.environ else None)
    if named is None:
        click.echo(f"no rows here: give --data DIR or set {VARIABLE}; nothing is compared")
        return
    folder = folder_of(named)
    rows, skipped = read_rows(folder)
    said = []
    for each in rows:
        if each.group.startswith(group) and row in each.name:
            began_s = time.perf_counter()
            about = each, graph_of(each.model), folder_links(folder)
            found = forecast(*about, nic=nic, profile=profile)
            said.append(found)
            click.echo(_line(found, time.perf_counter() - began_s))
    for name in dict.fromkeys(s.row.group for s in said):
        click.echo(_sum(name, [s for s in said if s.row.group == name]))
    click.echo("\n".join(skipped))


def _line(said: ClusterSaid, took_s: float) -> str:
    row, memory = said.row, said.memory_error
    held = f"{row.peak_bytes / 1e9:7.2f} {said.peak_bytes / 1e9:7.2f} GB"
    return (
        f"{row.group:<22}{row.name:<46}{row.step_s:9.3f} {said.step_s:9.3f} s {said.error:+7.1%}  "
        f"{held} {'' if memory is None else f'{memory:+7.1%}'}  planned in {took_s:.1f} s"
    )


def _sum(name: str, said: Sequence[ClusterSaid]) -> str:
    errors = [abs(s.error) for s in said]
    memory = [abs(s.memory_error) for s in said if s.memory_error is not None]
    held = f"; memory {fmean(memory):.1%}, worst {max(memory):.1%}" if memory else ""
    return f"{name}: {len(said)} rows, mean {fmean(errors):.1%}, worst {max(errors):.1%}{held}"


if __name__ == "__main__":
    main()

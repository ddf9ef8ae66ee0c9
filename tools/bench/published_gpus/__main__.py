"""Hold our forecasts against published measurements on GPUs.

    python -m tools.bench published_gpus --data DIR [--by model] [--json] [--every]

DIR (or BIGBRAIN_GPU_DATA) has others' rows, which are not ours to ship; graphs of the models that
were captured once are ours. No torch, no GPU.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

import click

from tools.bench.published_gpus.forecasts import Said, forecast
from tools.bench.published_gpus.graphs import FOLDER, read_graphs
from tools.bench.published_gpus.rows import VARIABLE, Row, data_folder, read_rows, wanted
from tools.bench.published_gpus.table import GROUPS, HEAD, line, lines


def said_of(rows: Sequence[Row], graphs: Path = FOLDER, *, usual: bool = False) -> list[Said]:
    """Forecast every row that has a graph; `usual`: as of cards that nobody measured."""
    keys, found = wanted(rows), []
    for path in sorted(graphs.glob("*.json.xz")):
        for key, graph in read_graphs(path, keys):
            found += [forecast(row, graph, usual=usual) for row in rows if row.key == key]
    place = {row.id: number for number, row in enumerate(rows)}
    unique = {each.row.id: each for each in found}  # a model may be in two files
    return sorted(unique.values(), key=lambda each: place[each.row.id])


@click.command()
@click.option("--data", type=click.Path(path_type=Path), help=f"Folder of rows; or {VARIABLE}.")
@click.option("--by", type=click.Choice([name for name, _ in GROUPS]), multiple=True)
@click.option("--source", default="", help="Only rows of this source.")
@click.option("--every", is_flag=True, help="A line for each row.")
@click.option("--json", "as_json", is_flag=True, help="One JSON object a line.")
def main(data: Path | None, by: Sequence[str], source: str, every: bool, as_json: bool) -> None:
    """Print errors by group, then of all rows."""
    folder = data_folder(data)
    if folder is None:
        click.echo(
            f"no published rows here: give --data DIR or set {VARIABLE}; nothing is compared"
        )
        return
    rows, skipped = read_rows(folder)
    said = said_of([row for row in rows if row.source.startswith(source)])
    if every:
        for each in said:
            r = each.row
            click.echo(
                f"{r.id:<26}{r.card:<14}{r.key.name:<28}{r.key.side:>6} {r.key.task:<6}"
                f"{r.precision:<5}{r.key.layout:<5}{r.micro_batch:>5} {r.accum:>5} "
                f"{r.step_s:9.4f} {each.step_s:9.4f} {each.error:+7.1%}"
            )
    found = [(name, list(lines(said, key))) for name, key in GROUPS if name in (by or ("source",))]
    whole = line("all", said)
    if as_json:
        for name, group in found:
            for one in group:
                click.echo(json.dumps({"by": name, **asdict(one)}))
        click.echo(json.dumps({"by": "all", **asdict(whole)}))
        return
    for name, group in found:
        click.echo(f"\nby {name}\n{HEAD}")
        click.echo("\n".join(map(str, group)))
    click.echo(f"\n{HEAD}\n{whole}")
    click.echo(f"{len(rows) - len(said)} rows have no graph here, {len(skipped)} cannot be asked")


if __name__ == "__main__":
    main()

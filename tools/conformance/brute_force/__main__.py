"""The command of `tools.conformance.brute_force`."""

from __future__ import annotations

import json
import time
from dataclasses import asdict

import click

from bigbrain_fx.plan import fastest
from tools.conformance.brute_force.instances import drawn
from tools.conformance.brute_force.judge import Found, compared


@click.command()
@click.option("--instances", default=200, show_default=True, help="How many.")
@click.option("--first", default=0, show_default=True, help="The first one's seed.")
@click.option("--effort", type=click.Choice(["fast", "normal", "high"]), default="normal")
@click.option("--json", "as_json", is_flag=True)
def main(instances: int, first: int, effort: str, as_json: bool) -> None:
    """Compare what `auto` finds with everything there is."""
    fastest.CPU = 0.0  # of plans that are about as fast it takes the simpler one: not here
    rows: list[Found] = []
    for seed in range(first, first + instances):
        start_s = time.process_time()
        row = compared(drawn(seed), effort)
        rows.append(row)
        _show(row, time.process_time() - start_s, as_json)
    if not as_json:
        gaps = [row.gap for row in rows]
        behind = sum(gap > 0 for gap in gaps)
        click.echo(f"{len(rows)} instances: {behind} with a gap, the largest {max(gaps):.2%}")


def _show(row: Found, seconds: float, as_json: bool) -> None:
    if as_json:
        click.echo(json.dumps(asdict(row)))
        return
    mark = "" if row.gap == 0 else f"\n    auto  {row.auto}\n    force {row.best}"
    click.echo(
        f"{row.instance}: gap {row.gap:.3%}, {row.judged} of {row.ways:,} ways simulated, "
        f"{seconds:.1f} s{mark}"
    )


if __name__ == "__main__":
    main()

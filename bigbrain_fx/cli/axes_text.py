"""Table of the axes that a tensor-parallel group could divide: `explain --axes`."""

from __future__ import annotations

import dataclasses

import click

from bigbrain_fx.cli.console import show_table
from bigbrain_fx.cli.output import json_line
from bigbrain_fx.core import Graph
from bigbrain_fx.plan import divisible_axes, ruleless, size_text

_HEADS = ("axis", "by default", "gathered for", "parts", "work", "weights", "forward", "backward")


def print_axes(graph: Graph, as_json: bool) -> None:
    """Print the axes, the bytes that dividing each exchanges, and the ops without a rule."""
    found, without = divisible_axes(graph), ruleless(graph)
    if as_json:
        axes = [dataclasses.asdict(axis) for axis in found]
        click.echo(json_line({"axes": axes, "without_rule": without}))
        return
    rows = [
        (
            f"{axis.name} x{axis.count}" if axis.count > 1 else axis.name,
            f"{axis.chosen} of {axis.count}" if axis.chosen else "",
            ", ".join(axis.whole),
            str(axis.size),
            f"{axis.flops_share:.1%}",
            f"{axis.weight_share:.1%}",
            size_text(axis.forward_bytes),
            size_text(axis.backward_bytes),
        )
        for axis in found
    ]
    show_table(_HEADS, rows)
    if without:
        counts = ", ".join(f"{name} {count}" for name, count in sorted(without.items()))
        click.echo(f"ops without a rule, computed whole: {counts}")

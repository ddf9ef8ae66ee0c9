"""Nouns on a terminal: tables where there is one, plain text in pipes. Knows no commands and decides nothing."""

from __future__ import annotations

from typing import TYPE_CHECKING

from rich.console import Console
from rich.table import Table

from bigbrain_fx.explain import Explanation, explain
from bigbrain_fx.plan import Plan

if TYPE_CHECKING:
    from bigbrain_fx.verify import Verification


def show_plan(plan: Plan, parameters: int) -> None:
    """Print what was decided, and why each cut is where it is."""
    console = _console()
    console.print(
        f"[bold]{plan.graph.name}[/]: {parameters:,} parameters, {len(plan.graph.ops)} ops; "
        f"{len(plan.stages.stages)} stages on {len(plan.stages.devices)} devices; "
        f"{plan.schedule}, {plan.micro_batches} micro-batches of {plan.rows} rows"
    )
    show_explanation(explain(plan))


def show_forecast(plan: Plan) -> None:
    """Print what a step would take, and whether it fits."""
    console = _console()
    rows_per_s = plan.micro_batches * plan.rows / plan.forecast.step_s
    console.print(
        f"[bold]{plan.graph.name}[/]: {plan.partitioner} with {plan.estimator}, {plan.schedule}, "
        f"{plan.micro_batches} micro-batches of {plan.rows} rows"
    )
    console.print(f"forecast {plan.forecast.step_s:.4f} s a step, {rows_per_s:.1f} rows a second; it fits:")
    table = Table("device", "busy s", "idle s", "weights", "gradients", "optimizer", "activations", "peak", "has")
    for entry in plan.forecast.devices:
        parts = (entry.weights_bytes, entry.gradients_bytes, entry.optimizer_bytes, entry.activations_bytes)
        has = plan.cluster.device[entry.device].memory_bytes
        sizes = [_mib(part) for part in (*parts, entry.peak_bytes, has)]
        table.add_row(entry.device, f"{entry.busy_s:.4f}", f"{entry.idle_s:.4f}", *sizes)
    console.print(table)


def show_explanation(found: Explanation) -> None:
    """Print the parts and the cuts of a plan."""
    console = _console()
    table = Table("device", "stages", "modules", "ops", "busy s", "idle s", "memory", "of")
    for part in found.devices:
        stages = ", ".join(map(str, part.stages))
        times = f"{part.busy_s:.4f}", f"{part.idle_s:.4f}"
        table.add_row(part.device, stages, part.modules, str(part.ops), *times, _mib(part.peak_bytes), _mib(part.memory_bytes))
    console.print(table)
    for cut in found.cuts:
        console.print(
            f"cut {cut.source} -> {cut.target} after [bold]{cut.after}[/]: {cut.nbytes / 2**10:.1f} KiB a micro-batch, "
            f"{cut.transfer_s * 1e3:.2f} ms each way"
        )
        for line in map(found.compare, cut.alternatives):
            console.print(f"  {line}")
    console.print(f"forecast {found.step_s:.4f} s a step")


def show_verification(found: Verification) -> None:
    """Print each equality, and where it fails."""
    console = _console()
    for check in found.checks:
        mark = "[green]equal[/]" if check.passed else "[red]DIFFERENT[/]"
        console.print(f"{mark}  {check.name}: {check.detail}")


def _console() -> Console:
    console = Console(highlight=False)
    return console if console.is_terminal else Console(highlight=False, width=110)


def _mib(count: int) -> str:
    return f"{count / 2**20:.0f} MiB"

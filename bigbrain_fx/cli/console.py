"""Nouns on a terminal, and the same words in a pipe: tables there without boxes, nothing coloured.

Knows no commands and decides nothing. Names come from the user's files: they are never markup.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text

from bigbrain_fx.cli.verdict import rate_text, verdict
from bigbrain_fx.cluster import assumed
from bigbrain_fx.plan import (
    Explanation,
    Plan,
    compared_text,
    explain,
    left_out_text,
    measured_share,
    measured_text,
    size_text,
    spread,
)
from bigbrain_fx.planning import CHOSEN_ELSEWHERE

if TYPE_CHECKING:
    from bigbrain_fx.bundles import Split, Verification
    from bigbrain_fx.cli.prices import Offer
    from bigbrain_fx.core import DeviceForecast, Timing
    from bigbrain_fx.measure import Comparison, Contender
    from bigbrain_fx.plan import Candidate, Compared, Search
    from bigbrain_fx.planning import Plugin

MOST_DEVICES = 4  # of a row of a comparison; --json has them all
MOST_CUTS = 12  # scattered placements have hundreds; --json has them all
WIDE = 10_000  # neither a pipe's edge nor a narrow terminal's cuts a figure in two


def show_plan(plan: Plan, parameters: int, verbose: bool = False) -> None:
    """Print the verdict and who computes what; with `verbose` why each cut is where it is."""
    found = explain(plan)
    stages = _count(len(plan.stages.stages), "stage")
    size = f"{_count(parameters, 'parameter')}, {_count(len(plan.graph.ops), 'op')}, {stages}"
    _say((plan.graph.name, "bold"), f": {size}; {_schedule(plan)}")
    _show_verdict(plan, found)
    if verbose:
        show_explanation(dataclasses.replace(found, recovery=None))
        _show_search(plan)
    else:
        _show_parts(found)
    _say_all(left_out_text(plan.cluster))


def show_forecast(plan: Plan, verbose: bool = False) -> None:
    """Print the verdict and the memory of each device; with `verbose` features and the search."""
    by_hand = plan.placement.reason.startswith("placed by hand")  # no partitioner was asked
    by = f"{'placed by hand' if by_hand else plan.partitioner} with {plan.estimator}"
    _say((plan.graph.name, "bold"), f": {by}{measured_text(plan)}, {_schedule(plan)}")
    _show_verdict(plan)
    heads = ("device", "busy s", "idle s", "weights", "gradients", "optimizer", "activations")
    show_table(
        (*heads, "messages", "peak", "of"), (_memory_row(plan, e) for e in plan.forecast.devices)
    )
    _say_all(left_out_text(plan.cluster), *assumed(plan.cluster, plan.graph))
    if not verbose:
        return
    _say_all(*plan.said.values())
    _show_compared(plan.compared)
    _show_search(plan)


def _memory_row(plan: Plan, entry: DeviceForecast) -> tuple[str, ...]:
    sizes = (
        entry.weights_bytes,
        entry.gradients_bytes,
        entry.optimizer_bytes,
        entry.activations_bytes,
        entry.messages_bytes,
        entry.peak_bytes,
        plan.cluster.device[entry.device].memory_bytes,
    )
    times = f"{entry.busy_s:.4f}", f"{entry.idle_s:.4f}"
    return (entry.device, *times, *map(size_text, sizes))


def show_offers(found: Sequence[Offer]) -> None:
    """Print what each cluster would give, the cheapest first: which one to rent."""
    rows = [
        (
            each.devices,
            _number(each.step_s, 4),
            "-" if each.spread is None else str(each.spread),
            _number(each.rows_per_s, 1),
            "-" if each.cost is None else str(each.cost),
            each.refused,
        )
        for each in found
    ]
    show_table(("cluster", "step s", "interval", "rows/s", "cost", "refused"), rows)


def _show_search(plan: Plan) -> None:
    """Print what `auto` chose, what came after it and why, and how far from a lower bound it is."""
    found = plan.search
    if found is None:
        return
    _say(
        ("auto", "bold"),
        f" ({found.objective}, effort {found.effort}) compared {_count(found.looked_at, 'split')} "
        f"and simulated {_count(found.simulated, 'plan')}:",
    )
    heads = ("placed by", "devices", "schedule", "step s", "memory", "against the best")
    losers = [_candidate_row(each, each.why) for each in (*found.others, *found.refused)]
    show_table(heads, [_candidate_row(found.winner, "the best"), *losers])
    _say(str(found))


def _candidate_row(each: Candidate, why: str) -> tuple[str, ...]:
    names = each.devices[:MOST_DEVICES]
    left = len(each.devices) - len(names)
    more = f" and {left} more" if left else ""
    flight = f", in flight {_few(list(map(str, each.in_flight)))}" if each.in_flight else ""
    again = ", recompute" if each.recompute else ""
    count = _count(each.micro_batches, "micro-batch", "micro-batches")
    return (
        each.partitioner,
        f"{' '.join(names)}{more}",
        f"{each.schedule}, {count}{flight}{again}",
        _number(each.step_s, 4),
        f"{each.memory_share:.0%}" if each.step_s is not None else "-",
        why,
    )


def search_json(found: Search) -> dict[str, object]:
    """Return what --json prints of a search."""
    bounds = [
        {"covers": bound.covers, "step_s": bound.step_s, "gap": gap}
        for bound, gap in zip(found.bounds, found.gaps, strict=True)
    ]
    return {**dataclasses.asdict(found), "bounds": bounds}


def show_explained(plan: Plan, found: Explanation) -> None:
    """Print the verdict, the parts, the cuts with their neighbours, and the search."""
    _show_verdict(plan, found)
    show_explanation(found)
    _show_search(plan)


def show_explanation(found: Explanation) -> None:
    """Print the parts and the cuts of a plan."""
    _show_parts(found)
    _show_reasons(found)


def _show_verdict(plan: Plan, found: Explanation | None = None) -> None:
    for line in verdict(plan, found):
        _say(line)


def _show_parts(found: Explanation) -> None:
    """Print what each device computes."""
    rows = [
        (
            part.device,
            ", ".join(map(str, part.stages)),
            part.modules,
            str(part.ops),
            f"{part.busy_s:.4f}",
            f"{part.idle_s:.4f}",
            size_text(part.peak_bytes),
            size_text(part.memory_bytes),
        )
        for part in found.devices
    ]
    show_table(("device", "stages", "modules", "ops", "busy s", "idle s", "memory", "of"), rows)


def _show_reasons(found: Explanation) -> None:
    """Print why each cut is where it is, and what the plan's features do."""
    _say_all(found.reason)
    largest = sorted(found.cuts, key=lambda cut: -cut.nbytes)[:MOST_CUTS]
    for cut in (cut for cut in found.cuts if cut in largest):
        _say_all(found.cut_text(cut), *(f"  {found.compare(each)}" for each in cut.alternatives))
    if len(found.cuts) > MOST_CUTS:
        _say(f"and {len(found.cuts) - MOST_CUTS} smaller cuts, see --json")
    said = (found.tensor, found.replicas, found.recompute, found.split, found.offload, found.order)
    last = found.asynchronous, found.compiled, found.quantised
    _say_all(*said, *last, *(f"  {line}" for line in found.axis_lines))
    _show_compared(found.compared)
    if found.moved:
        _say(f"{_count(len(found.moved), 'op')} moved to stay with others: {_few(found.moved)}")
    _say_all(f"when a device dies: {found.recovery}" if found.recovery else "", found.forecast_text)


def _say_all(*texts: str) -> None:
    for text in filter(None, texts):
        _say(text)


def _show_compared(found: Sequence[Compared]) -> None:
    """Print replicas and tensor groups that were compared, the best first."""
    for each in found:
        _say(f"compared: {compared_text(each)}")


def pace_text(plan: Plan, median_s: float) -> str:
    """Return how fast a run was, beside its forecast; a faster device is no wrong forecast."""
    forecast_s, what = plan.forecast.step_s, "step" if plan.mode == "train" else "batch"
    plain = " of stages that are not compiled" if plan.stages.compiled else ""
    return (
        f"median {median_s:.4f} s a {what}, {rate_text(plan.graph, plan.graph.batch / median_s)}; "
        f"forecast {forecast_s:.4f} s{plain}: it took {median_s / forecast_s:.2f} times as long"
    )


def show_verification(found: Verification) -> None:
    """Print whether all is equal, then each check, and where it fails."""
    failed = sum(check.passed is False for check in found.checks)
    count = _count(len(found.checks), "check")
    whole = f"FAILED: {failed} of {count}" if failed else f"verified: {count}, none failed"
    _say((whole, "red" if failed else "green"))
    for check in found.checks:
        colour = {True: "green", False: "red", None: "yellow"}[check.passed]
        _say((check.word, colour), f"  {check.name}: {check.detail}")


def show_comparison(found: Comparison) -> None:
    """Print a row for each contender, who is fastest, and whether all computed the same."""
    _say((found.model, "bold"), f": captured once, in {found.capture_s:.1f} s")
    ran = found.steps is not None
    heads = ["partitioner", "devices", "micro-batches", "forecast s", "rows/s"]
    heads += ["measured s", "rows/s"] if ran else []
    planned = [each for each in found.contenders if each.plan is not None]
    rows = [_contender_row(each, ran) for each in planned]
    show_table((*heads, "sent", "planned in s", "memory"), rows)
    for each in found.contenders:
        if each.reason:
            help_ = f"; {each.help}" if each.help else ""
            _say((each.name, "bold"), f": {each.reason}{help_}")
    for agreement in found.agreements:
        _say(str(agreement), ("", "") if agreement.passed else (" (WRONG)", "red"))
    if found.best is not None:
        how = "forecast" if found.best.measured_step_s is None else "measured"
        _say(f"{how} fastest: {found.best.name}")
    if found.forecasts_differ_in_kind:
        _say("the forecasts are of several estimators: compare them by --run, or give --estimator")


def _contender_row(each: Contender, ran: bool) -> tuple[str, ...]:
    plan = each.plan
    assert plan is not None
    measured = each.measured_step_s, each.measured_rows_per_s
    return (
        each.name,
        str(len(plan.stages.devices)),
        f"{plan.micro_batches} of {_count(plan.rows, 'row')}, {plan.schedule}",
        _number(each.step_s, 4),
        _number(each.rows_per_s, 1),
        *((_number(measured[0], 4), _number(measured[1], 1)) if ran else ()),
        size_text(each.cut_bytes or 0),
        _number(each.planning_s, 2),
        _memory(plan),
    )


def _memory(plan: Plan) -> str:
    """Say what each device holds at its peak; of many, the fullest."""
    ranked = sorted(plan.forecast.devices, key=lambda entry: -entry.peak_bytes)[:MOST_DEVICES]
    shown = [entry for entry in plan.forecast.devices if entry in ranked]
    said = ", ".join(f"{entry.device} {size_text(entry.peak_bytes)}" for entry in shown)
    others = len(plan.forecast.devices) - len(shown)
    return said + (f", {others} less" if others else "")


def _number(value: float | None, digits: int) -> str:
    return "-" if value is None else f"{value:.{digits}f}"


def show_plugins(entries: Sequence[Plugin]) -> None:
    """Print what may be asked for by name, a row each."""
    rows = [
        (each.name, each.kind, each.package, each.what, ", ".join(_settings(each)))
        for each in entries
    ]
    show_table(("name", "kind", "package", "what", "--set"), rows, left=True)


def _settings(entry: Plugin) -> tuple[str, ...]:
    """Return what `--set` takes of a partitioner; one that cannot be loaded has told why."""
    known = entry.options if entry.kind == "partitioner" else ()
    return tuple(name for name in known if name not in CHOSEN_ELSEWHERE)


# --------------------------------------------------------------------------- as JSON


def show_timings(timings: Sequence[Timing]) -> None:
    """Print where the time of a split went; parts with torch ran in the model's process."""
    rows = [(each.part, f"{each.processor_s:.2f}", f"{each.wall_s:.2f}") for each in timings]
    total = f"{sum(each.processor_s for each in timings):.2f}"
    show_table(("part", "processor s", "on the clock s"), (*rows, ("all", total, "")), left=True)


def split_json(made: Split) -> dict[str, object]:
    """Return what `split --json` prints."""
    head = {"bundle": str(made.bundle), "parameters": made.parameters}
    timings = [dataclasses.asdict(each) for each in made.timings]
    return {**head, "warnings": made.warnings, **plan_json(made.plan), "timings": timings}


def plan_json(plan: Plan) -> dict[str, object]:
    """Return what `estimate --json` and `simulate --json` print of a plan."""
    stages, source, found = plan.stages, plan.source, plan.search
    own = ("partitioner", "estimator", "schedule", "micro_batches", "rows", "in_flight")
    cut = (
        "recompute",
        "deferring",
        "offload",
        "asynchronous",
        "compiled",
        "zero_stage",
        "shard_group",
        "sum_order",
    )
    return {
        "model": plan.graph.name,
        "plan": plan.key,
        **{name: getattr(plan, name) for name in own},
        **{name: getattr(stages, name) for name in cut},
        "quantize": source.quantize,
        "replicas": [list(own) for own in stages.micros],
        "stages": len(stages.stages),
        "step_s": plan.forecast.step_s,
        "search": search_json(found) if found else None,
        "tensor": stages.members,
        "compared": [dataclasses.asdict(each) for each in plan.compared],
        "measured": measured_share(plan),
        "spread": dataclasses.asdict(spread(plan)),
        "assumed": assumed(plan.cluster, plan.graph),
        "devices": [_device_json(plan, entry) for entry in plan.forecast.devices],
    }


def _device_json(plan: Plan, entry: DeviceForecast) -> dict[str, object]:
    memory = plan.cluster.device[entry.device].memory_bytes
    return {**dataclasses.asdict(entry), "memory_bytes": memory}


def comparison_json(found: Comparison) -> dict[str, object]:
    """Return what `compare --json` prints."""
    best = found.best
    return {
        "model": found.model,
        "capture_s": found.capture_s,
        "steps": found.steps,
        "best": best.name if best else None,
        "agreements": [
            {**dataclasses.asdict(each), "passed": each.passed} for each in found.agreements
        ],
        "contenders": [_contender_json(each) for each in found.contenders],
    }


def _contender_json(each: Contender) -> dict[str, object]:
    """Return fields of a contender; those of its plan replace fields of the same name."""
    asked = ("name", "reason", "code", "help", "planning_s", "partitioner", "estimator")
    forecast = ("step_s", "rows_per_s", "cut_bytes")
    ran = ("measured_step_s", "measured_rows_per_s", "steps_s", "losses", "max_rss_bytes", "bundle")
    return {
        "planned": each.plan is not None,
        "devices": (),
        **{name: getattr(each, name) for name in (*asked, *forecast)},
        **(plan_json(each.plan) if each.plan is not None else {}),
        **{name: getattr(each, name) for name in ran},
    }


def plugin_json(entry: Plugin) -> dict[str, object]:
    """Return what `plugins --json` prints of one name."""
    return {**dataclasses.asdict(entry), "settings": _settings(entry)}


# --------------------------------------------------------------------------- words


def _say(*parts: str | tuple[str, str]) -> None:
    _console().print(Text.assemble(*parts), soft_wrap=True)


def show_table(heads: Sequence[str], rows: Iterable[Sequence[str]], *, left: bool = False) -> None:
    """Print rows under their heads; the first three columns are words, and all if `left`."""
    console = _console()
    table = Table(*heads, box=box.SIMPLE_HEAD if console.is_terminal else None, pad_edge=False)
    for column in () if left else table.columns[3:]:
        column.justify = "right"
    for row in rows:
        table.add_row(*(Text(cell) for cell in row))
    console.print(table)


class _Stdout(Console):
    def on_broken_pipe(self) -> None:
        raise  # what prints otherwise does so, too; rich would end the process


def _console() -> Console:
    return _Stdout(highlight=False, width=WIDE)


def _schedule(plan: Plan) -> str:
    count = _count(plan.micro_batches, "micro-batch", "micro-batches")
    again = ", recompute" if plan.stages.recompute else ""
    return f"{plan.schedule}, {count} of {_count(plan.rows, 'row')}{again}"


def _count(number: int, one: str, many: str = "") -> str:
    return f"{number:,} {one if number == 1 else many or one + 's'}"


def _few(names: Sequence[str]) -> str:
    return ", ".join(names[:5]) + (", ..." if len(names) > 5 else "")

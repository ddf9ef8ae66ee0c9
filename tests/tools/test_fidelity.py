"""Fidelity: statistics of made-up rows, the choice of cells, resuming. Nothing is emulated here."""

from __future__ import annotations

import ast
import json
import threading
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import cast

import pytest
from click.testing import CliRunner

from bigbrain_fx.core import Link, OpCost, Overheads
from bigbrain_fx.costs.profiles import Machine
from bigbrain_fx.errors import InputError
from bigbrain_fx.plan import Options, Source, costs_of, make_plan
from bigbrain_fx.plan.memory_check import PROCESS
from tests.support import samples
from tests.support.synthetic import chain_graph
from tools import fidelity
from tools.emulation import Network, Quota
from tools.fidelity_bench import shared
from tools.fidelity_cells import (
    SPLITS,
    WAYS,
    Cell,
    every,
    is_held_out,
    placed_by_shares,
    subset,
)
from tools.fidelity_drift import Ground, at_speed
from tools.fidelity_models import MICRO_BATCHES, MODELS, SITES
from tools.fidelity_reference import FEWEST, Reference
from tools.fidelity_report import best_source, candidates, noise_floor, regret, spearman, summary
from tools.fidelity_rows import Row, append_row, read_rows
from tools.fidelity_steady import steady_s

GRAPH = chain_graph(1, 6)  # a batch of 4 rows
HELD, CALIBRATING = ("llama", "uneven2-1000"), ("gpt", "equal2-1000")


def row(
    measured: Sequence[float],
    forecast: float,
    pair: tuple[str, str] = HELD,
    way: tuple[str, str] = WAYS[0],
    machine: float = 1.0,
) -> Row:
    """A row of runs of one step, in reference products; the machine was so much slower in them."""
    return Row(
        *pair,
        *way,
        step_s=[[s * machine * 0.01] for s in measured],
        reference_s=[machine * 0.01] * len(measured),
        forecast_s={"survey": forecast * 0.01},
        forecast_reference_s={"survey": 0.01},
    )


# --------------------------------------------------------------------------- statistics


def test_errors_of_held_out_cells_only() -> None:
    rows = [row([2, 2], 2.2), row([4, 4], 3.6, way=WAYS[1]), row([1, 1], 2, CALIBRATING)]
    found = summary(rows, "survey")
    assert (found.cells, found.held_out_cells) == (3, 2)
    assert found.mape_raw == pytest.approx(0.1)
    assert found.worst_raw == pytest.approx(0.1)
    assert found.bias_raw == pytest.approx(0.0)
    assert found.factor == pytest.approx(0.5)
    assert found.mape == pytest.approx(0.5)
    assert found.mape_of_calibrating == pytest.approx(0.0)


def test_the_calibrating_cells_give_one_factor() -> None:
    found = summary([row([1.0], 0.8, CALIBRATING), row([2.0], 1.6)], "survey")
    assert found.factor == pytest.approx(1.25)
    assert found.mape_raw == pytest.approx(0.2)
    assert found.mape == pytest.approx(0.0)


def test_a_pair_is_held_out_when_neither_half_calibrates() -> None:
    assert is_held_out(Cell(*HELD, *WAYS[0]))
    assert not is_held_out(Cell("gpt", "uneven2-1000", *WAYS[0]))
    assert not is_held_out(Cell("llama", "equal2-1000", *WAYS[0]))


def test_a_machine_that_got_slower_is_no_error() -> None:
    assert row([3.0], 3.0, machine=1.3).error("survey") == pytest.approx(0.0)


def test_a_cell_is_the_median_of_the_medians_of_its_runs() -> None:
    found = Row(*HELD, *WAYS[0], [[1, 2, 9], [3, 4, 4], [8, 7, 6]], [1, 1, 1], {"a": 5}, {"a": 1})
    assert found.runs == [2, 4, 7]
    assert found.measured == found.measured_s == 4
    assert found.error("a") == 0.25


def test_the_noise_floor_is_one_run_as_forecast_of_another() -> None:
    assert noise_floor([row([1.0, 1.25], 1)]) == pytest.approx((0.25 + 0.2) / 2)
    assert noise_floor([row([1.0, 1.25], 1), row([2, 2, 2], 1)]) == pytest.approx(0.225 / 2)
    assert noise_floor([row([1.0], 1)]) is None


@pytest.mark.parametrize(
    ("forecast", "measured", "floor", "expected"),
    [
        ((1, 2, 3), (10, 20, 30), 0.0, 1.0),
        ((3, 2, 1), (10, 20, 30), 0.0, -1.0),
        ((1, 3, 2), (10, 20, 30), 0.0, 0.5),
        ((2, 1, 3), (100, 101, 200), 0.0, 0.5),
        ((2, 1, 3), (100, 101, 200), 0.02, 1.0),  # the first two cannot be told apart
        ((2, 3, 1), (100, 101, 200), 0.02, -0.5),
        ((3, 2, 1), (100, 101, 102), 0.03, 1.0),  # nothing can
        ((1, 1, 1), (10, 20, 30), 0.0, 0.0),  # it says nothing
        ((1, 1, 2), (10, 20, 30), 0.0, 3**0.5 / 2),
    ],
)
def test_spearman(
    forecast: Sequence[float], measured: Sequence[float], floor: float, expected: float
) -> None:
    assert spearman(forecast, measured, floor) == pytest.approx(expected)


def test_groups_do_not_chain() -> None:
    """Each is within the floor of the next, but the last is far from the first."""
    assert spearman((4, 3, 2, 1), (100, 102, 104, 106), 0.03) < 0


def test_splits_that_are_one_plan_are_one_candidate() -> None:
    """Repeats of one plan differ; to prefer one of them is no mistake."""
    first, same, third = ((WAYS[0], 1.0), (WAYS[1], 1.0), (WAYS[2], 1.2))
    rows = [
        row(m, f, way=way)
        for m, (way, f) in zip(([1.2], [1.0], [1.1]), (first, same, third), strict=True)
    ]
    assert [len(some) for some in candidates(rows)] == [2, 1]
    assert candidates([rows[0], replace(rows[1], schedule="1f1b")]) == [
        [rows[0]],
        [replace(rows[1], schedule="1f1b")],
    ]


def test_regret() -> None:
    assert regret((2, 1, 3), (10, 12, 11), 0.0) == pytest.approx(0.2)
    assert regret((2, 1, 3), (10, 12, 11), 0.25) == 0.0
    assert regret((1, 1, 3), (10, 12, 11), 0.0) == 0.0


def test_ranks_need_a_pair_with_all_ways() -> None:
    rows = [row([i], i, way=way) for i, way in enumerate(WAYS, 1)]
    found = summary(rows, "survey")
    assert (found.ranked_pairs, found.spearman, found.regret) == (1, 1.0, 0.0)
    assert summary(rows[1:], "survey").spearman is None


def test_memory_of_all_devices() -> None:
    measured = replace(
        row([1.0], 1),
        forecast_bytes={"d0": 103, "d1": 98},
        tracked_bytes={"d0": 100, "d1": 100},
        resident_bytes={"d0": 110, "d1": PROCESS["cpu"].context_bytes + 118},
    )
    found = summary([measured], "survey")
    assert found.memory_devices == 2
    assert found.memory_mape == pytest.approx(0.025)
    assert found.memory_worst == pytest.approx(0.03)
    assert found.memory_under == pytest.approx(-0.02)
    assert (found.resident_devices, found.resident_over_reserved) == (2, 1)


# --------------------------------------------------------------------------- the choice of cells


def test_the_product() -> None:
    cells = every()
    assert len(MODELS) >= 8
    assert len(SITES) == 6
    assert len(WAYS) >= 12
    assert len(set(cells)) == len(cells) == len(MODELS) * len(SITES) * len(WAYS)


def test_a_part_is_balanced() -> None:
    cells = subset(96)
    assert len(set(cells)) == len(cells) == 96
    pairs = Counter(cell.pair for cell in cells)
    assert len(pairs) == len(MODELS) * len(SITES)  # every model on every cluster
    whole = [pair for pair, count in pairs.items() if count == len(WAYS)]
    assert len(whole) == 4
    assert all(is_held_out(Cell(*pair, *WAYS[0])) for pair in whole)
    assert len({model for model, _ in whole}) == len({cluster for _, cluster in whole}) == 4
    assert set(Counter(cell.schedule for cell in cells).values()) == {48}
    assert set(Counter(cell.split for cell in cells).values()) == {96 // len(SPLITS)}
    spread = [cell for cell in cells if cell.pair not in whole]
    both = Counter((cell.model, cell.schedule) for cell in spread)
    assert len(both) == 2 * len(MODELS)


def test_a_part_depends_on_the_seed_alone() -> None:
    assert subset(40) == subset(40)
    assert subset(40) != subset(40, seed=1)
    assert subset(10_000) == tuple(sorted(every(), key=lambda c: list(SITES).index(c.cluster)))


def test_cells_come_cluster_by_cluster() -> None:
    order = [cell.cluster for cell in subset(60)]
    assert list(dict.fromkeys(order)) == list(SITES)
    assert order == sorted(order, key=list(SITES).index)


def test_model_files_are_python() -> None:
    for model in MODELS.values():
        assert model.rows % MICRO_BATCHES == 0
        names = {node.name for node in ast.parse(model.text("/r")).body if hasattr(node, "name")}
        assert {"model", "example_batch"} <= names


def test_clusters_as_described() -> None:
    found = SITES["uneven4-1000"].cluster
    fastest = found.devices[0].flops_per_s
    assert [fastest / device.flops_per_s for device in found.devices] == [1, 2, 4, 4]
    assert found.link("d0", "d3").transfer_s(125_000_000) == pytest.approx(1.001)


def test_ops_are_dealt_out_by_shares() -> None:
    graph = chain_graph(0, 8, skips=False)
    ops = [op.name for op in graph.ops]
    found = placed_by_shares(graph, lambda _: OpCost(1.0, 1.0), {"a": 1.0, "b": 2.0, "c": 1.0})
    assert [found.device_of[name] for name in ops] == list("aabbbbcc")


# --------------------------------------------------------------------------- resuming


def test_rows_come_back_and_a_cut_off_line_is_replaced(tmp_path: Path) -> None:
    path, rows = tmp_path / "sub" / "rows.jsonl", [row([1.0, 2.0], 1), row([3.0], 2, way=WAYS[3])]
    assert read_rows(path) == []
    append_row(path, rows[0])
    with path.open("a") as file:
        file.write('{"model": "gp')
    assert read_rows(path) == [rows[0]]
    append_row(path, rows[1])
    assert read_rows(path) == rows
    again = replace(rows[0], took_s=7.0)
    append_row(path, again)
    assert read_rows(path) == [again, *rows[1:]]  # measured anew


def test_cells_that_repeat_badly_are_measured_again() -> None:
    rows = [row([1.0, 1.0], 1), row([1.0, 1.5], 1, way=WAYS[1])]
    cells = [one.cell for one in rows]
    assert fidelity.lacking(cells, rows) == []
    assert fidelity.lacking(cells, rows, again=0.1) == [rows[1].cell]
    assert fidelity.lacking(cells, rows[:1], again=0.1) == [rows[1].cell]


def test_runs_are_repeated_where_others_used_the_machine(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    busy = iter([0.9, 0.5, 0.8, 0.6, 0.5])

    def run(net: object, bundle: object, steps: int, logs: Path) -> fidelity.Taken:
        return fidelity.Taken([1.0], 1.0, next(busy))

    monkeypatch.setattr(fidelity, "run_once", run)
    repeats = fidelity.Repeats(runs=2, quiet=0.65)
    net = cast("Network", None)
    kept = fidelity.quiet_runs(net, tmp_path, repeats, tmp_path)
    assert [taken.busy for taken in kept] == [0.5, 0.6]
    assert next(busy) == 0.5  # four were enough
    busy = iter([0.9, 0.8, 0.7, 0.95, 0.1])
    kept = fidelity.quiet_runs(net, tmp_path, repeats, tmp_path)
    assert [taken.busy for taken in kept] == [0.7, 0.8]  # at most twice as many: the quietest


def test_what_is_no_row_is_named(tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    path.write_text('{"model": "gpt"}\n')
    with pytest.raises(InputError, match=r"not a row") as caught:
        read_rows(path)
    assert caught.value.at == f"{path}:1"


def test_a_killed_run_goes_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[Cell] = []

    def measured(cells: Sequence[Cell], *_: object) -> Iterator[Row]:
        for number, cell in enumerate(cells):
            if number == 2:
                raise KeyboardInterrupt
            asked.append(cell)
            yield row([1.0], 1, cell.pair, (cell.schedule, cell.split))

    monkeypatch.setattr(fidelity, "measured", measured)
    monkeypatch.setenv("BIGBRAIN_PROFILES", "")  # is set, and put back afterwards
    words = ["--out", str(tmp_path / "rows.jsonl"), "--cells", "5", "--json"]
    codes = [CliRunner().invoke(fidelity.main, words).exit_code for _ in range(3)]
    assert codes == [1, 1, 0]
    assert asked == list(subset(5))
    *rows, total = CliRunner().invoke(fidelity.main, words).stdout.splitlines()
    assert len(rows) == json.loads(total)["cells"] == 5
    names = {"mape", "worst", "spearman", "regret", "memory_mape", "memory_under"}
    assert names <= set(json.loads(total))
    assert len(asked) == 5


def test_a_report_runs_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fidelity, "measured", pytest.fail)
    path = tmp_path / "rows.jsonl"
    append_row(path, row([1.0, 1.0], 1.05))
    result = CliRunner().invoke(fidelity.main, ["--out", str(path), "--report"])
    assert result.exit_code == 0
    assert "llama/uneven2-1000/gpipe/naive" in result.stdout
    assert "1 cells, 1 of them held out" in result.stdout
    assert "mean error 5.0 %" in result.stdout


# --------------------------------------------------------------------------- forecasts


def test_steps_in_a_row_take_no_longer_than_one() -> None:
    for devices in (1, 3):
        plan = samples.plan("gpt", devices=devices)
        found_s = steady_s(plan, costs_of(plan))
        busiest_s = max(entry.busy_s for entry in plan.forecast.devices)
        assert busiest_s * (1 - 1e-9) <= found_s <= plan.forecast.step_s * (1 + 1e-9)
        assert devices > 1 or found_s == pytest.approx(plan.forecast.step_s)


def test_a_slower_machine_makes_steps_longer_but_not_links() -> None:
    """Alone a step takes twice as long on processors half as fast; with slow links less."""
    for link, most in [(Link(0.0, 1e15), 2.0), (Link(0.1, 1e6), 1.5)]:
        cluster = replace(samples.cluster(2), default_link=link)
        plan = make_plan(GRAPH, cluster, Source("m.py"), Options("naive", micro_batches=2))
        ground = Ground(plan, costs_of(plan))
        assert ground.forecast_s() == pytest.approx(plan.forecast.step_s)
        longer = ground.forecast_s(2.0) / ground.forecast_s()
        assert 1.0 < longer <= most * (1 + 1e-9)
        assert link.latency_s or longer == pytest.approx(2.0)


def test_everything_that_a_processor_does_takes_longer() -> None:
    own = Overheads(message_s=1.0, message_bytes_per_s=8.0, instruction_s=2.0, step_s=3.0)
    plain = samples.cluster(1)
    cluster = replace(plain, devices=(replace(plain.devices[0], overheads=own),))
    plan = make_plan(GRAPH, cluster, Source("m.py"), Options("naive", micro_batches=1))
    before, after = costs_of(plan), at_speed(costs_of(plan), 2.0)
    assert after.cluster.devices[0].overheads == Overheads(2.0, 4.0, 4.0, 6.0)
    assert after.cluster.default_link == before.cluster.default_link
    assert after.optimizer_s("d0", 3, 100) == pytest.approx(2 * before.optimizer_s("d0", 3, 100))
    for name, cost in before.ops["d0"].items():
        found = after.op_cost(name, "d0")
        assert (found.forward_s, found.backward_s) == (2 * cost.forward_s, 2 * cost.backward_s)
        assert found.saved_bytes == cost.saved_bytes


def test_a_row_is_judged_by_the_forecast_of_its_own_minute() -> None:
    """The product took 10 ms at the profile and 20 ms beside the runs."""
    before = row([1.0], 1.2, machine=2.0)
    assert before.slower == {"survey": 2.0}
    found = replace(before, forecast_now_s={"survey": 0.022})  # half of it links, say
    assert before.error("survey") == pytest.approx(0.2)
    assert found.error("survey") == pytest.approx(0.1)
    assert found.seconds("survey") == pytest.approx(0.022)


def test_a_device_is_a_share_of_the_machine_that_was_profiled() -> None:
    """Its overheads are what `doctor` found on it: they have the share already."""
    described = SITES["uneven2-1000"].cluster
    own = Overheads(message_s=1e-4, message_bytes_per_s=4e9, instruction_s=2e-5, step_s=3e-4)
    found = replace(
        described, devices=tuple(replace(device, overheads=own) for device in described.devices)
    )
    quotas = {"d0": Quota(0.5, 4000, 8000, 1), "d1": Quota(0.25, 2000, 8000, 1)}
    net = cast("Network", SimpleNamespace(cluster=described, quotas=quotas))
    machine = Machine("cpu", "x", "2", 1, 100e9, 20e9, 4e-6)
    made = shared(net, found, {"d0": machine, "d1": replace(machine, flops_per_s=80e9)})
    assert [device.flops_per_s for device in made.devices] == [50e9, 20e9]
    assert [device.memory_bytes_per_s for device in made.devices] == [10e9, 5e9]
    assert [device.launch_s for device in made.devices] == [8e-6, 16e-6]
    assert made.devices[1].overheads == own
    assert made.link("d0", "d1") == described.link("d0", "d1")


# --------------------------------------------------------------------------- the reference


def test_the_reference_is_timed_beside_what_is_measured() -> None:
    """Also what takes no time has enough samples; the thread has ended."""
    with Reference() as beside:
        pass
    assert len(beside.samples_s) >= FEWEST
    assert min(beside.samples_s) <= beside.seconds <= max(beside.samples_s)
    assert 0.0 <= beside.busy <= 1.0
    assert "reference" not in {thread.name for thread in threading.enumerate()}


# --------------------------------------------------------------------------- the page


def test_the_best_ground_is_chosen_and_mended_on_cells_that_are_not_reported() -> None:
    def both(cell: Row, share: float) -> Row:
        return replace(
            cell,
            forecast_s={**cell.forecast_s, "share": share * 0.01},
            forecast_reference_s={**cell.forecast_reference_s, "share": 0.01},
        )

    others = [both(row([m], 2.0 + m, CALIBRATING), 0.5 * m) for m in (1.0, 2.0, 4.0)]
    held = [both(row([10.0], 10.0), 5.5)]  # the first is right here, which must not count
    assert best_source([*others, *held]) == "share"
    found = summary([*others, *held], "share")
    assert found.factor == pytest.approx(2.0)
    assert found.mape == pytest.approx(0.1)
    assert found.worst == pytest.approx(0.1)


@pytest.mark.nightly
def test_a_page_has_every_row_and_its_plot(tmp_path: Path) -> None:
    path, page = tmp_path / "rows.jsonl", tmp_path / "page.md"
    for cell in (row([1.0, 1.0], 1.05), row([1.0, 1.1], 1.0, CALIBRATING)):
        append_row(path, cell)
    words = ["--out", str(path), "--report", "--write", str(page)]
    assert CliRunner().invoke(fidelity.main, words).exit_code == 0
    assert "| c | gpt/equal2-1000/gpipe/naive |" in page.read_text()
    assert "|  | llama/uneven2-1000/gpipe/naive |" in page.read_text()
    assert "](page.svg)" in page.read_text()
    assert (tmp_path / "page.svg").read_text().startswith("<?xml")

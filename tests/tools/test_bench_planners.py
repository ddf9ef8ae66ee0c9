"""The planner benchmark on an instance made here: its rows, its comparisons, its time limit."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

import pytest
from click.testing import CliRunner

from tools.bench_planners import Row, compared, main, measure
from tools.instances import Instance, Node, feasible, latency, max_load
from tools.load_solvers.problem import Kind
from tools.solvers import SOLVERS, bound

FIELDS = {"instance", "partitioner", "value", "best_known", "bound", "seconds", "feasible"}


def toy(count: int = 8) -> Instance:
    """Make a chain; two accelerators hold it together, none alone; a CPU is ten times slower."""
    return Instance(
        "toy",
        tuple(Node(f"n{i}", (1.0, 10.0), 1.0) for i in range(count)),
        tuple((i, i + 1, 0.1) for i in range(count - 1)),
        (Kind("accelerator", 2, count / 2 + 1), Kind("cpu", 1)),
        (1.0, 0.0),
    )


def written(folder: Path, task: str = "throughput") -> Path:
    nodes = [
        {
            "id": i,
            "name": f"n{i}",
            "supportedOnFpga": 1,
            "fpgaLatency": 1.0,
            "cpuLatency": 10.0,
            "isBackwardNode": False,
            "colorClass": i,
            "size": 1.0,
        }
        for i in range(8)
    ]
    edges = [{"sourceId": i, "destId": i + 1, "cost": 0.1} for i in range(7)]
    found = {"maxSizePerFPGA": 5.0, "maxFPGAs": 2, "maxCPUs": 1, "nodes": nodes, "edges": edges}
    path = folder / f"{task}-inputs" / "LayerGraphs" / "toy.json"
    path.parent.mkdir(parents=True)
    path.write_text(json.dumps(found))
    return folder


@pytest.mark.parametrize("alone", [False, True])
@pytest.mark.parametrize("name", sorted(set(SOLVERS) - {"mcmc"}))
def test_every_solver_places_the_toy(name: str, alone: bool) -> None:
    instance = toy()
    found = SOLVERS[name](instance, alone, "fast")
    if name == "cp-sat" and alone:
        assert found is None  # it has no program for latencies
        return
    assert found is not None
    homes, proven, _ = found
    assert feasible(instance, homes)
    value = latency(instance, homes) if alone else max_load(instance, homes)
    assert value >= bound(instance, alone) * (1 - 1e-12)
    if name == "ideal-dp":
        assert proven
        assert value == pytest.approx(8.2 if alone else 4.1)


def test_bounds() -> None:
    assert bound(toy(), alone=False) == pytest.approx(8 / 2.1)  # a CPU is worth a tenth
    assert bound(toy(), alone=True) == 8.0


def rows(text: str) -> list[Mapping[str, object]]:
    return [json.loads(line) for line in text.splitlines()]


@pytest.mark.nightly
def test_a_row_for_each_planner_and_variant(tmp_path: Path) -> None:
    data = written(tmp_path)
    reference = {"LayerGraphs_toy": {"best_known": 4.1, "lower_bound": 4.0}}
    (data / "reference.json").write_text(json.dumps({"throughput": reference}))
    options = ["--data", str(data), "--partitioner", "naive", "--partitioner", "ideal-dp"]
    found = CliRunner().invoke(main, [*options, "--json", "--unlike", "1"], catch_exceptions=False)
    each = rows(found.stdout)
    assert [row["instance"] for row in each] == 2 * ["throughput/LayerGraphs_toy"] + 2 * [
        "throughput/LayerGraphs_toy+unlike0"
    ]
    assert all(set(row) >= FIELDS for row in each)
    assert (each[1]["value"], each[1]["best_known"], each[1]["bound"]) == (4.1, 4.1, 4.0)
    assert each[1]["feasible"] is True
    assert each[1]["ratio"] == 1.0


@pytest.mark.nightly
def test_the_table_for_people(tmp_path: Path) -> None:
    options = ["--data", str(written(tmp_path, "latency")), "--partitioner", "ideal-dp"]
    found = CliRunner().invoke(main, options, catch_exceptions=False)
    assert "latency/LayerGraphs_toy" in found.stdout
    assert "x best 1.0000" in found.stdout
    assert "1 of 1 feasible" in found.stdout


def test_a_planner_that_takes_too_long_is_stopped() -> None:
    row = measure("toy", toy(60), "mcmc", 0.05)
    assert row.value is None
    assert row.note == "out of time"


def test_the_best_of_the_run_is_known_where_nothing_is_published() -> None:
    found = compared(
        [
            Row("toy", "a", 6.0, None, 4.0, 0.1, feasible=True),
            Row("toy", "b", 3.0, None, 4.0, 0.1, feasible=False),
            Row("toy", "c", None, None, 4.0, 0.1, feasible=False),
        ],
        {},
    )
    assert [row.best_known for row in found] == [6.0, 6.0, 6.0]
    assert [row.ratio for row in found] == [1.0, 0.5, None]
    assert found[0].gap == pytest.approx(0.5)


def test_a_missing_folder_is_said(tmp_path: Path) -> None:
    found = CliRunner().invoke(main, ["--data", str(tmp_path / "nowhere")])
    assert found.exit_code == 2
    assert "no folder" in found.stderr
    found = CliRunner().invoke(main, ["--data", str(tmp_path)])
    assert found.exit_code == 2
    assert "no instances" in found.stderr


@pytest.mark.nightly
def test_other_numbers_of_devices_and_a_bound_for_what_fits_nowhere(tmp_path: Path) -> None:
    data = written(tmp_path)
    options = ["--data", str(data), "--json", "--partitioner", "best-load", "--effort", "fast"]
    found = CliRunner().invoke(main, [*options, "--accelerators", "4"], catch_exceptions=False)
    (row,) = rows(found.stdout)
    assert row["instance"] == "throughput/LayerGraphs_toy+k4x1x1"
    assert row["feasible"] is True
    assert row["value"] == pytest.approx(2.2)  # two nodes each, a value in and one out
    found = CliRunner().invoke(main, [*options, "--stack", "12"], catch_exceptions=False)
    assert found.stdout == ""  # the toy is no inference pass


@pytest.mark.nightly
def test_best_load_says_when_it_is_proven_that_nothing_fits() -> None:
    instance = toy()
    tight = replace(instance, kinds=(Kind("accelerator", 2, 3.0),), transfer=(1.0,),
                    nodes=tuple(replace(n, times=n.times[:1]) for n in instance.nodes))  # fmt: skip
    row = measure("toy", tight, "best-load", 60.0)
    assert row.value is None
    assert row.proven
    assert not row.feasible

"""The commands `compare` and `plugins`: rows, JSON, exit codes."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import pytest

from bigbrain_fx.planning import registry as plugins
from tests.support.command_line import call, write_cluster, write_model


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> SimpleNamespace:
    folder = tmp_path_factory.mktemp("files")
    return SimpleNamespace(model=write_model(folder), devices=write_cluster(folder))


@pytest.fixture
def no_costs(monkeypatch: pytest.MonkeyPatch) -> None:
    """Name learned costs that are not there."""
    monkeypatch.setenv("BIGBRAIN_LEARNED_COSTS", "nowhere.json")


@pytest.mark.usefixtures("no_costs")
def test_the_command_prints_a_row_each(files: SimpleNamespace) -> None:
    done = call(
        *("compare", files.model, "--devices", files.devices, "--micro-batches", "4"),
        *("--partitioners", "naive,scattered,learned", "--run", "2", "--rounds", "1"),
    )
    assert done.code == 0, done.err
    lines = done.out.splitlines()
    assert lines[0].startswith("Net: captured once, in ")
    assert lines[1].split()[:2] == ["partitioner", "devices"]
    assert [line.split()[0] for line in lines[2:4]] == ["naive", "scattered"]
    assert lines[4].startswith("learned: expected learned costs, found no readable file")
    assert lines[5] == "naive and scattered: bitwise equal"
    assert lines[6] in ("measured fastest: naive", "measured fastest: scattered")


@pytest.mark.nightly
@pytest.mark.usefixtures("no_costs")
def test_the_command_as_json(files: SimpleNamespace) -> None:
    done = call(
        *("compare", files.model, "--devices", files.devices, "--micro-batches", "4"),
        *("--partitioners", "naive,m-topo,learned", "--json"),
    )
    assert done.code == 0, done.err
    (said,) = done.objects
    assert said["model"] == "Net"
    assert said["best"] in ("naive", "m-topo")
    rows = said["contenders"]
    assert [(row["name"], row["planned"]) for row in rows] == [
        ("naive", True),
        ("m-topo", True),
        ("learned", False),
    ]
    assert set(rows[2]) <= set(rows[0])
    assert rows[0]["rows_per_s"] == pytest.approx(8 / rows[0]["step_s"])
    assert [entry["device"] for entry in rows[0]["devices"]] == ["d0", "d1"]
    assert rows[0]["cut_bytes"] > 0
    assert rows[0]["measured_step_s"] is None
    assert rows[2]["step_s"] is None


def test_nobody_has_a_plan(files: SimpleNamespace, tmp_path: Path) -> None:
    poor = write_cluster(tmp_path, memory="1KiB")
    done = call("compare", files.model, "--devices", poor, "--json")
    assert done.code == 2
    (said,) = done.objects  # the rows are printed all the same
    assert [row["planned"] for row in said["contenders"]] == [False, False]
    assert "no contender has a plan" in done.err
    assert "naive: " in done.err


def test_forecasts_of_two_judges_are_not_one_scale(
    files: SimpleNamespace, learned_costs: Path
) -> None:
    assert learned_costs.is_file()
    words = ("compare", files.model, "--devices", files.devices)
    done = call(*words, "--partitioners", "analytical,learned", "--micro-batches", "4")
    assert done.code == 0, done.err
    assert "the forecasts are of several estimators" in done.out
    alone = call(*words, "--partitioners", "learned,naive", "--estimator", "learned")
    assert "several estimators" not in alone.out


def test_the_command_needs_devices(files: SimpleNamespace) -> None:
    done = call("compare", files.model)
    assert done.code == 2
    assert "add --devices cluster.json" in done.err


def test_plugins_are_listed() -> None:
    done = call("plugins", "--json")
    assert done.code == 0, done.err
    found = {(entry["kind"], entry["name"]): entry for entry in done.objects}
    assert found["partitioner", "chain-dp"]["settings"] == ["block_gap", "gap", "use_all"]
    assert found["partitioner", "naive"]["settings"] == []
    assert found["preset", "analytical"]["what"] == "chain-dp with analytical"
    assert "micro_batches" in found["partitioner", "chain-dp"]["options"]
    assert found["estimator", "analytical"]["package"] == "bigbrain-fx"
    assert {name for kind, name in found if kind == "partitioner"} == set(
        plugins.names("partitioner")
    )
    assert "chain-dp" in call("plugins").out

"""Commands that plan and judge: compare, plugins, auto, assume, pack."""

from __future__ import annotations

import json
import shlex
from pathlib import Path
from types import SimpleNamespace

import pytest

from bigbrain_fx.cli.packing import split_command
from bigbrain_fx.cluster import read_cluster
from bigbrain_fx.plan import read_plan
from bigbrain_fx.planning import registry as plugins
from tests.support.bundles import edit
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


@pytest.mark.nightly
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


# --------------------------------------------------------------------------- --partitioner auto


AUTO = ("--partitioner", "auto", "--effort", "fast")


@pytest.fixture(scope="module")
def bundle(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("auto")
    cluster, model = write_cluster(folder), write_model(folder)
    made = call("split", model, "--devices", cluster, *AUTO, "--out", folder / "bundle", "-v")
    assert made.code == 0, made.err
    assert "auto (throughput, effort fast) compared" in made.out
    return folder / "bundle"


def test_split_writes_a_plan_with_its_search(bundle: Path) -> None:
    plan = read_plan(bundle)
    assert plan.partitioner == "auto"
    assert plan.search is not None
    assert plan.search.winner.step_s == plan.forecast.step_s
    assert json.loads((bundle / "plan.json").read_bytes())["search"]["effort"] == "fast"


def test_explain_shows_the_runners_up_and_the_gap(bundle: Path) -> None:
    text, (found,) = call("explain", bundle).out, call("explain", bundle, "--json").objects
    search = found["search"]
    for each in search["others"]:
        assert each["why"] in text
    for bound in search["bounds"]:
        assert f"no {bound['covers']} is faster than {bound['step_s']:.4g} s" in text
        assert f"within {bound['gap']:.1%}" in text


@pytest.mark.nightly
def test_estimate_takes_an_objective(bundle: Path) -> None:
    folder = bundle.parent
    words = (folder / "model.py", "--devices", folder / "cluster.json", *AUTO, "--json")
    (found,) = call("estimate", *words, "--objective", "latency").objects
    assert found["search"]["objective"] == "latency"
    assert found["micro_batches"] <= 2


def test_an_unknown_effort_is_bad_input(bundle: Path) -> None:
    folder = bundle.parent
    words = (folder / "model.py", "--devices", folder / "cluster.json", "--effort", "heroic")
    assert call("estimate", *words).code == 2


# --------------------------------------------------------------------------- --assume and --opaque


MODEL = """import torch
from torch import nn


class Part(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, x):
        return self.linear(x).relu()


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.first = nn.Linear(4, 4)
        self.part = Part()
        self.last = nn.Linear(4, 1)

    def forward(self, x):
        h = self.part(self.first(x))
        if x.sum() > 0:
            h = h * 2
        return self.last(h).square().mean()


def model():
    return Net()


def example_batch():
    return {"x": torch.linspace(-1, 3, 32).view(8, 4)}
"""
LINE = next(i for i, line in enumerate(MODEL.splitlines(), 1) if "x.sum() > 0" in line)
ONE = ("--partitioner", "naive", "--micro-batches", "1")


def test_a_branch_is_assumed_checked_and_verified(tmp_path: Path) -> None:
    model, cluster = write_model(tmp_path, MODEL, "branch.py"), write_cluster(tmp_path)
    bundle = tmp_path / "bundle"
    where = ("--devices", cluster, "--out", bundle)
    given = ("--assume", f"branch.py:{LINE}=true", "--opaque", "Part")
    made = call("split", model, *where, *ONE, *given)
    assert made.code == 0, made.err
    assert f"warning: assumed True at branch.py:{LINE}: if x.sum() > 0" in made.err
    assert "\ndata: the example batch" in made.out
    texts = "".join((bundle / f"device_d{i}.py").read_text() for i in range(2))
    assert f'assume(x.sum() > 0, "branch.py:{LINE}")' in texts
    assert "self.part(" in texts
    assert call("verify", bundle, "--steps", "2").code == 0
    edit(bundle / "training.py", "batches = example_batches", "_same = example_batches")
    with (bundle / "training.py").open("a") as file:
        file.write("\n\ndef contrary(seed):\n    for batch in _same(seed):\n")
        file.write("        yield {name: -tensor for name, tensor in batch.items()}\n")
    edit(bundle / "train.py", "training.batches", "training.contrary")
    failed = call("run", bundle, "--steps", "1")
    assert failed.code == 2
    assert "Traceback" not in failed.err
    assert "`split --opaque CLASS` keeps whole; split again" in failed.err
    assert f"branch.py:{LINE}: this was True for the example batch" in failed.err


@pytest.mark.nightly
def test_an_estimate_needs_the_answer(tmp_path: Path) -> None:
    model, cluster = write_model(tmp_path, MODEL, "branch.py"), write_cluster(tmp_path)
    refused = call("estimate", model, "--devices", cluster)
    assert refused.code == 4
    assert "error[BX0101a]: " in refused.err
    assert f"--assume branch.py:{LINE}=false" in refused.err
    told = call("estimate", model, "--devices", cluster, "--assume", f"branch.py:{LINE}=true")
    assert told.code == 0, told.err


@pytest.mark.parametrize(
    ("option", "value", "says"),
    [
        ("--assume", "branch.py=true", "FILE:LINE=true"),
        ("--opaque", "Prt", "did you mean Part"),
    ],
)
def test_words_that_mean_nothing(tmp_path: Path, option: str, value: str, says: str) -> None:
    model, cluster = write_model(tmp_path, MODEL, "branch.py"), write_cluster(tmp_path)
    done = call("estimate", model, "--devices", cluster, option, value)
    assert done.code == 2
    assert says in done.err


# --------------------------------------------------------------------------- pack


def test_a_bundle_and_a_model_share_a_cluster(bundle: Path, tmp_path: Path) -> None:
    model = write_model(tmp_path)
    words = ("pack", bundle, model, "-d", write_cluster(tmp_path), "--steps", "10", "--steps", "20")
    done = call(*words, "--json", "--out", tmp_path / "parts")
    assert done.code == 0, done.err
    (found,) = done.objects
    assert [job["name"] for job in found["jobs"]] == ["bundle", "model"]
    assert {name for job in found["jobs"] for name in job["devices"]} == {"d0", "d1"}
    assert found["is_exact"]
    assert found["jobs"][1]["ends_s"] == 20 * found["jobs"][1]["step_s"]
    parts = [read_cluster(tmp_path / "parts" / f"{name}.json") for name in ("bundle", "model")]
    assert [len(part.devices) for part in parts] == [1, 1]
    again = call(*words, "--out", tmp_path / "parts")
    assert again.code == 2
    assert "exists already" in again.err


def test_the_printed_command_splits_the_model_of_a_bundle(bundle: Path) -> None:
    said = split_command(str(bundle), "a b", Path("parts/a b.json"))
    model = read_plan(bundle).source.path
    assert shlex.split(said)[:5] == ["bigbrain-fx", "split", model, "--devices", "parts/a b.json"]
    assert split_command("m.py:model", "m", Path("m.json")).startswith("bigbrain-fx split m.py:mod")


def test_bad_input(tmp_path: Path) -> None:
    model, cluster = write_model(tmp_path), write_cluster(tmp_path)
    one = call("pack", model, "-d", cluster)
    assert one.code == 2
    assert "expected several jobs, found 1" in one.err
    steps = call("pack", model, model, "-d", cluster, *["--steps", "1"] * 3)
    assert steps.code == 2
    assert "found 3 numbers" in steps.err

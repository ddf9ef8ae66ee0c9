"""What newcomers stumbled over: each case is answered at once, with an edit, or simply works."""

from __future__ import annotations

import json
from dataclasses import dataclass, replace
from pathlib import Path

import pytest

from bigbrain_fx.bundles import estimate, require_gpus
from bigbrain_fx.bundles.session_devices import require_session
from bigbrain_fx.core import Cluster, Costs, Graph, Placement
from bigbrain_fx.errors import InputError
from bigbrain_fx.plan import Options
from bigbrain_fx.runtime import rendezvous
from bigbrain_fx.runtime.coded import CodedError
from tests.support.command_line import CHOICES, call, write_cluster, write_model
from tests.support.synthetic import device

MINE = '''
from dataclasses import dataclass, replace
from bigbrain_fx.core import Placement

@dataclass(frozen=True)
class Last:
    """All to one device."""

    which: int = -1
    name = "last"

    def partition(self, graph, cluster, costs):
        home = cluster.devices[self.which].name
        return Placement({op.name: home for op in graph.ops}, "all to one")


class Half:
    name = "half"

    def partition(self, graph, cluster, costs):
        return Placement({graph.ops[0].name: cluster.devices[0].name})
'''


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with a model, a cluster and partitioners, which is the working folder."""
    monkeypatch.chdir(tmp_path)
    write_model(tmp_path)
    write_cluster(tmp_path)
    (tmp_path / "mine.py").write_text(MINE)
    return tmp_path


# --------------------------------------------------------------------------- what a model is


@pytest.mark.parametrize(
    "name", ["config.json", "model.safetensors", "", "model.safetensors.index.json"]
)
def test_a_forgotten_hf_is_said(here: Path, name: str) -> None:
    folder = here / "ckpt"
    folder.mkdir()
    for each in ("config.json", "model.safetensors", "model.safetensors.index.json"):
        (folder / each).write_text("{}")
    done = call("estimate", Path("ckpt") / name, "--devices", "cluster.json")
    assert done.code == 2
    assert "help: a Hugging Face configuration is named by hf:ckpt" in done.err
    assert ("--weights ckpt" in done.err) == ("safetensors" in name)


def test_another_kind_of_file_is_no_model(here: Path) -> None:
    done = call("estimate", "cluster.json", "-d", "cluster.json")
    assert done.code == 2
    assert "expected a model file that ends in .py or .onnx, found cluster.json" in done.err


# --------------------------------------------------------------------------- partitioners


def estimated(*words: str) -> str:
    done = call("estimate", "model.py", "-d", "cluster.json", "--json", *words)
    assert done.code == 0, done.err
    return " ".join(entry["device"] for entry in done.objects[0]["devices"])


@pytest.mark.nightly
def test_a_partitioner_of_ones_own_needs_no_package(
    here: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    loud = MINE.replace("home = ", 'print("as it places")\n        home = ')
    (here / "mine.py").write_text(f'print("as it is read")\n{loud}')
    assert estimated("--partitioner", "mine.py:Last", "--set", "which=0") == "d0"


@pytest.mark.usefixtures("here")
def test_inference_has_no_backward_to_split() -> None:
    words = ("estimate", "model.py", "-d", "cluster.json", "--mode", "eval", "--schedule")
    refused = call(*words, "zb-h1")
    assert refused.code == 2
    assert "schedule 'zb-h1' splits backwards, and inference has none" in refused.err


_REFUSED = {
    ("mine.py:Lst",): "choose one of mine.py:Half, mine.py:Last",
    ("mine.py",): "mine.py has 2 partitioners",
    ("theirs.py:Last",): "expected a partitioner in theirs.py, found no such file",
    ("mine.py:Last", "--set", "which=7"): "failed: IndexError",
    ("mine.py:Half",): "every op goes to a device of the cluster",
    ("metis",): "did you mean m-etf? choose one of analytical, auto, chain-dp",
    ("chain-dp", "--set", "gap=much"): "expected a number, found 'much'",
    ("chain-dp", "--set", "gap=NaN"): "expected a number, found NaN",
    ("chain-dp", "--set", "gap=-1"): "expected 0 or more, found -1",
    ("chain-dp", "--set", "gpa=1"): "chain-dp takes block_gap=0.04, gap=0.001, use_all=false",
    ("chain-dp", "--set", "seed=1"): "help: --seed says it",
    ("chain-dp", "--set", "gap"): "expected NAME=VALUE, found 'gap'",
    ("naive", "--set", "gap=1"): "naive has nothing to set",
    ("auto", "--set", "gap=1"): "auto has nothing to set",
}


@pytest.mark.usefixtures("here")
@pytest.mark.parametrize("words", _REFUSED, ids=" ".join)
def test_values_that_are_no_partitioner(words: tuple[str, ...]) -> None:
    done = call("estimate", "model.py", "-d", "cluster.json", "--partitioner", *words)
    assert done.code == 2
    assert _REFUSED[words] in done.err
    assert "Traceback" not in done.err


@dataclass(frozen=True)
class Mine:
    """A partitioner as an object in Python."""

    where: str
    name = "mine"

    def partition(self, graph: Graph, cluster: Cluster, costs: Costs) -> Placement:
        del cluster, costs
        return Placement({op.name: self.where for op in graph.ops})


def test_an_object_is_a_partitioner_too(here: Path) -> None:
    plan = estimate(here / "model.py", here / "cluster.json", Options(Mine("d1")))
    assert (plan.partitioner, plan.stages.devices) == ("mine", ("d1",))
    with pytest.raises(InputError, match="but is none"):
        estimate(here / "model.py", here / "cluster.json", Options(3))  # type: ignore[arg-type]


def test_a_missing_package_is_named_before_the_model_runs(
    here: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_model(here, "raise AssertionError('the model file was run')\n")
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    (here / "needy.py").write_text(
        "class Needy:\n"
        "    name, needs = 'needy', ('ortools',)\n"
        "    def partition(self, graph, cluster, costs): ...\n"
    )
    done = call("estimate", "model.py", "-d", "cluster.json", "--partitioner", "needy.py:Needy")
    assert done.code == 2
    assert "needs ortools, which is not installed\n  help: pip install ortools" in done.err


# --------------------------------------------------------------------------- flags and files


def test_a_plan_is_written_and_a_bundle_is_named_by_its_plan(here: Path, bundle: Path) -> None:
    done = call("estimate", "model.py", "-d", "cluster.json", "-o", "p.json", *CHOICES)
    assert done.code == 0, done.err
    assert call("explain", "p.json").out == call("explain", bundle).out
    assert (
        "p.json exists already"
        in call("estimate", "model.py", "-d", "cluster.json", "-o", "p.json").err
    )
    assert [path.name for path in here.iterdir() if path.name.startswith(".")] == []
    done = call("export", bundle / "plan.json", "--to", here / "m.safetensors")
    assert done.code == 0, done.err


# --------------------------------------------------------------------------- runs


def test_events_are_kept_where_nobody_is_replaced(bundle: Path, tmp_path: Path) -> None:
    file = tmp_path / "events.jsonl"
    words = ("--steps", "1", "--events", file, "--logs", tmp_path / "logs")
    done = call("run", bundle, "--no-replay", *words)
    assert done.code == 0, done.err
    events = [json.loads(line) for line in file.read_text().splitlines()]
    assert [(e["event"], e.get("device")) for e in events] == [
        ("started", "d0"),
        ("started", "d1"),
        ("finished", None),
    ]


def test_a_gpu_that_is_not_there_is_said_without_frames(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    monkeypatch.setenv("LOCAL_RANK", "1")
    rendezvous.require_gpu(("cuda", "cpu"), 1)
    with pytest.raises(CodedError, match=r"GPU number 1 .* which has 0 GPUs"):
        rendezvous.require_gpu(("cuda", "cuda"), 1)


AT_ONCE = {
    ("split", "--pin", "layers.0=d9"): "there is no device 'd9'",
    ("estimate", "--place", "nothere.json"): "cannot read nothere.json",
    ("split", "--place", "elsewhere.json"): "there is no device 'gpu'",
    (
        "estimate",
        "--pin",
        "head=d1",
        "--partitioner",
        "auto",
    ): "--pin does not go with --partitioner auto",
    ("compare", "--run", "2"): "d0 of this plan is a GPU, and this host has none",
}


@pytest.mark.parametrize("words", AT_ONCE, ids=" ".join)
def test_faults_of_options_are_reported_before_a_capture(
    here: Path, words: tuple[str, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    write_model(here, "raise AssertionError('the model file was run')\n")
    place = {"format": 1, "modules": {"head": "gpu"}}
    (here / "elsewhere.json").write_text(json.dumps(place))
    gpu = {"devices": [{"name": "d0", "host": "a", "preset": "a100-80"}]}
    (here / "gpu.json").write_text(json.dumps(gpu))
    monkeypatch.setattr("bigbrain_fx.bundles.launch.gpus._DEV", here)
    verb, *rest = words
    devices = "gpu.json" if verb == "compare" else "cluster.json"
    done = call(verb, "model.py", "-d", devices, *rest)
    assert done.code == 2
    assert AT_ONCE[words] in done.err


def test_a_host_without_drivers_has_no_gpu_and_with_one_may(tmp_path: Path) -> None:
    gpu, cpu = replace(device("d0"), kind="cuda"), device("d1")
    require_gpus([cpu], tmp_path)
    with pytest.raises(InputError, match="d0 of this plan is a GPU, and this host has none"):
        require_gpus([gpu, cpu], tmp_path)
    (tmp_path / "nvidiactl").touch()
    require_gpus([gpu, cpu], tmp_path)


def test_a_session_is_refused_before_a_model_is_captured() -> None:
    gpu, near, far = replace(device("g"), kind="cuda"), device("d0"), device("d1", host="far")
    for devices, words in (((gpu,), "go over nccl"), ((near, far), "devices of 2 hosts")):
        with pytest.raises(InputError, match=words):
            require_session(devices)
    require_session((gpu,), backend="gloo")
    with pytest.raises(InputError, match="not in groups"):
        require_session((near,), Options(tensor=2))


@pytest.mark.parametrize("more", [("--partitioner", "naive"), ("--set", "last=0")])
def test_beside_a_placement_no_partitioner_is_asked(more: tuple[str, str]) -> None:
    done = call("split", "model.py", "--devices", "c.json", "--place", "p.json", *more)
    assert done.code == 2
    assert f"{more[0]} is for a partitioner" in done.err

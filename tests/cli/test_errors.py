"""Errors on the command line: codes, exit codes, and all that there is to read."""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path

import pytest

from bigbrain_fx.__main__ import main
from bigbrain_fx.cli import group
from bigbrain_fx.errors import (
    BigBrainError,
    CaptureError,
    FormatWarning,
    InputError,
    NoPlanError,
    ScheduleError,
    VerificationError,
    from_fields,
    os_error_as,
)
from bigbrain_fx.plan import read_plan
from tests.support.command_line import (
    CHOICES,
    MODEL,
    Called,
    call,
    files,
    write_cluster,
    write_model,
)
from tests.support.messages import shows


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with a good model file and a good cluster.json, and the place to be."""
    monkeypatch.chdir(tmp_path)
    write_model(tmp_path)
    write_cluster(tmp_path)
    return tmp_path


def refused(
    folder: Path, *more: str | Path, model: str = "model.py", devices: str = "cluster.json"
) -> Called:
    """Split in a folder, which must be as it was before; standard output must be empty."""
    before = files(folder)
    done = call("split", model, "--devices", devices, "--out", "out/b", "--json", *more)
    assert files(folder) == before
    assert done.out == ""
    assert done.err.startswith(("error[", "Usage: "))
    assert "Traceback" not in done.err
    return done


# --------------------------------------------------------------------------- the model file

_CONTROL_FLOW = """
import torch
from torch import nn


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.up = nn.Linear(8, 8)

    def forward(self, x):
        x = self.up(x)
        while x.abs().sum() > 1:
            x = x / 2
        return self.up(x).sum()


def model():
    return Net()


def example_batch():
    return {"x": torch.ones(8, 8)}
"""

_BAD_MODELS = {
    "syntax error": ("def model(:\n    pass\n", "BX2186"),
    "import error": ("import torch\nimport no_such_module\n", "BX2188"),
    "raises in __init__": (MODEL.replace("__init__()", "__init__(); 1 / 0"), "BX2189"),
    "no model": ("import torch\n", "BX2072"),
    "no module": ("def model():\n    return 3\n", "BX2075"),
    "several candidates": (
        "from torch import nn\n\n\nclass A(nn.Module): ...\n\n\nclass B(nn.Module): ...\n",
        "BX2073",
    ),
    "sys.exit": ("import sys\nsys.exit(0)\n", "BX2187"),
    "control flow": (_CONTROL_FLOW, "BX0101b"),
    "no example_batch": (MODEL.replace("def example_batch", "def batch"), "BX2077"),
    "inconsistent example_batch": (MODEL.replace("ones(8, 8)", "ones(8, 7)"), "BX2105"),
}


@pytest.mark.gate("import error")
@pytest.mark.parametrize("case", _BAD_MODELS)
def test_bad_model_file(here: Path, case: str) -> None:
    text, code = _BAD_MODELS[case]
    write_model(here, text)
    done = refused(here, "--strict")
    assert done.code == (4 if case == "control flow" else 2)
    shows(code, done.err)
    assert "\n  help: " in done.err


@pytest.mark.nightly
def test_the_error_is_all_there_is_to_read(here: Path, capfd: pytest.CaptureFixture[str]) -> None:
    write_model(here, _CONTROL_FLOW)
    done = refused(here, "--strict")
    said = capfd.readouterr()  # torch would log tracebacks of its own, in the child process
    assert done.code == 4
    assert said.out + said.err == ""


def test_missing_model_file(here: Path) -> None:
    done = refused(here, model="modle.py")
    assert done.code == 2
    shows("BX2067", done.err)


@pytest.mark.nightly
def test_slow_model_file(here: Path) -> None:
    write_model(here, "import threading\nthreading.Event().wait()\n")
    done = refused(here, "--time-limit", "0.5")
    assert done.code == 2
    shows("BX2031", done.err)


@pytest.mark.nightly
def test_batch_that_micro_batches_do_not_divide(here: Path) -> None:
    done = refused(here, "--micro-batches", "3")
    assert done.code == 2
    shows("BX1252", done.err)


# --------------------------------------------------------------------------- the cluster file

_BAD_CLUSTERS = {
    "not JSON": ("devices: d0", r"JSON"),
    "unknown field": (
        '{"devices": [{"name": "d0", "memory_bandwith": "1GB/s"}]}',
        r"memory_bandwith(.|\n)*memory_bandwidth",
    ),
    "huge": (" " * (70 * 2**20), r"MiB|large|big"),
}
"""Faults of each kind are in tests/cluster; here, what the command makes of some."""


@pytest.mark.parametrize("case", _BAD_CLUSTERS)
def test_bad_cluster_file(here: Path, case: str) -> None:
    text, pattern = _BAD_CLUSTERS[case]
    (here / "cluster.json").write_text(text)
    done = refused(here)
    assert done.code == 2
    assert re.search(pattern, done.err), done.err
    assert "cluster.json" in done.err
    assert "\n  help: " in done.err
    assert len(done.err) < 2000


def test_missing_cluster_file(here: Path) -> None:
    done = refused(here, devices="clutser.json")
    assert done.code == 2
    assert "clutser.json" in done.err


# --------------------------------------------------------------------------- options

_BAD_OPTIONS = {
    ("--partitioner", "navie"): "BX1113",
    ("--estimator", "analitical"): "BX1113",
    ("--schedule", "1f2b"): "BX3012",
    ("--schedule", "x"): "BX3012",
}
_BAD_WORDS = {
    ("--seed", "-1"): "Invalid value for '--seed'",
    ("--time-limit", "0"): "Invalid value for '--time-limit'",
    ("--micro-batch", "4"): "'--micro-batches'",
}


@pytest.mark.parametrize("words", [*_BAD_OPTIONS, *_BAD_WORDS], ids=" ".join)
def test_bad_option_is_found_before_the_model_runs(here: Path, words: tuple[str, str]) -> None:
    write_model(here, "raise AssertionError('the model file was run')\n")
    done = refused(here, *words)
    assert done.code == 2
    if words in _BAD_OPTIONS:
        shows(_BAD_OPTIONS[words], done.err)
    else:
        assert _BAD_WORDS[words] in done.err


def test_unknown_command_and_missing_devices() -> None:
    assert call("splitt").code == 2
    done = call("split", "model.py")
    assert done.code == 2
    shows("BX3014", done.err)


# --------------------------------------------------------------------------- it does not fit


@pytest.mark.nightly
@pytest.mark.parametrize("partitioner", ["analytical", "naive"])
def test_a_model_that_does_not_fit(here: Path, partitioner: str) -> None:
    write_cluster(here, memory="2KiB")
    done = refused(here, "--partitioner", partitioner)
    assert done.code == 3
    notes = [line for line in done.err.splitlines() if line.startswith("  note: ")]
    assert any("d0" in note for note in notes)
    assert any("d1" in note for note in notes)
    assert re.search(r"needs .*KiB|needs .*MiB|\d+ bytes", done.err)
    assert "\n  help: " in done.err


# --------------------------------------------------------------------------- --out


def _split(out: str | Path, *more: str) -> Called:
    return call("split", "model.py", "--devices", "cluster.json", "--out", out, *CHOICES, *more)


def test_out_exists(here: Path) -> None:
    (here / "b").mkdir()
    (here / "b" / "thesis.txt").write_text("years of work")
    before = files(here)
    for more, code in (
        ((), "BX3607"),
        (("--force",), "BX3608"),
    ):
        done = _split("b", *more)
        assert done.code == 2
        shows(code, done.err)
        assert files(here) == before


def test_a_folder_that_only_has_a_plan_json_is_no_bundle(here: Path) -> None:
    (here / "b").mkdir()
    (here / "b" / "plan.json").write_text("{}")
    shows("BX3608", _split("b", "--force").err)
    assert (here / "b" / "plan.json").read_text() == "{}"


@pytest.mark.parametrize("target", ["elsewhere", "nowhere"])
def test_out_is_a_link(here: Path, target: str) -> None:
    (here / "elsewhere").mkdir()
    (here / "b").symlink_to(target)
    for more in ((), ("--force",)):
        done = _split("b", *more)
        assert done.code == 2
        shows("BX3606", done.err)
    assert list((here / "elsewhere").iterdir()) == []


def test_out_cannot_be_written(here: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_model(here, "raise AssertionError('the model file was run')\n")
    before = files(here)
    done = _split("model.py/b")
    assert done.code == 2
    shows("BX3021", done.err)
    monkeypatch.setattr("os.access", lambda path, mode: False)  # tests may run as root
    done = _split("deep/b")
    assert done.code == 2
    shows("BX3022", done.err)
    assert files(here) == before


# --------------------------------------------------------------------------- plans


@pytest.mark.parametrize("command", ["explain", "simulate", "run", "verify"])
def test_a_path_that_is_missing_or_no_bundle(tmp_path: Path, command: str) -> None:
    (tmp_path / "folder").mkdir()
    for name, remedy in (
        ("nothing", "give a bundle folder or a plan.json"),
        ("folder", "give a bundle; if this is one, files of it are missing"),
    ):
        done = call(command, tmp_path / name)
        assert done.code == 2
        shows("BX1264", done.err)
        assert f"help: {remedy}" in done.err


def test_a_bundle_of_nearly_that_name_is_named(tmp_path: Path) -> None:
    (tmp_path / "bundle").mkdir()
    (tmp_path / "bundle" / "plan.json").touch()
    done = call("run", tmp_path / "bundel")
    assert f"help: did you mean {tmp_path}/bundle?" in done.err


def test_a_model_file_is_no_bundle(tmp_path: Path) -> None:
    (tmp_path / "model.py").write_text("def model(): ...")
    done = call("run", tmp_path / "model.py")
    assert done.code == 2
    assert "help: this is a model file: give the bundle that `bigbrain-fx split" in done.err


@pytest.mark.parametrize("folder", [None, "commits"])
def test_a_run_is_resumed_from_a_folder(tmp_path: Path, bundle: Path, folder: str | None) -> None:
    whole = tmp_path / "bundle"
    whole.mkdir()
    (whole / "plan.json").write_bytes((bundle / "plan.json").read_bytes())
    if folder is not None:
        (whole / folder).mkdir()
    done = call("run", whole, "--resume")
    shows("BX3522", done.err)
    own = f"{whole}/commits" if folder else "checkpoints"
    assert f"help: add --checkpoint-dir {own}" in done.err


_BAD_PLANS = {
    "broken": ('{"graph": ', "BX1260"),
    "a list": ("[]", "BX1260"),
    "a field missing": ("{}", "BX1260"),
    "newer": ('{"format": 3, "more": 1}', "BX1262"),
}


@pytest.mark.parametrize("case", _BAD_PLANS)
@pytest.mark.parametrize("command", ["explain", "simulate", "run", "verify"])
def test_bad_plan(tmp_path: Path, command: str, case: str) -> None:
    text, code = _BAD_PLANS[case]
    (tmp_path / "plan.json").write_text(text)
    done = call(command, tmp_path)
    assert done.code == 2
    shows(code, done.err)
    assert "plan.json" in done.err
    assert "Traceback" not in done.err


@pytest.mark.parametrize(("change", "named"), [({"format": 1}, "format 1"), ({"old": 0}, ": old")])
def test_a_plan_of_an_earlier_version_is_read_with_one_note(
    here: Path, bundle: Path, change: dict[str, object], named: str
) -> None:
    plan = json.loads((bundle / "plan.json").read_text())
    (here / "earlier.json").write_text(json.dumps({**plan, **change}))
    present, earlier = call("explain", bundle), call("explain", "earlier.json")
    assert (earlier.code, earlier.out) == (0, present.out)
    assert present.err == ""
    assert earlier.err.count("note: earlier.json has ") == earlier.err.count("\n") == 1
    assert named in earlier.err
    with pytest.warns(FormatWarning, match=named):
        read_plan("earlier.json")


def test_a_plan_of_another_type_or_for_another_cluster(here: Path, bundle: Path) -> None:
    plan = json.loads((bundle / "plan.json").read_text())
    (here / "bad.json").write_text(json.dumps({**plan, "micro_batches": "many"}))
    done = call("explain", "bad.json")
    assert done.code == 2
    assert "at: bad.json: micro_batches" in done.err
    words = ("simulate", bundle, "--devices", write_cluster(here, count=1))
    done = call(*words)
    assert done.code == 2
    shows("BX3023", done.err)
    assert call(*words, "--again").code == 0
    assert call("simulate", bundle, "--again").code == 2
    write_cluster(here, memory="2KiB")
    assert call(*words).code == 3


def test_ctrl_c_while_the_command_line_is_imported(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    class Pressed:
        def find_spec(self, name: str, *_: object) -> None:
            if name == "bigbrain_fx.cli":
                raise KeyboardInterrupt

    monkeypatch.delitem(sys.modules, "bigbrain_fx.cli", raising=False)
    monkeypatch.setattr(sys, "meta_path", [Pressed(), *sys.meta_path])
    with pytest.raises(SystemExit) as ended:
        main()
    assert ended.value.code == 130
    assert capsys.readouterr().err == "stopped\n"


# --------------------------------------------------------------------------- codes


KINDS = BigBrainError, InputError, NoPlanError, CaptureError, VerificationError, ScheduleError


@pytest.mark.parametrize("kind", KINDS)
def test_error_of_a_child_process_is_the_same_here(kind: type[BigBrainError]) -> None:
    error = kind("it is so", code="BX0160c", at="a:1", notes=("one", "two"), help="do it")
    found = from_fields(error.fields)
    assert type(found) is kind
    assert found.fields == error.fields
    assert (found.code, found.family) == ("BX0160c", "BX0160")


def test_code_of_a_refusal_that_is_left_for_later_is_that_of_the_refusal() -> None:
    made: list[str] = []

    def make() -> NoPlanError:
        made.append("once")
        return NoPlanError("none fits", code="BX1406")

    error = NoPlanError.later(make)
    assert made == []
    assert (error.code, error.what) == ("BX1406", "none fits")
    assert made == ["once"]


def test_error_of_a_plug_in_needs_no_code() -> None:
    error = InputError("mine", help="mend it")
    assert (error.code, error.family) == (None, None)
    assert error.headline == "error: mine\n  help: mend it"
    assert from_fields(error.fields).code is None


def test_os_error_has_the_code_of_the_place(tmp_path: object) -> None:
    with (
        pytest.raises(InputError) as caught,
        os_error_as("cannot read it", code="BX1001", help="look at it"),
    ):
        open(f"{tmp_path}/none", encoding="utf-8").close()
    assert (caught.value.code, caught.value.at) == ("BX1001", f"{tmp_path}/none")


def test_command_line_shows_the_code(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object, **__: object) -> None:
        raise CaptureError("it cannot be", code="BX0199d", at="a.py:3")

    monkeypatch.setattr(group.cli, "main", fail)
    done = call("split")
    assert (done.code, done.err) == (4, "error[BX0199d]: it cannot be\n  at: a.py:3\n")

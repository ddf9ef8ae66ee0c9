"""Model files: loaded, captured in a child process, and refused with a line and a remedy."""

from __future__ import annotations

import importlib
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from bigbrain_fx.errors import BigBrainError, CaptureError, InputError
from bigbrain_fx.frontend import Child, Task, capture_file, load_model_file
from bigbrain_fx.frontend.users_code import users_folder

HEAD = """\
import torch
from torch import nn

"""
GOOD = (
    HEAD
    + """\
class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.first = nn.Linear(4, 4)
        self.second = nn.Linear(4, 4)
        self.second.weight = self.first.weight

    def forward(self, x):
        print("hello")
        return self.second(self.first(x).relu())

def model():
    return Net()

def example_batch():
    return {"x": torch.randn(6, 4), "y": torch.randn(6, 4), "scale": 0.5}

def loss(output, batch):
    return (output - batch["y"]).square().mean() * batch["scale"]

clip_norm = 1
print("loading")
"""
)
BATCH = "def example_batch():\n    return (torch.randn(2, 4),)\n"


def write(folder: Path, text: str, name: str = "model.py") -> Path:
    path = folder / name
    path.write_text(text)
    return path


def test_a_folder_of_data_is_no_package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """torch asks for modules that it can do without: a folder called like one is none of them."""
    (tmp_path / "triton" / "results").mkdir(parents=True)
    (tmp_path / "mine" / "inner").mkdir(parents=True)
    (tmp_path / "mine" / "inner" / "code.py").write_text("x = 1\n")
    monkeypatch.setattr(sys, "meta_path", list(sys.meta_path))
    with users_folder(tmp_path):
        with pytest.raises(ModuleNotFoundError, match="No module named 'triton'"):
            importlib.import_module("triton")
        assert importlib.import_module("mine.inner.code").x == 1
    for name in ("mine", "mine.inner", "mine.inner.code"):
        monkeypatch.delitem(sys.modules, name)


@pytest.mark.nightly
@pytest.mark.usefixtures("cold")
def test_capture_file_brings_the_graph_and_later_the_weights(
    tmp_path: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("PYTHONUNBUFFERED", raising=False)  # it would show prints without a flush
    path = write(tmp_path, GOOD, "my_net.py")
    with capture_file(path, time_limit_s=120) as session:
        assert session.graph.loss
        assert session.graph.static_batch is None
        assert [entry.name for entry in session.graph.inputs] == ["x", "y"]
        facts = session.facts
        assert (facts.name, facts.module, facts.parameters) == ("model", "my_net", 24)
        assert (facts.has_loss, facts.has_batches, facts.clip_norm) == (True, False, 1.0)
        assert session.warnings == ()
        assert 0 < session.capture_s < 60
        assert (
            next(op for op in session.graph.ops if "linear" in op.target).source == "my_net.py:13"
        )
        names = [param.name for param in session.graph.params]
        session.write_weights(tmp_path, {"all.safetensors": names, "one.safetensors": names[:1]})
        session.write_batch(tmp_path / "batch.safetensors")
        with pytest.raises(InputError, match="no tensors nothing"):
            session.write_weights(tmp_path, {"x.safetensors": ["nothing"]})
        session.write_weights(tmp_path, {"after.safetensors": names})  # an error ends no session
    weights = load_file(tmp_path / "all.safetensors")
    assert sorted(weights) == ["first.bias", "first.weight", "second.bias", "second.weight"]
    assert torch.equal(weights["first.weight"], weights["second.weight"])
    again = load_model_file(path)  # the same seed, the same weights
    assert torch.equal(weights["first.weight"], again.model.state_dict()["first.weight"])
    batch = load_file(tmp_path / "batch.safetensors")
    assert isinstance(again.example_batch, dict)
    assert torch.equal(batch["x"], again.example_batch["x"])
    structure = json.loads((tmp_path / "batch.safetensors.json").read_text())
    assert structure["dict"][2] == ["scale", {"value": 0.5}]
    printed = capfd.readouterr()
    assert printed.err.startswith("loading\nhello\n")


@pytest.mark.nightly
def test_the_parent_imports_no_torch(tmp_path: Path) -> None:
    path = write(tmp_path, GOOD)
    code = (
        "import sys; from bigbrain_fx.frontend import capture_file\n"
        "with capture_file(sys.argv[1], meta=True) as session: pass\n"
        "assert 'torch' not in sys.modules\nprint(len(session.graph.ops))"
    )
    command = [sys.executable, "-c", code, str(path)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=True)
    assert int(done.stdout) > 4


@pytest.mark.nightly
def test_meta_has_no_weights_to_write(tmp_path: Path) -> None:
    path = write(tmp_path, GOOD)
    with capture_file(path, meta=True) as session:
        assert session.facts.parameters == 24
        with pytest.raises(InputError, match="captured without weights"):
            session.write_weights(tmp_path, {"x.safetensors": ["first.weight"]})


@pytest.mark.parametrize(
    ("body", "what", "at"),
    [
        ("import sys\nsys.exit(3)\n", "sys.exit(3)", "model.py:2"),
        ("import os\nos._exit(7)\n", "exit code 7", "model.py"),
        ("import os, signal\nos.kill(os.getpid(), signal.SIGKILL)\n", "SIGKILL", "model.py"),
    ],
)
def test_a_file_that_ends_its_process(tmp_path: Path, body: str, what: str, at: str) -> None:
    with pytest.raises(InputError) as caught:
        capture_file(write(tmp_path, body), time_limit_s=120)
    assert what in caught.value.what
    assert at in (caught.value.at or "")
    assert caught.value.help


def test_a_file_that_takes_too_long(tmp_path: Path) -> None:
    path = write(tmp_path, "import threading\nthreading.Event().wait()\n")
    with pytest.raises(InputError, match=r"took longer than 1 s"):
        capture_file(path, time_limit_s=1)


@pytest.mark.nightly
def test_errors_of_the_child_arrive_as_they_are(tmp_path: Path) -> None:
    text = (
        HEAD
        + BATCH
        + (
            "class model(nn.Module):\n    def forward(self, x):\n"
            "        if x.sum() > 0:\n            return x.sum()\n        return x.mean()\n"
        )
    )
    with pytest.raises(CaptureError, match="reads a tensor's value") as caught:
        capture_file(write(tmp_path, text), time_limit_s=120)
    assert caught.value.at == "model.py:8"
    assert caught.value.exit_code == 4


def test_missing_file_lists_what_is_there(tmp_path: Path) -> None:
    write(tmp_path, GOOD, "net.py")
    with pytest.raises(
        InputError, match=r"expected a model file at .*nte\.py, found nothing"
    ) as caught:
        capture_file(tmp_path / "nte.py")
    assert caught.value.notes == ("Python files there: net.py",)
    with pytest.raises(InputError, match="found a folder"):
        load_model_file(tmp_path)
    with pytest.raises(InputError, match="expected a Python name after the colon"):
        load_model_file(f"{tmp_path}/net.py:a b")


@pytest.mark.parametrize(
    ("name", "what"), [("a\nb", "has a line break"), (os.fsdecode(b"x\xff"), "is not UTF-8")]
)
def test_a_path_that_no_stack_trace_can_hold_is_named(tmp_path: Path, name: str, what: str) -> None:
    folder = tmp_path / name
    folder.mkdir()
    with pytest.raises(InputError, match=what) as caught:
        capture_file(write(folder, GOOD))
    assert "copy the model file" in str(caught.value.help)


def test_output_of_pythons_start_is_no_message(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """As where a site greets: it comes before the child keeps its stdout for messages."""
    (tmp_path / "greets.py").write_text("print('a site that greets')\nprint('{\"a\": 1}')\n")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    task = Task("greets", "the test", "the test {}", "wait", "look", limit_s=60.0)
    with Child(task, {}) as child:
        assert child.answer() == {"a": 1}
    assert "a site that greets" in capfd.readouterr().err


NET = "class {name}(nn.Module):\n    def __init__(self{extra}):\n        super().__init__()\n"

BAD = {  # text of the file -> (what, at, in notes)
    HEAD + "def model(:\n": ("syntax error", "model.py:4", ""),
    "import nothing_like_it\n": ("No module named 'nothing_like_it'", "model.py:1", ""),
    HEAD + "x = 1 / 0\n": ("ZeroDivisionError", "model.py:4", ""),
    HEAD + NET.format(name="model", extra="") + "        {}['a']\n" + BATCH: (
        "model() failed: KeyError: 'a'",
        "model.py:7",
        "",
    ),
    HEAD + BATCH: ("defines no torch module at all", "model.py", ""),
    HEAD + BATCH + "def model():\n    return 3\n": ("Module, found int", "model.py:6", "none"),
    HEAD + BATCH + "model = 'gpt'\n": ("Module, found str", "model.py", "none"),
    HEAD + BATCH + NET.format(name="A", extra="") + NET.format(name="B", extra=""): (
        "2 modules could be meant",
        "model.py",
        "model.py:A, model.py:B",
    ),
    HEAD + BATCH + NET.format(name="A", extra=", width"): (
        "A(width) needs arguments",
        "model.py:6",
        "",
    ),
    HEAD + NET.format(name="A", extra=""): (
        "must define `example_batch` or `batches`",
        "model.py",
        "",
    ),
    HEAD + "model = nn.Linear(1, 1)\ndef example_batch():\n    return 3\n": (
        "must give a dict or a tuple, found int",
        "model.py:5",
        "",
    ),
    HEAD + "model = nn.Linear(1, 1)\ndef example_batch():\n    raise OSError('no data')\n": (
        "example_batch() failed: OSError: no data",
        "model.py:6",
        "",
    ),
    HEAD + "model = nn.Linear(1, 1)\ndef batches(seed):\n    return iter([])\n": (
        "batches() must give a dict or a tuple, found NoneType",
        "model.py:5",
        "",
    ),
    HEAD + BATCH + "model = nn.Linear(4, 4)\nclip_norm = -1\n": ("number above 0", "model.py", ""),
    HEAD + BATCH + "model = nn.Linear(4, 4)\nautocast = 'int8'\n": ("bfloat16", "model.py", ""),
    HEAD + BATCH + "model = nn.Linear(4, 4)\ndef batches(seed, rank):\n    yield 1\n": (
        "`batches` is called as batches(seed)",
        "model.py:7",
        "",
    ),
    HEAD + BATCH + "model = nn.Linear(4, 4)\nloss = 3\n": ("must be a function", "model.py", ""),
}


@pytest.mark.parametrize("text", BAD, ids=[what for what, _, _ in BAD.values()])
def test_bad_model_files(tmp_path: Path, text: str) -> None:
    what, at, note = BAD[text]
    with pytest.raises(InputError) as caught:
        load_model_file(write(tmp_path, text))
    error: BigBrainError = caught.value
    assert what in error.what
    assert error.at == at
    assert note in " ".join(error.notes)
    assert error.help


def test_ways_to_name_a_model(tmp_path: Path) -> None:
    other = (
        "other = nn.Linear(4, 2)\nclass Only(nn.Linear):\n"
        "    def __init__(self):\n        super().__init__(4, 3)\n"
    )
    path = write(tmp_path, HEAD + BATCH + other)
    assert load_model_file(f"{path}:other").model.out_features == 2
    assert load_model_file(f"{path}:Only").model.out_features == 3
    with pytest.raises(InputError, match="defines no `Onyl`") as caught:
        load_model_file(f"{path}:Onyl")
    assert "model.py:Only, model.py:other" in caught.value.notes[0]
    single = write(tmp_path, HEAD + BATCH + "net = nn.Linear(4, 5)\n", "single.py")
    assert load_model_file(single).name == "net"


def test_the_first_batch_is_an_example_where_there_is_no_other(tmp_path: Path) -> None:
    text = HEAD + "model = nn.Linear(4, 1)\ndef batches():\n    yield {'x': torch.ones(3, 4)}\n"
    file = load_model_file(write(tmp_path, text))
    assert isinstance(file.example_batch, dict)
    assert file.example_batch["x"].shape == (3, 4)


def test_the_folder_of_the_file_is_importable_while_it_loads(tmp_path: Path) -> None:
    write(tmp_path, "WIDTH = 4\n", "sizes_of_mine.py")
    text = HEAD + "from sizes_of_mine import WIDTH\n" + BATCH + "model = nn.Linear(WIDTH, 1)\n"
    before = list(sys.path)
    assert load_model_file(write(tmp_path, text, "random.py")).path.name == "random.py"
    assert sys.path == before
    import random

    assert hasattr(random, "getstate")  # the standard one: the user's file has another name
    sys.modules.pop("sizes_of_mine")


def test_a_model_that_switches_gradients_off_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "typed.py"
    path.write_text(
        "import torch\n\ndef model():\n    torch.set_grad_enabled(False)\n"
        "    return torch.nn.Linear(2, 2)\n\ndef example_batch():\n    return (torch.ones(4, 2),)\n"
    )
    try:
        with pytest.raises(InputError) as found:
            load_model_file(path)
    finally:
        torch.set_grad_enabled(True)
    assert (found.value.code, found.value.at) == ("BX2103", "typed.py:3")

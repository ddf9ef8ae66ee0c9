"""The same model is captured once; another one, in whatever way, is captured again."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from bigbrain_fx.core import Graph
from bigbrain_fx.frontend.capture_cache.known import Known
from bigbrain_fx.frontend.capture_cache.table import Table
from bigbrain_fx.frontend.capture_service import CaptureService

MODEL = """\
from pathlib import Path

import torch
from torch import nn
from widths_of_test import WIDTH

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.first = nn.Linear(WIDTH, WIDTH)
        self.scale = float(Path("scale.txt").read_text())
        self.register_buffer("shift", torch.ones(WIDTH), persistent=False)

    def forward(self, x):
        return (self.first(x) * self.scale + self.shift).square().mean()

def model():
    return Net()

def example_batch():
    return {"x": torch.randn(6, WIDTH)}

def batches(seed):
    while True:
        yield {"x": torch.full((6, WIDTH), float(Path("data.txt").read_text()))}

def optimizer(params):
    return torch.optim.SGD(params, lr=0.1)
"""


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("known")


@pytest.fixture
def folder(place: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A model file, always in the same place; nothing is known of it."""
    for name in ("answers.sqlite", "answers.sqlite-wal", "answers.sqlite-shm"):
        (place / name).unlink(missing_ok=True)
    (place / "model.py").write_text(MODEL)
    (place / "widths_of_test.py").write_text("WIDTH = 4\n")
    (place / "scale.txt").write_text("1.5")
    (place / "data.txt").write_text("1")
    monkeypatch.chdir(place)
    monkeypatch.setattr(sys, "path", list(sys.path))
    yield place
    sys.modules.pop("widths_of_test", None)


@pytest.fixture(scope="module")
def answers(place: Path) -> dict[str, bytes]:
    """What a capture of that file leaves, once it was made."""
    return {}


@pytest.fixture
def known(folder: Path, answers: dict[str, bytes]) -> Path:
    """The folder, and its model file has been captured."""
    files = ("answers.sqlite", "answers.sqlite-wal", "answers.sqlite-shm")
    if not answers:
        service(folder)
        answers.update({n: (folder / n).read_bytes() for n in files if (folder / n).exists()})
    for name, content in answers.items():
        (folder / name).write_bytes(content)
    return folder


class _Counting(CaptureService):
    """Counts how often a model was traced."""

    captures = 0

    def _capture(self, wanted: Mapping[str, object], blank: bool) -> None:
        _Counting.captures += 1
        super()._capture(wanted, blank)


def service(folder: Path, **other: object) -> CaptureService:
    """Capture as a new process would: with the user's modules run anew."""
    sys.modules.pop("widths_of_test", None)
    _Counting.captures = 0
    default = dict.fromkeys(("meta", "blank"), False) | dict.fromkeys(("micro_batch", "quantize"))
    wanted = {
        "location": str(folder / "model.py"),
        "graph": str(folder / "graph.json"),
        "training": True,
        "seed": 0,
        "assume": {},
        "leaves": [],
        "cache": 0,
        "parts": 1,
        "known": str(folder / "answers.sqlite"),
        "environment": "",
    }
    return _Counting({**default, **wanted, **other})


def graph_and_weights(folder: Path, found: CaptureService) -> tuple[Graph, Mapping[str, object]]:
    names = list(found.captured.tensors)
    found.serve({"do": "weights", "folder": str(folder), "files": {"all.safetensors": names}})
    found.serve({"do": "batch", "path": str(folder / "batch.safetensors")})
    tensors = {**load_file(folder / "all.safetensors"), **load_file(folder / "batch.safetensors")}
    return found.captured.graph, {name: tensor.tolist() for name, tensor in tensors.items()}


def sent(answer: object) -> object:
    """Return an answer as the other process gets it."""
    return json.loads(json.dumps(answer))


def facts(found: CaptureService) -> object:
    return sent(found.report()["facts"])


def test_the_second_capture_is_the_first(folder: Path) -> None:
    first = service(folder)
    expected = graph_and_weights(folder, first), facts(first)
    effect = first.serve({"do": "micro-batches", "count": 2})
    assert _Counting.captures == 1
    again = service(folder)
    assert _Counting.captures == 0
    assert (graph_and_weights(folder, again), facts(again)) == expected
    assert again.serve({"do": "micro-batches", "count": 2}) == sent(effect)


def _other_number(folder: Path) -> dict[str, object]:
    (folder / "scale.txt").write_text("2.5")
    return {}


def _other_module(folder: Path) -> dict[str, object]:
    (folder / "widths_of_test.py").write_text("WIDTH = 5\n")
    return {}


def _other_data(folder: Path) -> dict[str, object]:
    (folder / "data.txt").write_text("2")
    return {}


def _other_text(folder: Path) -> dict[str, object]:
    (folder / "model.py").write_text(MODEL.replace("square()", "abs()"))
    return {}


OTHERS: list[Callable[[Path], dict[str, object]]] = [
    _other_number,
    _other_module,
    _other_data,
    _other_text,
    lambda _: {"seed": 1},
    lambda _: {"environment": "another"},
    lambda _: {"training": False},
]


@pytest.mark.gate("_other_data", "<lambda>2")
@pytest.mark.parametrize("change", OTHERS)
def test_another_model_is_captured_again(
    known: Path, change: Callable[[Path], dict[str, object]]
) -> None:
    other = change(known)
    service(known, **other)
    assert _Counting.captures == 1


def test_a_known_model_is_captured_by_nobody(known: Path) -> None:
    service(known)
    assert _Counting.captures == 0


def test_threads_count(known: Path) -> None:
    before = torch.get_num_threads()
    torch.set_num_threads(before + 1)
    try:
        service(known)
    finally:
        torch.set_num_threads(before)
    assert _Counting.captures == 1


@pytest.mark.parametrize(
    "answer",
    [
        {"checks": [], "why": "it takes too long"},
        {"checks": [{"passed": False}]},
        {"checks": [{"passed": None}]},
        {"effect": {"not_compared": "it is large"}},
    ],
)
def test_an_uncompared_entry_is_asked_again(tmp_path: Path, answer: dict[str, object]) -> None:
    known, asked = Known(Table(tmp_path / "answers.sqlite"), "model"), {"do": "rehearse"}
    assert known.answer(asked, lambda: answer) == answer
    final = {"checks": [{"passed": True}]}
    assert known.answer(asked, lambda: final) == final
    assert known.answer(asked, lambda: answer) == final


LENGTHS = """
class Rows(nn.Module):
    def __init__(self):
        super().__init__()
        self.table = nn.Embedding(5, 3)

    def forward(self, x):
        return self.table(x).square().mean()

def model():
    return Rows()

def batches(seed):
    while True:
        yield from ({"x": torch.ones(6, LENGTH).long()} for LENGTH in SIZES)

def example_batch():
    return {"x": torch.ones(6, 4).long()}

SIZES = (4, 3)
"""


@pytest.mark.nightly
def test_free_lengths_come_back_and_others_are_captured_again(folder: Path) -> None:
    (folder / "model.py").write_text(MODEL + LENGTHS)
    first = service(folder)
    assert _Counting.captures == 1
    again = service(folder)
    assert _Counting.captures == 0
    assert again.captured.graph == first.captured.graph
    assert again.captured.batch.lengths == ("L4",)
    (folder / "model.py").write_text(MODEL + LENGTHS + "SIZES = (4, 5)\n")
    assert service(folder).captured.batch.lengths == ("L5",)
    assert _Counting.captures == 1

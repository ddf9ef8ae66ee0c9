"""Functions of a running program as source: what is carried, and what is refused by name."""

from __future__ import annotations

import functools
import itertools
import linecache
import runpy
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from bigbrain_fx.bundles.carried import as_optimizer, carry
from bigbrain_fx.errors import InputError

_NUMBERS = itertools.count()
RATE = 3e-4
LIMITS = {"low": [float("-inf"), 1], "dtype": (True, None, "x")}


def cell(text: str) -> dict[str, Any]:
    """Run text as a notebook runs a cell: Python can find its lines under a made-up name."""
    name = f"<cell {next(_NUMBERS)}>"
    linecache.cache[name] = len(text), None, text.splitlines(keepends=True), name
    found: dict[str, Any] = {"__name__": "__main__"}
    exec(compile(text, name, "exec"), found)  # a test's own text
    return found


def again(folder: Path, **named: Any) -> dict[str, Any]:
    """Carry something, and run the file elsewhere; return its names."""
    return runpy.run_path(str(carry(named, folder)))


def chosen(name: str) -> bool:
    return not name.endswith("bias")


def grouped(named: Any) -> torch.optim.Optimizer:
    decayed = [p for n, p in named if chosen(n)]
    assert LIMITS["low"]
    return torch.optim.AdamW([{"params": decayed, "weight_decay": 0.5}], lr=RATE)


def maker(rate: float) -> Callable[[Any], torch.optim.Optimizer]:
    return lambda named: torch.optim.SGD([p for _, p in named], lr=rate)


def test_a_function_comes_with_what_it_uses(tmp_path: Path) -> None:
    found = again(tmp_path, optimizer=cell_free(grouped), lr_scale=lambda step: 1 / (step + 1))
    made = found["optimizer"](nn.Linear(2, 2).named_parameters())
    assert [len(group["params"]) for group in made.param_groups] == [1]
    assert made.param_groups[0]["lr"] == RATE
    assert found["LIMITS"] == LIMITS
    assert found["lr_scale"](3) == 0.25


def cell_free(function: Any) -> Any:
    """Return a function of this file as one of a program that no other process can import."""
    names = {**globals(), "__name__": "__main__"}
    exec(compile(Path(__file__).read_text(), __file__, "exec", dont_inherit=True), names)
    return names[function.__name__]


@pytest.mark.parametrize("made", [torch.optim.SGD, functools.partial(torch.optim.AdamW, lr=0.25)])
def test_a_torch_class_with_options(tmp_path: Path, made: Any) -> None:
    optimizer = again(tmp_path, optimizer=as_optimizer(made))["optimizer"]
    kind = getattr(made, "func", made)
    rate = 0.25 if kind is torch.optim.AdamW else 1e-3
    found = optimizer(nn.Linear(2, 2).named_parameters())
    assert type(found) is kind
    assert found.param_groups[0]["lr"] == rate


def test_values_of_a_closure_are_its_own(tmp_path: Path) -> None:
    made = cell_free(maker)(0.125)
    found = again(tmp_path, optimizer=made)["optimizer"]
    assert found(nn.Linear(2, 2).named_parameters()).param_groups[0]["lr"] == 0.125


def test_a_class_of_a_cell_and_its_base(tmp_path: Path) -> None:
    names = cell(
        "import math as m\n"
        "class Base:\n    def half(self):\n        return m.floor(self.x / 2)\n\n"
        "class Kind(Base):\n    y: 'int' = 3\n    def __init__(self, x):\n"
        "        super().__init__()\n        self.x = x\n\n"
        "def use(x):\n    return Kind(x).half()\n"
    )
    assert again(tmp_path, lr_scale=names["use"])["lr_scale"](9) == 4


def test_a_module_beside_the_program_is_copied(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    beside = tmp_path / "program"
    beside.mkdir()
    (beside / "mine_a.py").write_text("import mine_b\n\ndef f(x):\n    return mine_b.g(x)\n")
    (beside / "mine_b.py").write_text("def g(x):\n    return x + 1\n")
    monkeypatch.syspath_prepend(str(beside))
    names = cell("import mine_a\ndef scale(step):\n    return mine_a.f(step)\n")
    out = tmp_path / "out"
    out.mkdir()
    carry({"lr_scale": names["scale"]}, out)
    for name in ("mine_a", "mine_b"):
        monkeypatch.delitem(sys.modules, name)
    assert sorted(path.name for path in out.iterdir()) == ["code.py", "mine_a.py", "mine_b.py"]


def test_a_folder_of_python_without_init_is_copied(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As `src/` of many a project; its data stay where they are."""
    folder = tmp_path / "program" / "mine_folder"
    folder.mkdir(parents=True)
    (folder / "rates.py").write_text("def f(step):\n    return step + 1\n")
    (folder / "weights.bin").write_bytes(b"0" * 9)
    monkeypatch.syspath_prepend(str(folder.parent))
    names = cell("from mine_folder.rates import f\n")
    out = tmp_path / "out"
    out.mkdir()
    carry({"lr_scale": names["f"]}, out)
    for name in ("mine_folder", "mine_folder.rates"):
        monkeypatch.delitem(sys.modules, name)
    assert [path.name for path in (out / "mine_folder").iterdir()] == ["rates.py"]


@pytest.mark.parametrize(
    ("text", "what"),
    [
        (
            "import threading\nc = threading.Lock()\ndef f(named):\n    return c\n",
            "`c`.*an object of _thread.lock",
        ),
        ("def f(named):\n    return missing\n", "uses `missing`, which is not defined"),
        (
            "def g():\n    x = 1\n    return lambda s: x\n"
            "def h():\n    x = 2\n    return lambda s: x\n"
            "a, b = g(), h()\ndef f(s):\n    return a(s) + b(s)\n",
            "two things are called `x`",
        ),
    ],
)
def test_values_that_cannot_be_carried_are_named(tmp_path: Path, text: str, what: str) -> None:
    with pytest.raises(InputError, match=what):
        carry({"optimizer": cell(text)["f"]}, tmp_path)
    assert not list(tmp_path.iterdir())


class Config:
    width = 3

    def __init__(self) -> None:
        self.depth = [1, 2]


CONFIG, ROUTES = Config(), {"all": chosen}


def by_config(named: Any) -> torch.optim.Optimizer:
    CONFIG.rate = RATE  # type: ignore[attr-defined]
    kept = [p for n, p in named if ROUTES["all"](n)]
    return torch.optim.SGD(kept[: CONFIG.width], lr=RATE)


def test_an_object_comes_with_its_class_and_attributes(tmp_path: Path) -> None:
    found = again(tmp_path, optimizer=cell_free(by_config))
    assert found["CONFIG"].depth == [1, 2]
    assert found["CONFIG"].width == 3
    assert found["optimizer"](nn.Linear(2, 2).named_parameters()).param_groups[0]["lr"] == RATE


def test_a_function_without_source_is_refused(tmp_path: Path) -> None:
    names: dict[str, Any] = {"__name__": "__main__"}
    exec("def f(named):\n    return named\n", names)  # a test's own text
    with pytest.raises(InputError, match="`optimizer` has no source: function `f`") as caught:
        carry({"optimizer": names["f"]}, tmp_path)
    assert "in a file or a notebook cell" in str(caught.value)


def test_a_file_that_changed_since_is_refused(tmp_path: Path) -> None:
    file = tmp_path / "program.py"
    file.write_text("def f(named):\n    return 1\n")
    names = runpy.run_path(str(file), run_name="__main__")
    file.write_text("def f(named):\n    return 2\n")
    linecache.checkcache(str(file))
    with pytest.raises(InputError, match="is not what its file says now"):
        carry({"optimizer": names["f"]}, tmp_path)

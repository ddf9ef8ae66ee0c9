"""A copy of parts of a model file is believed where it has the file's values, once it is run."""

from __future__ import annotations

import time
from pathlib import Path

import pytest

from bigbrain_fx.emit.files.slicing import slice_file
from bigbrain_fx.errors import InputError
from bigbrain_fx.frontend import copies, forked
from bigbrain_fx.frontend.copies import Copies, try_copies

BATCHES = "\n\ndef batches(seed):\n    return TABLE\n"


def tried(folder: Path, top: str, rest: str = BATCHES) -> Copies:
    path = folder / "model_of_copies.py"
    path.write_text(top + rest)
    return try_copies(path, [slice_file(path, ["batches"]).text], seed=3)


@pytest.mark.parametrize(
    "top",
    [
        "TABLE = {'rate': 1}\ndef set_rate():\n    TABLE['rate'] = 2\nset_rate()",
        "TABLE = 1\ndef set_rate():\n    global TABLE\n    TABLE = 2\nset_rate()",
        "TABLE = {}\ndef put(kind):\n    TABLE[kind.__name__] = kind\n    return kind\n"
        "@put\nclass Toy:\n    pass",
        "TABLE = [1]\nmade = TABLE.append(2)",
        "import torch\nTABLE = torch.randn(3)",
        "import torch\nspare = torch.randn(3)\nTABLE = torch.randn(3)",
        "import torch\nfrom torch import manual_seed\nmanual_seed(7)\nTABLE = torch.randn(3)",
    ],
)
def test_what_another_line_does_on_the_side_is_seen(tmp_path: Path, top: str) -> None:
    assert tried(tmp_path, top).unlike == ("would have another TABLE",)


@pytest.mark.parametrize(
    "top",
    [
        "TABLE = {'rate': 1}\nTABLE.update(rate=2)",
        "import random\nrandom.seed(0)\nTABLE = list(range(9))\nrandom.shuffle(TABLE)",
        "import torch\ntorch.manual_seed(1)\nTABLE = torch.randn(3).bfloat16()",
        "import torch\nTABLE = torch.Generator().manual_seed(4)",
        "import time, os\nTABLE = (time.time_ns(), os.urandom(4))",
        "import logging\nTABLE = logging.getLogger('copies')",
    ],
)
def test_a_copy_with_the_values_of_the_file_is_let_be(tmp_path: Path, top: str) -> None:
    assert tried(tmp_path, top) == Copies()


def test_dice_that_nobody_seeded_are_refused_with_the_line(tmp_path: Path) -> None:
    top = "import random\nTABLE = list(range(99))\nrandom.shuffle(TABLE)"
    with pytest.raises(InputError, match="draws TABLE with Python's or NumPy's") as caught:
        tried(tmp_path, top)
    assert caught.value.at == "model_of_copies.py:2"
    assert "random.seed(0)" in (caught.value.help or "")


def test_a_module_beside_the_file_counts_with_its_values(tmp_path: Path) -> None:
    (tmp_path / "drawn_beside.py").write_text("import torch\nTABLE = torch.randn(2)\n")
    rest = "\n\ndef batches(seed):\n    return drawn_beside.TABLE\n"
    found = tried(tmp_path, "import drawn_beside", rest)
    assert found.unlike == ("would have another drawn_beside",)


def test_what_looks_names_up_takes_the_file(tmp_path: Path) -> None:
    rest = "\n\ndef batches(seed):\n    return globals()['TABLE']\n"
    found = tried(tmp_path, "TABLE = 1", rest)
    assert found.unlike == ("would not have what globals() finds in the file",)


def test_a_copy_that_cannot_be_run_takes_the_file(tmp_path: Path) -> None:
    path = tmp_path / "model_of_copies.py"
    path.write_text("def rate():\n    return 1\n\n\nRATE = rate()\n")
    assert try_copies(path, ["RATE = rate()\n"], 0).unlike == (
        "would end with NameError: name 'rate' is not defined",
    )


def test_a_top_that_takes_long_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(forked, "LIMIT_S", 0.2)
    started_s = time.monotonic()
    found = tried(tmp_path, "import threading\nTABLE = threading.Event().wait(60)")
    assert "cannot be run a second time" in (found.note or "")
    assert time.monotonic() - started_s < 30


def test_nothing_is_run_where_the_top_calls_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(copies, "run_apart", lambda *_: pytest.fail("it was run"))
    assert tried(
        tmp_path, "import torch\nTABLE = {'a': 1}\nclass Net(torch.nn.Module):\n    n = 1"
    ) == (Copies())


@pytest.mark.parametrize(
    ("sets", "rest", "said"),
    [
        ("torch.set_flush_denormal(True)", BATCHES, "torch.set_flush_denormal(...)"),
        ("torch.optim.SGD.step = print", BATCHES, "torch.optim.SGD.step = ..."),
        ("torch.Tensor.mul = print", BATCHES.replace("TABLE", "1 .mul"), "torch.Tensor.mul = ..."),
        ("torch.Tensor.mul = print", BATCHES, ""),
        ("os.environ['FOR_A_COPY'] = '1'", BATCHES.replace("TABLE", "os.environ"), "os.environ['"),
        ("os.environ['FOR_A_COPY'] = '1'", BATCHES, ""),
    ],
)
def test_settings_that_a_call_makes_are_seen(
    sets: str, rest: str, said: str, tmp_path: Path
) -> None:
    top = f"import os\nimport torch\nTABLE = 1\n\n\ndef set_up():\n    {sets}\n\n\nset_up()"
    unlike = tried(tmp_path, top, rest).unlike
    assert len(unlike) == bool(said)
    assert all(line.startswith(f"would not set {said}") for line in unlike)


def test_a_setting_without_anything_to_copy_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "model_of_copies.py"
    path.write_text(
        "import torch\n\n\ndef set_up():\n    torch.set_flush_denormal(True)\n\n\nset_up()\n"
    )
    with pytest.raises(InputError, match=r"sets torch\.set_flush_denormal") as caught:
        try_copies(path, [], 0)
    assert "in a line of its own at the top" in (caught.value.help or "")

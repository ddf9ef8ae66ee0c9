"""What the bundle copies out of a model file: all that is needed, in order, and no more."""

from __future__ import annotations

import ast
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch

from bigbrain_fx.emit.files import local_modules as local
from bigbrain_fx.emit.files.local_modules import imports_of_module, local_modules
from bigbrain_fx.emit.files.model_file import _read_by
from bigbrain_fx.emit.files.slicing import SourceSlice, has_settings, slice_file
from bigbrain_fx.errors import InputError


def sliced(folder: Path, text: str, *wanted: str, name: str = "model.py") -> SourceSlice:
    path = folder / name
    path.write_bytes(text.encode())
    return slice_file(path, wanted or ("optimizer",))


def ran(found: SourceSlice) -> dict[str, Any]:
    scope: dict[str, Any] = {"__name__": "training"}
    exec(compile(found.text, "training.py", "exec"), scope)
    return scope


def test_used_names_come_along_and_no_others(tmp_path: Path) -> None:
    text = '''"""A model file."""
import math, random
import torch
from torch import nn, optim
from itertools import count

RATE = 0.1
UNUSED = torch.zeros(10**9)


class Net(nn.Module):
    pass


def rate(step):
    return RATE * math.exp(-step)


def optimizer(named_params):
    return optim.SGD(named_params, lr=rate(0))


if __name__ == "__main__":
    print(Net())
'''
    assert sliced(tmp_path, text).text == (
        "import math\n"
        "from torch import optim\n\n"
        "RATE = 0.1\n"
        "\n\ndef rate(step):\n    return RATE * math.exp(-step)\n\n"
        "\n\ndef optimizer(named_params):\n    return optim.SGD(named_params, lr=rate(0))\n\n"
    )


def test_decorators_comments_and_aliases_are_kept(tmp_path: Path) -> None:
    text = """\
import functools as tools
import os.path


# Read once:
# it is long.
@tools.cache
def text():
    return os.path.sep

def optimizer(named_params):  # any
    return text()
"""
    found = sliced(tmp_path, text)
    assert "# Read once:\n# it is long.\n@tools.cache\ndef text():" in found.text
    assert "import functools as tools\nimport os.path\n" in found.text
    assert "def optimizer(named_params):  # any" in found.text
    assert ran(found)["optimizer"](()) == "/"


@pytest.mark.parametrize(
    ("text", "found"),
    [
        (
            "A = 1\nA = A + 1\nclass B:\n    a = A\nclass C(B): pass\nA += 1\n"
            "def optimizer(p): return C.a, A\n",
            (2, 3),
        ),
        (
            "class Settings:\n    rate = 1\nSettings.rate = 0.5\n"
            "def optimizer(p): return Settings.rate\n",
            0.5,
        ),
        (
            "try:\n    import no_such_module as fast\nexcept ImportError:\n    fast = None\n"
            "if fast is None:\n    def step(): return 1\nelse:\n    def step(): return 2\n"
            "def optimizer(p): return step()\n",
            1,
        ),
        ("seen = []; seen.append(1); other = 2\ndef optimizer(p): return seen, other\n", ([1], 2)),
    ],
    ids=["bound twice, in order", "attributes", "try and if", "several on a line"],
)
def test_effects_of_a_files_top_come_along(tmp_path: Path, text: str, found: object) -> None:
    assert ran(sliced(tmp_path, text))["optimizer"](()) == found


@pytest.mark.parametrize(
    "change",
    [
        "TABLE['rate'] = 0.5",
        "TABLE.update(rate=0.5)",
        "TABLE |= {'rate': 0.5}",
        "for key in ('rate',):\n    TABLE[key] = 0.5",
        "if len(TABLE) == 1:\n    TABLE['rate'] = 0.5\nelse:\n    TABLE['rate'] = 2",
        "with contextlib.suppress(KeyError):\n    TABLE['rate'] = 0.5",
        "TABLE['rate'] = 0.5\nTABLE['spare'] = 1\ndel TABLE['spare']",
        "setitem(TABLE, 'rate', 0.5)",
        "match [{'rate': 0.5}]:\n    case [TABLE]:\n        pass",
    ],
)
def test_a_table_is_copied_as_it_is_filled(tmp_path: Path, change: str) -> None:
    text = "import contextlib\nfrom operator import setitem\n"
    text += f"TABLE = {{'rate': 1}}\n{change}\n"
    text += "def optimizer(p):\n    return TABLE['rate']\n"
    assert ran(sliced(tmp_path, text))["optimizer"](()) == 0.5


def test_a_future_import_stays_first_and_on_one_line(tmp_path: Path) -> None:
    text = "from __future__ import (\n    annotations,\n)\n"
    text += "X = 1\ndef optimizer(p: Missing): return X\n"
    found = sliced(tmp_path, text)
    assert found.text.splitlines()[0] == "from __future__ import annotations"
    assert ran(found)["optimizer"](()) == 1


@pytest.mark.parametrize(
    "end", ["\n", "\r\n", "\n\x0c\n", "  # \u2028\n"], ids=["n", "rn", "page", "ls"]
)
def test_any_line_ends(tmp_path: Path, end: str) -> None:
    """The standard library's own files have form feeds; editors leave line separators."""
    text = f"A = 1{end}B = 2{end}def optimizer(p):{end}    return B{end}"
    assert ran(sliced(tmp_path, text))["optimizer"](()) == 2


@pytest.mark.parametrize(
    "head", [b"\xef\xbb\xbf", b"# -*- coding: latin-1 -*-\n"], ids=["bom", "latin"]
)
def test_any_encoding_that_python_reads(tmp_path: Path, head: bytes) -> None:
    letter = "é".encode("latin-1" if head.startswith(b"#") else "utf-8")
    path = tmp_path / "model.py"
    path.write_bytes(head + b"WORD = '" + letter + b"'\ndef optimizer(p): return WORD\n")
    assert ran(slice_file(path, ["optimizer"]))["optimizer"](()) == "é"


def test_local_modules_are_shipped_with_what_they_import(tmp_path: Path) -> None:
    for name, text in {"data": "import words\n", "words": "import data\n", "unused": ""}.items():
        (tmp_path / f"{name}.py").write_text(text)
    text = "import data, unused\nfrom torch import nn\ndef optimizer(p):\n    return data\n"
    found = sliced(tmp_path, text)
    assert [path.name for path in found.files] == ["data.py", "words.py"]
    assert not found.whole


def test_an_import_inside_a_function_counts(tmp_path: Path) -> None:
    (tmp_path / "data.py").write_text("")
    found = sliced(tmp_path, "def optimizer(p):\n    import data\n    return data\n")
    assert [path.name for path in found.files] == ["data.py"]


def test_with_a_seed_the_file_is_shipped_and_its_dice_are_those_of_split(tmp_path: Path) -> None:
    path = tmp_path / "drawing.py"
    path.write_text("import torch\nX = torch.rand(3)\ndef optimizer(p): return X\n")
    found = slice_file(path, ("optimizer",), seed=5)
    assert found.whole
    assert found.files == (path,)
    sys.path.insert(0, str(tmp_path))
    try:
        drawn = ran(found)["optimizer"](())
    finally:
        sys.path.remove(str(tmp_path))
        sys.modules.pop("drawing", None)
    torch.manual_seed(5)
    assert torch.equal(drawn, torch.rand(3))


def test_a_file_that_cannot_be_imported_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "my-model.py"
    path.write_text("def optimizer(p): pass\n")
    with pytest.raises(InputError, match="cannot import a file of that name"):
        slice_file(path, ("optimizer",), seed=0)


def test_lines_of_a_forward_have_the_names_that_they_read_of_a_file_that_is_whole() -> None:
    """`from model import model` alone gave them none: the bundle could not be run."""
    text = (
        "class Lines(Base):\n def forward(self, x):\n  from net import F, scale\n  return F.relu(x)"
    )
    other = text.replace("F, scale", "scale").replace("F.relu(x)", "scale(x)")
    classes = [ast.parse(each).body[0] for each in (text, other)]
    plan: Any = SimpleNamespace(source=SimpleNamespace(module="net"))
    assert _read_by(cast("list[ast.ClassDef]", classes), plan) == ["F", "scale"]


def test_a_star_import_ships_the_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nobody can say which names it brings; nobody imports it for that."""
    monkeypatch.delitem(sys.modules, "net", raising=False)  # another test's
    (tmp_path / "shapes.py").write_text("SIZE = 3\n")
    found = sliced(tmp_path, "from shapes import *\ndef optimizer(p): return SIZE\n", name="net.py")
    assert found.whole
    assert found.text == "from net import optimizer\n"
    assert [path.name for path in found.files] == ["net.py", "shapes.py"]
    assert "net" not in sys.modules


@pytest.mark.parametrize("inner", ["__init__.py", "words.py"], ids=["package", "folder"])
def test_local_packages_are_shipped_whole(tmp_path: Path, inner: str) -> None:
    package = tmp_path / "data"
    package.mkdir()
    (package / inner).write_text("import helper\n")
    (tmp_path / "helper.py").write_text("")
    found = sliced(tmp_path, "from data import words\ndef optimizer(p): return words\n")
    assert [path.name for path in found.files] == ["data", "helper.py"]


def test_a_file_goes_before_a_folder_that_is_no_package(tmp_path: Path) -> None:
    (tmp_path / "nets").mkdir()
    (tmp_path / "nets" / "deep.py").write_text("")
    assert local_modules(["nets.deep"], tmp_path) == [tmp_path / "nets"]
    (tmp_path / "nets.py").write_text("")
    assert local_modules(["nets.deep"], tmp_path) == [tmp_path / "nets.py"]
    (tmp_path / "nets" / "__init__.py").write_text("")
    assert local_modules(["nets.deep"], tmp_path) == [tmp_path / "nets"]


def test_torch_settings_of_a_files_top_come_along(tmp_path: Path) -> None:
    """Without it a bundle would compute in another precision than the model file does."""
    lines = [
        "import torch",
        "import torch.backends.cudnn as cudnn",
        "from torch.backends import mkldnn",
        "torch.set_float32_matmul_precision('high')",
        "if torch.cuda.is_available():\n    torch.backends.cuda.matmul.allow_tf32 = True",
        "cudnn.benchmark = False",
        "mkldnn.set_flags(False)",
    ]
    found = sliced(tmp_path, "\n".join([*lines, "print(2)", "def optimizer(): pass", ""]))
    assert found.text.startswith("\n".join(lines) + "\n")
    assert "print" not in found.text
    assert has_settings(tmp_path / "model.py")
    assert "torch" not in sliced(tmp_path, "import torch\ndef optimizer(): pass\n").text
    assert not has_settings(tmp_path / "model.py")


def test_a_package_that_imports_itself_is_looked_at_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "large").mkdir()
    names = [f"part_{i}" for i in range(20)]
    for name in names:
        text = "".join(f"import large.{other}\n" for other in names) + "import other\n"
        (tmp_path / "large" / f"{name}.py").write_text(text)
    (tmp_path / "other.py").write_text("import large, json\n")
    looked: list[str] = []
    real = local.imports_of_module

    def look(name: str, folder: Path) -> list[str]:
        looked.append(name)
        return real(name, folder)

    monkeypatch.setattr(local, "imports_of_module", look)
    found = local.local_modules(["large.part_3"], tmp_path)
    assert found == [tmp_path / "large", tmp_path / "other.py"]
    assert len(looked) == len(set(looked)) == 23


def test_of_a_package_only_what_is_imported_is_read(tmp_path: Path) -> None:
    """Else one function out of a large package reads all of it, and takes what the rest needs."""
    package = tmp_path / "mine"
    (package / "deep").mkdir(parents=True)
    files = {
        "__init__.py": "",
        "rates.py": "from .deep import one\nfrom . import words\n",
        "words.py": "",
        "deep/__init__.py": "import helper\n",
        "deep/one.py": "from .. import rates\n",
        "unread.py": "import other\nthis is no Python\n",
    }
    for name, text in files.items():
        (package / name).write_text(text)
    for name in ("helper", "other"):
        (tmp_path / f"{name}.py").write_text("")
    assert local_modules(["mine.rates"], tmp_path) == [tmp_path / "helper.py", package]
    assert imports_of_module("mine.deep.one", tmp_path) == ["helper", "mine", "mine.rates"]


def test_a_package_that_imports_by_name_is_read_whole(tmp_path: Path) -> None:
    """As registries do, which import each file of their folder."""
    package = tmp_path / "mine"
    package.mkdir()
    (package / "__init__.py").write_text("import importlib\nimportlib.import_module('mine.kind')\n")
    (package / "kind.py").write_text("import helper\n")
    (tmp_path / "helper.py").write_text("")
    assert local_modules(["mine"], tmp_path) == [tmp_path / "helper.py", package]

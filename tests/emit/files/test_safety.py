"""Emitted files call what is on a list, and are the same byte for byte in any process."""

from __future__ import annotations

import ast
import hashlib
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from bigbrain_fx.emit.files.code import BLOCKS
from bigbrain_fx.emit.ops.layers import RULES
from tests.support import samples
from tests.support.allowed_calls import is_allowed_call
from tests.support.bundles import MODEL

CELLS = samples.cases(
    (model, partitioner)
    for model in ("gpt", "unet", "encdec", "resnet", "llama", "moe", "digits")
    for partitioner in ("naive", "scattered")
)
FORBIDDEN = {"eval", "exec", "open", "compile", "__import__", "globals", "locals", "input"}
MANAGERS = {"torch.no_grad", "torch.enable_grad", "torch.autocast"}  # of regions
LAYERS = {f"nn.{name}" for name in (*RULES, "Sequential", "ModuleList", "Parameter")}
OURS = {"typing", "runtime", "supervisor", "training", "functions", "pathlib", "math", "__future__"}


def trees(model: str, partitioner: str) -> Iterator[tuple[str, ast.Module]]:
    for name, text in samples.texts(model, partitioner).items():
        if name.endswith(".py"):
            yield name, ast.parse(text)


def imported(tree: ast.Module) -> set[str]:
    found: set[str] = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            found |= {alias.name.partition(".")[0] for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            found.add((node.module or "").partition(".")[0])
    return found


@pytest.mark.parametrize(("model", "partitioner"), CELLS)
def test_files_import_torch_the_runtime_and_each_other(model: str, partitioner: str) -> None:
    devices = {f"device_d{i}" for i in range(3)}
    own = imported(ast.parse((samples.ROOT / "models" / f"{model}.py").read_text()))
    for name, tree in trees(model, partitioner):
        starts = {key: {"sys"} for key in ("train.py", "infer.py", "launch.py")}
        more = {"training.py": own, **starts}.get(name, set())
        assert imported(tree) <= {"torch", *OURS, BLOCKS, *devices, *more}, name
        assert not imported(tree) & {
            "pickle",
            "marshal",
            "subprocess",
            "os",
            "bigbrain_fx",
            "models",
        }


@pytest.mark.parametrize(("model", "partitioner"), CELLS)
def test_device_files_call_what_is_allowed(model: str, partitioner: str) -> None:
    for name, tree in trees(model, partitioner):
        if name.startswith(("device_", BLOCKS)):
            known = known_names(tree)
            bad = [call for call in calls(tree) if not is_allowed(call, known)]
            assert not bad, [ast.unparse(call) for call in bad]


@pytest.mark.parametrize(("model", "partitioner"), CELLS)
def test_nothing_is_evaluated_opened_or_reflected_on(model: str, partitioner: str) -> None:
    """In what we write; the user's own functions in training.py are the user's."""
    for name, tree in trees(model, partitioner):
        if name == "training.py":
            continue
        read = {node.id for node in ast.walk(tree) if isinstance(node, ast.Name)}
        assert not read & FORBIDDEN, name
        dunders = {n.attr for n in ast.walk(tree) if isinstance(n, ast.Attribute)}
        assert {attr for attr in dunders if attr.startswith("__")} <= {"__init__"}


def calls(tree: ast.Module) -> list[ast.Call]:
    return [node for node in ast.walk(tree) if isinstance(node, ast.Call)]


def known_names(tree: ast.Module) -> set[str]:
    """Return the classes of a file, what it imports by name, and the blocks its loops run over."""
    classes = {node.name for node in tree.body if isinstance(node, ast.ClassDef)}
    ours = [n for n in ast.walk(tree) if isinstance(n, ast.ImportFrom)]
    loops = [n.target for n in ast.walk(tree) if isinstance(n, ast.For)]
    blocks = {target.id for target in loops if isinstance(target, ast.Name)}
    return classes | {alias.name for node in ours for alias in node.names} | (blocks - {"m", "i"})


def is_allowed(call: ast.Call, known: set[str]) -> bool:
    function = call.func
    if isinstance(function, ast.Name):
        return (
            function.id in known | {"range", "super"}
            or is_allowed_call(function)
            or is_getattr(call)
        )
    if ast.unparse(function) in MANAGERS | {"super().__init__", "getattr(self, action)"}:
        return True
    if root(function) == "nn":
        return ast.unparse(function) in LAYERS or _is_frozen(call)
    return root(function) == "self" or is_allowed_call(function)


def _is_frozen(call: ast.Call) -> bool:
    """Whether it is `nn.Linear(...).requires_grad_(False)`."""
    function = call.func
    return (
        isinstance(function, ast.Attribute)
        and function.attr == "requires_grad_"
        and isinstance(function.value, ast.Call)
        and ast.unparse(function.value.func) in LAYERS
    )


def is_getattr(call: ast.Call) -> bool:
    return ast.unparse(call) == "getattr(self, action)"


def root(node: ast.expr) -> str:
    """Return "self" of `self.blocks[0].nth(1)`."""
    while isinstance(node, ast.Attribute | ast.Subscript | ast.Call):
        node = node.func if isinstance(node, ast.Call) else node.value
    return node.id if isinstance(node, ast.Name) else ""


@pytest.mark.parametrize(
    "text",
    [
        "os.system('x')",
        "eval(x)",
        "open(x)",
        "torch.load(x)",
        "x.__class__()",
        "torch.hub.load(x)",
        "m()",
        "nn.Module()",
        "nn.init.zeros_(x)",
    ],
)
def test_the_check_sees_what_is_not_allowed(text: str) -> None:
    call = ast.parse(text, mode="eval").body
    assert isinstance(call, ast.Call)
    assert not is_allowed(call, {"Stage0"})


# --------------------------------------------------------------------------- the same bytes


HASH_SEEDS = ("0", "1", "42", "random")
DEADLINE_S = 120


@pytest.mark.nightly
def test_four_processes_write_the_same_bytes(tmp_path: Path) -> None:
    """Scattered: the placement with most stages, channels and names."""
    (tmp_path / "model.py").write_text(MODEL)
    (tmp_path / "cluster.json").write_text(samples.cluster_text(3))
    runs = [start(tmp_path, number, seed) for number, seed in enumerate(HASH_SEEDS)]
    outputs = [run.communicate(timeout=DEADLINE_S)[0] for run in runs]
    assert [run.returncode for run in runs] == [0] * len(runs), outputs
    first, *others = [digests(tmp_path / f"bundle{n}") for n in range(len(runs))]
    assert {"device_d2.py", "plan.json", "weights/d0.safetensors", "runtime/__init__.py"} <= set(
        first
    )
    for other in others:
        assert other == first


def start(folder: Path, number: int, hash_seed: str) -> subprocess.Popen[str]:
    """Run the command line, as a user would, in a process of its own."""
    command = [
        sys.executable,
        "-c",
        "from bigbrain_fx.cli import main; main()",
        "split",
        "model.py",
    ]
    options = ["--devices", "cluster.json", "--partitioner", "scattered", "--micro-batches", "2"]
    environment = {**os.environ, "PYTHONHASHSEED": hash_seed, "PYTHONPATH": str(samples.ROOT)}
    return subprocess.Popen(
        [*command, *options, "--out", f"bundle{number}"],
        cwd=folder,
        env={**environment, "OMP_NUM_THREADS": "1"},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


def digests(folder: Path) -> dict[str, str]:
    files = (path for path in folder.rglob("*") if path.is_file())
    return {
        path.relative_to(folder).as_posix(): hashlib.sha256(path.read_bytes()).hexdigest()
        for path in files
    }

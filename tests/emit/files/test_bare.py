"""A bare bundle has the plain pipeline: few files, shared with other tiers; else it is refused."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

import bigbrain_fx
from bigbrain_fx.emit import is_bare, write_bundle
from bigbrain_fx.emit.files.bare import FILE, HOMES, bare_files, require_plain
from bigbrain_fx.emit.files.copied import runtime_files
from bigbrain_fx.emit.files.parts import Copied, left_out
from bigbrain_fx.errors import InputError
from bigbrain_fx.plan import Options, Plan, Source, make_plan
from tests.emit.files.test_bundle import NoWeights
from tests.support import samples
from tests.support.messages import refused
from tests.support.synthetic import chain_graph

RUNTIME = Path(bigbrain_fx.__file__).parent / "runtime"
MOST = 1500  # lines
GRAPH = chain_graph(1, 6, tied=True)
FEW_HAVE = (
    "OptimizerGroups",
    "example_batches",
    "marking",
)  # models without batches, or that mark parameters
NEEDING_MORE = {
    "replicas": Options("naive", micro_batches=2, replicas=2),
    "recomputation": Options("naive", micro_batches=2, recompute=(0,)),
    "torch.compile": Options("naive", micro_batches=2, compiled=True),
    "steps that overlap": Options("naive", micro_batches=4, asynchronous="2bw"),
}
SOURCES = {
    "a loss scale": Source("", grad_scaler={"init_scale": 65536.0}),
    "micro-batches of unequal rows": Source("", drop_last=False),
    "batches that are split by rules": Source("", batch_dims={"x": 1}),
}


def planned(options: Options | None = None, source: Source | None = None) -> Plan:
    chosen = options or Options("naive", micro_batches=2)
    graph = chain_graph(1, 6) if chosen.asynchronous else GRAPH
    return make_plan(graph, samples.cluster(2), source or Source(""), chosen)


def lines_of(files: dict[str, str]) -> int:
    return sum(len(text.splitlines()) for text in files.values())


def test_a_bare_bundle_is_read_in_half_an_hour() -> None:
    wanted = ", ".join(name for name in HOMES if name not in FEW_HAVE)
    assert 1000 < lines_of(bare_files(RUNTIME, [f"from runtime import {wanted}\n"])) <= MOST


def test_files_of_a_bare_bundle_are_those_of_other_tiers(tmp_path: Path) -> None:
    plan = planned()
    bare = write_bundle(plan, NoWeights(), tmp_path / "bare", bare=True)
    lean = write_bundle(plan, NoWeights(), tmp_path / "lean", lean=True)
    own = {path.name for path in (bare / "runtime").iterdir()} - {FILE, "__init__.py"}
    for name in own:
        assert (bare / "runtime" / name).read_bytes() == (lean / "runtime" / name).read_bytes()
    for name in ("device_d0.py", "device_d1.py", "training.py", "plan.json"):
        assert (bare / name).read_bytes() == (lean / name).read_bytes()


def test_a_bundle_like_a_bare_one_is_bare(tmp_path: Path) -> None:
    bare = write_bundle(planned(), NoWeights(), tmp_path / "bare", bare=True)
    assert is_bare(write_bundle(planned(), NoWeights(), tmp_path / "again", like=bare))


def test_other_tiers_have_nothing_of_its_own() -> None:
    plan = planned()
    without = left_out(Copied(plan, supervised=True), "runtime")
    text = "from runtime import Bundle, Device, Hooks, Stage, Training, main\n"
    assert FILE not in runtime_files(RUNTIME, [text], without=without)


def test_the_init_of_a_bare_bundle_names_its_files() -> None:
    files = bare_files(RUNTIME, [f"from runtime import {', '.join(HOMES)}\n"])
    for node in ast.walk(ast.parse(files["__init__.py"])):
        if isinstance(node, ast.ImportFrom):
            assert {alias.name for alias in node.names} <= defined(files[f"{node.module}.py"])


@pytest.mark.parametrize("feature", [*NEEDING_MORE, *SOURCES])
def test_a_plan_or_a_model_file_that_needs_more_is_refused(feature: str) -> None:
    with refused("BX3697") as caught:
        require_plain(planned(NEEDING_MORE.get(feature), SOURCES.get(feature)))
    assert feature in str(caught.value)


def test_nothing_is_written_of_a_plan_that_is_refused(tmp_path: Path) -> None:
    plan = planned(NEEDING_MORE["replicas"])
    with pytest.raises(InputError):
        write_bundle(plan, NoWeights(), tmp_path / "out", bare=True)
    assert not [*tmp_path.iterdir()]


def test_code_of_the_users_own_is_refused() -> None:
    with refused("BX3698") as caught:
        bare_files(RUNTIME, ["from runtime import Device, assume\n"])
    assert "assume" in str(caught.value)


def defined(text: str) -> set[str]:
    """Return the names that a file defines: classes, functions, and methods as Class.method."""
    found: set[str] = set()
    for node in ast.parse(text).body:
        if isinstance(node, ast.ClassDef | ast.FunctionDef):
            found.add(node.name)
            inner = [n.name for n in ast.walk(node) if isinstance(n, ast.FunctionDef)]
            found |= {f"{node.name}.{name}" for name in inner}
    return found


def test_the_page_that_reads_it_aloud_is_true() -> None:
    page = (Path(bigbrain_fx.__file__).parents[1] / "docs/explanation/a-bundle.md").read_text()
    wanted = ", ".join(name for name in HOMES if name not in FEW_HAVE)
    files = bare_files(RUNTIME, [f"from runtime import {wanted}\n"])
    named = re.findall(r"`(\w+\.py): ([\w.]+)`", page.replace("\n", " "))
    assert {file for file, _ in named} == files.keys() - {"__init__.py"}
    assert [name for file, name in named if name not in defined(files[file])] == []

"""A package of somebody else's: installed, it is listed, chosen by name, compared and tested.

tests/third_party/fastest is such a package, whole. It is installed into a folder of its own, which
stands on PYTHONPATH; nothing else of this machine changes.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path
from typing import Any

import pytest

from bigbrain_fx.plan import read_plan
from estimators.analytical import Analytical
from tests.support.command_line import write_cluster, write_model
from tests.support.synthetic import chain_graph, cluster_of, device

ROOT = Path(__file__).resolve().parents[2]
SOURCE = ROOT / "tests" / "third_party" / "fastest"
INSTALL = ("install", "--no-deps", "--no-build-isolation", "--no-index", "--quiet")


def python(site: Path | None, *words: str | Path) -> subprocess.CompletedProcess[str]:
    """Run a new Python, as a user would, with the package's folder on its path."""
    given = {k: v for k, v in os.environ.items() if not k.startswith(("PYTEST_", "PYTHONPATH"))}
    return subprocess.run(
        [sys.executable, *map(str, words)],
        cwd=ROOT,
        env={**given, **({} if site is None else {"PYTHONPATH": str(site)})},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )


def rows(site: Path | None, *words: str | Path) -> list[dict[str, Any]]:
    """Run a command that prints JSON."""
    done = python(site, "-m", "bigbrain_fx", *words, "--json")
    assert done.returncode == 0, done.stderr
    return [json.loads(line) for line in done.stdout.splitlines()]


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder where pip installed it, built from a copy: building leaves files behind."""
    folder = tmp_path_factory.mktemp("third-party")
    shutil.copytree(SOURCE, folder / "source")
    words = (*INSTALL, "--disable-pip-version-check", "--target", folder / "site")
    done = python(None, "-m", "pip", *words, folder / "source")
    assert done.returncode == 0, done.stdout + done.stderr
    return folder / "site"


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """A model, and a cluster whose second device is the faster one."""
    folder = tmp_path_factory.mktemp("model")
    path = write_cluster(folder)
    told = json.loads(path.read_text())
    told["devices"][1] |= {"flops": "40GFLOP/s", "memory_bandwidth": "40GB/s"}
    path.write_text(json.dumps(told))
    return write_model(folder), path


@pytest.mark.nightly
def test_a_plugin_is_in_the_table(site: Path) -> None:
    (found,) = [entry for entry in rows(site, "plugins") if entry["name"] == "fastest"]
    assert (found["kind"], found["package"]) == ("partitioner", "bigbrain-fx-fastest")
    assert found["options"] == ["micro_batches"]
    assert found["what"].startswith("Give all ops to the device that computes them fastest")
    without = rows(None, "plugins")
    assert {entry["package"] for entry in without} == {"bigbrain-fx"}


@pytest.mark.nightly
def test_a_plugin_is_chosen_by_name(site: Path, files: tuple[Path, Path], tmp_path: Path) -> None:
    model, devices = files
    words = ("--devices", devices, "--micro-batches", "4", "--partitioner", "fastest")
    (found,) = rows(site, "split", model, *words, "--out", tmp_path / "bundle")
    assert found["partitioner"] == "fastest"
    assert [entry["device"] for entry in found["devices"]] == ["d1"]
    assert set(read_plan(tmp_path / "bundle").placement.device_of.values()) == {"d1"}


@pytest.mark.nightly
def test_a_plugin_is_compared_with_ours(site: Path, files: tuple[Path, Path]) -> None:
    model, devices = files
    words = ("--devices", devices, "--micro-batches", "4", "--partitioners", "naive,fastest")
    (found,) = rows(site, "compare", model, *words)
    assert [(row["name"], row["planned"]) for row in found["contenders"]] == [
        ("naive", True),
        ("fastest", True),
    ]


def test_without_the_package_the_name_is_not_known(files: tuple[Path, Path]) -> None:
    model, devices = files
    words = ("--devices", devices, "--partitioner", "fastest")
    done = python(None, "-m", "bigbrain_fx", "estimate", model, *words)
    assert done.returncode == 2
    assert "there is no partitioner 'fastest'" in done.stderr


@pytest.mark.nightly
def test_a_plugins_author_can_run_the_contract_tests(site: Path) -> None:
    words = ("tests/contract/test_partitioners.py", "-k", "fastest", "-q", "-p", "no:cacheprovider")
    done = python(site, "-m", "pytest", *words)
    assert done.returncode == 0, done.stdout
    assert " passed, " in done.stdout


def section() -> str:
    text = (ROOT / "docs/how-to/write-a-partitioner.md").read_text()
    return text.partition("## How to add a partitioner\n")[2].partition("\n## ")[0]


def test_the_page_is_short_and_its_example_works() -> None:
    assert len(section().splitlines()) < 50
    (code,) = re.findall(r"```python\n(.*?)```", section(), re.DOTALL)
    found: dict[str, Any] = {"__name__": "example"}
    exec(compile(code, "page", "exec", dont_inherit=True), found)
    graph, cluster = chain_graph(1, 5), cluster_of(device("slow"), device("fast", 2.0))
    placement = found["Fastest"]().partition(graph, cluster, Analytical().estimate(graph, cluster))
    assert placement.device_of == {op.name: "fast" for op in graph.ops}


def test_the_page_shows_the_packages_own_entry_point() -> None:
    (shown,) = re.findall(r"```toml\n(.*?)```", section(), re.DOTALL)
    told, real = tomllib.loads(shown), tomllib.loads((SOURCE / "pyproject.toml").read_text())
    assert told["project"]["entry-points"] == real["project"]["entry-points"]

"""Workflows do what `.ci/run` does, by targets that the Makefile has; issue forms ask for facts."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path
from typing import Any

import pytest
from ruamel.yaml import YAML

from bigbrain_fx.core import VERSION

ROOT = Path(__file__).resolve().parents[2]
WORKFLOWS = sorted((ROOT / ".github/workflows").glob("*.yml"))
FORMS = sorted((ROOT / ".github/ISSUE_TEMPLATE").glob("[!c]*.yml"))
MAKEFILE = (ROOT / "Makefile").read_text(encoding="utf-8")
TARGETS = set(re.findall(r"^([a-z-]+):", MAKEFILE, re.MULTILINE))


def read(path: Path) -> dict[str, Any]:
    found = YAML(typ="safe").load(path.read_text(encoding="utf-8"))
    assert isinstance(found, dict)
    return found


def made(path: Path) -> set[str]:
    return set(re.findall(r"make ([a-z-]+)", path.read_text(encoding="utf-8")))


@pytest.mark.parametrize("path", WORKFLOWS, ids=lambda path: path.stem)
def test_a_workflow_makes_targets_of_the_makefile(path: Path) -> None:
    for job in read(path)["jobs"].values():
        assert {"runs-on", "timeout-minutes", "steps"} <= job.keys()
    assert made(path) - {"docs"} <= TARGETS


def test_workflows_have_the_gate_of_ci_and_every_slice() -> None:
    ci, nightly = (ROOT / ".github/workflows" / f"{name}.yml" for name in ("ci", "nightly"))
    assert "test" in made(ci) & made(ROOT / ".ci/run")
    slices = read(nightly)["jobs"]["slice"]["strategy"]["matrix"]["slice"]
    assert slices == [*range(1, 9)]


def test_the_matrix_of_python_is_that_of_the_classifiers() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    named = [each.rpartition(" ")[2] for each in project["classifiers"] if " :: 3." in each]
    jobs = read(ROOT / ".github/workflows/ci.yml")["jobs"]
    assert jobs["gate"]["strategy"]["matrix"]["python"] == named
    assert project["requires-python"] == f">={named[0]}"


@pytest.mark.parametrize("path", FORMS, ids=lambda path: path.stem)
def test_an_issue_form_asks_for_what_doctor_prints(path: Path) -> None:
    form = read(path)
    assert {"name", "description", "body"} <= form.keys()
    fields = {field["id"]: field for field in form["body"]}
    assert fields["doctor"]["validations"] == {"required": True}
    assert "bigbrain-fx doctor --json" in fields["doctor"]["attributes"]["label"]


def test_the_citation_is_of_this_version() -> None:
    found = read(ROOT / "CITATION.cff")
    assert {"cff-version", "message", "title", "authors"} <= found.keys()
    assert (found["version"], found["license"]) == (VERSION, "Apache-2.0")

"""Workflows, issue forms, hooks and subjects of commits: what the Makefile has, offline."""

from __future__ import annotations

import re
import shlex
import subprocess
import sys
import tomllib
from pathlib import Path
from typing import Any

import pytest
from ruamel.yaml import YAML

from bigbrain_fx.core import VERSION
from tools.commit_subject import MOST_CHARACTERS, main, message_faults

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


CONFIG = YAML(typ="safe").load(ROOT / ".pre-commit-config.yaml")
HOOKS = {hook["id"]: hook for repo in CONFIG["repos"] for hook in repo["hooks"]}


@pytest.mark.parametrize(
    "message",
    [
        "planning: compare whole devices when grouping them",
        "runtime, supervisor: name the device of a lost link\n\nIt was cut from a sentence.\n",
        "tests.golden: add a bundle of replicas",
        "tools: check messages\n# Please enter the commit message for your changes.\n",
        f"tools: {'x' * (MOST_CHARACTERS - 7)}",
        "Merge branch 'faults'",
        'Revert "planning: compare whole devices"',
        "fixup! planning: compare whole devices",
    ],
)
def test_a_change_of_an_area_is_a_subject(message: str) -> None:
    assert not list(message_faults(message))


@pytest.mark.parametrize(
    ("message", "count"),
    [
        ("", 1),
        ("# only a comment\n", 1),
        ("Norms are taken out again", 1),
        ("Runtime: name the device", 1),
        ("runtime:name the device", 1),
        ("runtime: ", 1),
        ("runtime: What leaves in turn is a queue of sends", 1),
        ("runtime: name the device.", 1),
        (f"tools: {'x' * (MOST_CHARACTERS - 6)}", 1),
        ("runtime: name the device\nin the same paragraph", 1),
        (f"What is long {'x' * MOST_CHARACTERS}.\nno blank line", 4),
    ],
)
def test_each_broken_rule_is_reported(message: str, count: int) -> None:
    assert len(list(message_faults(message))) == count


@pytest.mark.parametrize(("subjects", "code"), [(["runtime: name it"], 0), (["Names"], 1), ([], 2)])
def test_the_hook_ends_with_a_code(tmp_path: Path, subjects: list[str], code: int) -> None:
    files = [tmp_path / str(number) for number in range(len(subjects))]
    for file, subject in zip(files, subjects, strict=True):
        file.write_text(subject + "\n", encoding="utf-8")
    assert main([str(file) for file in files]) == code


def test_hooks_need_no_network_and_are_installed() -> None:
    assert {repo["repo"] for repo in CONFIG["repos"]} == {"local"}
    for hook in HOOKS.values():
        program = Path(shlex.split(hook["entry"])[0])
        assert program.parent == Path(".venv/bin"), hook["id"]
        assert Path(sys.executable).with_name(program.name).exists(), hook["id"]


def test_every_check_of_a_commit_has_its_hook() -> None:
    assert {"ruff-check", "ruff-format", "mypy", "lint-imports", "changelog"} <= HOOKS.keys()
    assert HOOKS["commit-subject"]["stages"] == ["commit-msg"]
    assert set(CONFIG["default_install_hook_types"]) == {"pre-commit", "commit-msg"}


@pytest.mark.parametrize(
    ("hook", "text"),
    [
        ("end-of-file-fixer", b"no newline"),
        ("check-merge-conflict", b"<<<<<<< HEAD\n1\n=======\n2\n>>>>>>> other\n"),
        ("check-added-large-files", b"0" * 1_100_000),
    ],
)
def test_a_fault_of_hygiene_fails_its_hook(tmp_path: Path, hook: str, text: bytes) -> None:
    (tmp_path / "file.txt").write_bytes(text)
    run(tmp_path, "git", "init", "-q")
    run(tmp_path, "git", "add", "file.txt")
    program, *options = shlex.split(HOOKS[hook]["entry"])
    path = Path(sys.executable).with_name(Path(program).name)
    code = run(tmp_path, str(path), *options, "file.txt")
    assert code == 1


def run(folder: Path, *command: str) -> int:
    return subprocess.run(command, cwd=folder, capture_output=True, timeout=60).returncode

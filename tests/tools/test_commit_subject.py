"""Commit messages: an area, at most 72 characters, and hooks of pre-commit that need no network."""

from __future__ import annotations

import shlex
import subprocess
import sys
from pathlib import Path

import pytest
from ruamel.yaml import YAML

from tools.commit_subject import MOST_CHARACTERS, main, message_faults

ROOT = Path(__file__).resolve().parents[2]
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

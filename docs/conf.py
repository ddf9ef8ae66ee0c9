"""Sphinx's settings: `make docs` builds docs/ into docs/_build, with warnings as errors."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path
from typing import Any

import click

from bigbrain_fx.cli.group import cli

ROOT = Path(__file__).resolve().parents[1]

project = "bigbrain-fx"
release = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]["version"]
extensions = ["myst_parser", "sphinx_click"]
myst_enable_extensions = ["colon_fence"]
myst_heading_anchors = 3
exclude_patterns = ["_build"]
html_theme = "furo"
html_title = f"bigbrain-fx {release}"
nitpicky = True
STUDY = re.compile(r"\[([^\]]+)\]\((?:\.\./)+(tools/[\w./-]+)(?:#[\w-]+)?\)")


def _inside(app: object, name: str, source: list[str]) -> None:
    """Name files outside of docs/ by their path: the site has no page of them."""
    text = STUDY.sub(r"\1 (`\2`)", source[0])
    source[0] = text.replace("```mermaid", "```text")


def _with_names() -> None:
    """Let each option fill in the names of plug-ins, which it does when its help is asked for."""
    for name in cli.list_commands(click.Context(cli)):
        command = cli.get_command(click.Context(cli), name)
        assert command is not None
        command.get_help(click.Context(command, info_name=name))


def setup(app: Any) -> None:  # noqa: ANN401  # Sphinx need not be there when this is checked
    """Let Sphinx call `_inside` for each page that it reads."""
    _with_names()
    app.connect("source-read", _inside)

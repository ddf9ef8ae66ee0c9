"""Help of every command: its length, its groups, and the default of each option."""

from __future__ import annotations

import re
from collections.abc import Iterator

import click
import pytest

from bigbrain_fx.cli import cli
from bigbrain_fx.cli.command import GROUPS
from tests.support.command_line import call

GROUP = click.Context(cli)
MOST_LINES = 45
TEN = 10
SPLIT_GROUPS = set(GROUPS) - {"checkpoints", "failures"}


def records() -> Iterator[tuple[str, str]]:
    """Yield each option as "command --option", and its help as it is shown."""
    for name in cli.list_commands(GROUP):
        command = cli.get_command(GROUP, name)
        assert command is not None
        context = click.Context(command, info_name=name, show_default=True)
        for parameter in command.params:
            record = parameter.get_help_record(context)
            if record is not None:
                yield f"{name} {parameter.opts[-1]}", record[1]


def test_no_option_states_its_default_twice() -> None:
    shown = dict(records())
    assert "split --rewrite" in shown
    assert [name for name, text in shown.items() if text.count("[default:") > 1] == []


@pytest.mark.parametrize("name", ["split", "estimate", "compare", "run"])
def test_help_of_a_command_is_one_page_and_help_all_has_every_option(name: str) -> None:
    short, whole = call(name, "--help").out, call(name, "--help-all").out
    assert len(short.splitlines()) <= MOST_LINES
    described = re.findall(r"^  (?:-\w, )?(--[a-z-]+)", short, re.MULTILINE)
    assert len(described) == TEN + len(("--help", "--help-all"))
    for parameter in cli.commands[name].params:
        if isinstance(parameter, click.Option):
            assert parameter.opts[-1] in short
            assert re.search(rf"^  (?:-\w, )?{parameter.opts[-1]}\b", whole, re.MULTILINE)


def test_groups_stand_in_their_order_in_help_all() -> None:
    found = re.findall(r"^(\S.*):$", call("split", "--help-all").out, re.MULTILINE)
    assert found == ["Options", *(group.capitalize() for group in GROUPS if group in SPLIT_GROUPS)]


def test_a_command_with_few_options_describes_them_all() -> None:
    assert "--help-all" not in call("explain", "--help").out

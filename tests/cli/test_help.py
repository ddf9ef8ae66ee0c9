"""Help of every command: what each option says of its default."""

from __future__ import annotations

from collections.abc import Iterator

import click

from bigbrain_fx.cli import cli

GROUP = click.Context(cli)


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

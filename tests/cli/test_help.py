"""Help of every command: its length, groups, defaults; earlier names of options."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

import click
import pytest

from bigbrain_fx.cli import cli
from bigbrain_fx.cli.command import Option
from tests.support.command_line import call, write_cluster, write_model

GROUP = click.Context(cli)
MOST_LINES = 45
TEN = 10


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
    assert "split --compile" in shown
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


RENAMED = {
    (name, old): param.opts[-1]
    for name in cli.list_commands(click.Context(cli))
    for param in (cli.commands[name]).params
    if isinstance(param, Option)
    for old in param.old
}


def test_every_option_that_was_renamed_is_known() -> None:
    assert RENAMED["split", "--recompute"] == "--activation-checkpointing"
    assert RENAMED["run", "--commits"] == "--checkpoint-dir"
    assert RENAMED["profile", "--tensor-shares"] == "--tp-ratio"
    assert len(RENAMED) > 40


@pytest.mark.parametrize(("name", "old"), RENAMED)
def test_an_old_name_is_parsed_as_the_present_one_and_not_shown(name: str, old: str) -> None:
    command = cli.commands[name]
    context = click.Context(command, info_name=name)
    given = {
        flag: command.make_parser(context).parse_args([flag, "x"])[0]
        for flag in (old, RENAMED[name, old])
    }
    first, second = given.values()
    assert first == second
    assert f"{old} " not in call(name, "--help").out.replace("=", " ")


def test_an_old_name_works_and_names_the_present_one_once(tmp_path: Path) -> None:
    model, cluster = write_model(tmp_path), write_cluster(tmp_path)
    words = ("estimate", model, "--devices", cluster, "--partitioner", "naive", "--json")
    old = call(*words, "--leaf", "Net", "--leaf=Linear", "--recompute", "all")
    new = call(*words, "--opaque", "Net", "--opaque=Linear", "--activation-checkpointing", "all")
    assert (old.code, old.out) == (new.code, new.out)
    assert old.err.count("note: --leaf is now --opaque; the old name works until 0.4.0\n") == 1
    assert old.err.count("note: ") == 2
    assert "note: " not in new.err


@pytest.mark.parametrize(
    "variable",
    [
        "BIGBRAIN_FX_ALL_REDUCE_ORDER",
        "BIGBRAIN_FX_SUM_ORDER",
        "BIGBRAIN_FX_ESTIMATE_ALL_REDUCE_ORDER",
        "BIGBRAIN_FX_ESTIMATE_SUM_ORDER",
    ],
)
def test_the_environment_has_both_names(
    variable: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv(variable, "nonsense")
    done = call("estimate", write_model(tmp_path), "--devices", write_cluster(tmp_path))
    assert done.code == 2
    assert "'nonsense' is not one of 'replica', 'micro', 'tree', 'backend'" in done.err


def test_an_option_with_a_short_name_comes_from_the_environment_by_its_long_one(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("BIGBRAIN_FX_DEVICES", "nowhere.json")
    done = call("estimate", write_model(tmp_path))
    assert "nowhere.json" in done.err


def test_help_lists_the_commands_of_a_first_split_in_their_order() -> None:
    text = call("--help").out
    first, more = text.split("More commands:")
    assert [line.split()[0] for line in first.splitlines() if line[2:3].isalpha()][-7:] == [
        *("init", "doctor", "estimate", "split", "verify", "run", "export")
    ]
    assert "  compare  " in more


def test_an_unknown_option_is_answered_with_present_names() -> None:
    answer = call("run", "bundle", "--step", "3")
    assert answer.code == 2
    assert "'--steps'" in answer.err
    assert "--store" not in answer.err

"""Options that several commands share, and how they become `Options`. Knows click; runs nothing."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

if TYPE_CHECKING:
    from bigbrain_fx.plan import Options

Command = Callable[..., Any]
PATH = click.Path(readable=False, path_type=Path)  # the room that reads says what is wrong


class Listed(click.Option):
    """An option whose help ends with names that only plug-ins know; `{names}` stands for them."""

    def get_help_record(self, ctx: click.Context) -> tuple[str, str] | None:
        """Fill in the names when the help is shown, and not before: loading plug-ins takes time."""
        from bigbrain_fx.plugins import names
        from bigbrain_fx.schedule import SCHEDULES

        listed = {"partitioner": names(), "estimator": names("estimator")}
        found = listed.get(self.name or "", tuple(sorted(SCHEDULES)))
        self.help = (self.help or "").replace("{names}", ", ".join(found))
        return super().get_help_record(ctx)


def _option(flag: str, **settings: Any) -> Callable[[Command], Command]:  # noqa: ANN401  # click's own
    """Make an option that all commands take from one variable of the environment."""
    variable = f"BIGBRAIN_FX_{flag.removeprefix('--').replace('-', '_').upper()}"
    return click.option(flag, envvar=variable, **settings)


def json_option(command: Command) -> Command:
    """Add --json."""
    text = "Print JSON alone on stdout, one object a line."
    made = click.option("--json", "as_json", is_flag=True, envvar="BIGBRAIN_FX_JSON", help=text)
    return made(command)


def planning_options(command: Command) -> Command:
    """Add the options that choose a plan."""
    for option in (
        _option(
            "--time-limit",
            type=click.FloatRange(min=0, min_open=True),
            default=600.0,
            show_default=True,
            help="Seconds that loading and capturing the model file may take.",
        ),
        _option(
            "--seed",
            type=click.IntRange(min=0, max=2**63 - 1),
            default=0,
            show_default=True,
            help="Seed of weights, data and dropout.",
        ),
        _option(
            "--micro-batches",
            type=int,
            help="Equal parts that a batch is split into [default: the fastest by forecast].",
        ),
        _option(
            "--schedule",
            cls=Listed,
            help="One of {names} [default: 1f1b for chains, list else].",
        ),
        _option(
            "--estimator",
            cls=Listed,
            help="One of {names} [default: the partitioner's own].",
        ),
        _option(
            "--partitioner",
            cls=Listed,
            default="analytical",
            show_default=True,
            help="One of {names}.",
        ),
        _option("--devices", required=True, type=PATH, help="The cluster.json."),
    ):
        command = option(command)
    return command


def chosen(choices: dict[str, Any]) -> Options:
    """Turn what was given to `planning_options` into Options.

    Raises:
        InputError: there is no such partitioner.
    """
    from bigbrain_fx.plan import Options
    from bigbrain_fx.plugins import preset

    partitioner, own = preset(choices["partitioner"])
    return Options(
        partitioner,
        choices["estimator"] or own,
        choices["schedule"],
        choices["micro_batches"],
        choices["seed"],
    )

"""Commands whose options stand in groups, and options that still answer to an older name.

`--help` describes the options that most people need and names the others by group; `--help-all`
describes all. Knows click; declares no option of a command.
"""

from __future__ import annotations

import importlib
import os
import textwrap
from collections.abc import Callable, Sequence
from typing import Any

import click

GROUPS = (
    "model",
    "cluster and plan",
    "parallelism",
    "schedule",
    "memory",
    "numerics",
    "checkpoints",
    "failures",
    "output",
)
RENAMED = {
    "--cache": "--kv-cache",
    "--commit-every": "--checkpoint-every",
    "--commits": "--checkpoint-dir",
    "--defer": "--delay-weight-gradients",
    "--leaf": "--opaque",
    "--pieces": "--virtual-stages",
    "--recompute": "--activation-checkpointing",
    "--replica-shares": "--replica-ratio",
    "--snapshot-every": "--memory-checkpoint-every",
    "--snapshots": "--memory-checkpoint-dir",
    "--spares": "--standby",
    "--store": "--offload-dir",
    "--sum-order": "--all-reduce-order",
    "--tensor": "--tensor-parallel",
    "--tensor-axes": "--tp-axes",
    "--tensor-shares": "--tp-ratio",
}
"""Earlier names of options, which a parameter still has, as the field of `Options` does."""
_MARGIN = 4  # beside two columns
FEW = 16  # options; a command that has no more describes them all
NOTE = "note: {old} is now {new}; the old name works until 0.4.0"
Declared = Callable[..., Any]
Read = Callable[[click.Context, click.Parameter, Any], Any]


class Option(click.Option):
    """An option with a group, and names that it had before, which work and are shown nowhere.

    Attributes:
        flag: its long name, with dashes.
        group: one of `GROUPS`; "" where `--help` describes the option.
        old: earlier names.
    """

    group = ""

    def __init__(self, names: Sequence[str], shared: bool = False, **settings: Any) -> None:  # noqa: ANN401
        """Declare it as click does; `shared`: all commands take it from one variable, too."""
        self.flag, self.shared = next(name for name in names if name.startswith("--")), shared
        self.old = tuple(old for old, new in RENAMED.items() if new == self.flag)
        is_named = any(name.isidentifier() for name in names)
        dest = [name[2:].replace("-", "_") for name in self.old if not is_named]
        super().__init__([*names, *dest], **settings)

    def add_to_parser(self, parser: Any, ctx: click.Context) -> None:  # noqa: ANN401  # click's own
        """Let the parser take the old names, too."""
        shown, self.opts = self.opts, [*self.opts, *self.old]
        super().add_to_parser(parser, ctx)
        self.opts = shown

    def resolve_envvar_value(self, ctx: click.Context) -> str | None:
        """Read the environment, by the present name and the old ones."""
        flags = (self.flag, *self.old)
        prefixes = (["BIGBRAIN_FX"] if self.shared else []) + [ctx.auto_envvar_prefix or ""]
        words = [flag[2:].replace("-", "_").upper() for flag in flags]
        found = (os.environ.get(f"{prefix}_{word}") for prefix in prefixes for word in words)
        return next(filter(None, found), None) or super().resolve_envvar_value(ctx)


def grouped(group: str, *options: Callable[[Declared], Declared]) -> Callable[[Declared], Declared]:
    """Join options of one group to a decorator; their help is in this order."""

    def add(command: Declared) -> Declared:
        known = [*getattr(command, "__click_params__", ())]
        for each in reversed(options):
            command = each(command)
        for param in getattr(command, "__click_params__", ()):
            if isinstance(param, Option) and param not in known:
                param.group = param.group or group
        return command

    return add


class Command(click.Command):
    """A command that shows the options of groups by name only, unless asked for all."""

    def get_params(self, ctx: click.Context) -> list[click.Parameter]:
        """Add `--help-all` where `--help` leaves something out."""
        found = super().get_params(ctx)
        return [*found, _HELP_ALL] if len(found) > FEW and any(map(_group, found)) else found

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        """Parse; name the present name of an old one, once a command."""
        given = {word.partition("=")[0] for word in args}
        for param in (each for each in self.params if isinstance(each, Option)):
            for old in given.intersection(param.old):
                click.echo(NOTE.format(old=old, new=param.flag), err=True)
        try:
            return super().parse_args(ctx, args)
        except click.NoSuchOption as error:
            present = [name for name in error.possibilities or () if name not in RENAMED]
            raise click.NoSuchOption(error.option_name, None, present, error.ctx) from None

    def format_options(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """Write options by group: with their help, or the names of a group in one row."""
        params = [each for each in self.get_params(ctx) if isinstance(each, click.Option)]
        is_short = _HELP_ALL in params
        with formatter.section("Options"):
            formatter.write_dl(_records(ctx, params, "" if is_short else None))
        if not is_short:
            return
        groups = [group for group in GROUPS if group in map(_group, params)]
        if not ctx.meta.get("help_all", False):
            with formatter.section("More options, described by --help-all"):
                width = formatter.width - len(max(groups, key=len)) - _MARGIN
                formatter.write_dl([(group, _names(params, group, width)) for group in groups])
            return
        for group in groups:
            with formatter.section(group.capitalize()):
                formatter.write_dl(_records(ctx, params, group))


def reads(name: str, package: str = "bigbrain_fx.plan", **settings: object) -> Read:
    """Make the callback of an option whose text a function reads.

    Args:
        name: function of `package`, which is imported when a command runs.
        package: dotted name.
        settings: more arguments of the function.
    """

    def read(ctx: click.Context, _param: click.Parameter, value: Any) -> Any:  # noqa: ANN401
        if ctx.resilient_parsing:
            return value
        return getattr(importlib.import_module(package), name)(value, **settings)

    return read


def _group(param: click.Parameter) -> str:
    return getattr(param, "group", "")


def _records(
    ctx: click.Context, options: list[click.Option], group: str | None
) -> list[tuple[str, str]]:
    """Return the rows of a group's options; None: of all."""
    shown = (each.get_help_record(ctx) for each in options if group in (None, _group(each)))
    return [record for record in shown if record is not None]


def _names(options: list[click.Option], group: str, width: int) -> str:
    """Return the flags of a group in lines that end at no hyphen, marked as such for click."""
    names = " ".join(getattr(each, "flag", "") for each in options if _group(each) == group)
    return "\b\n" + "\n".join(textwrap.wrap(names, width, break_on_hyphens=False))


def _show_all(ctx: click.Context, _param: click.Parameter, value: bool) -> None:
    if value and not ctx.resilient_parsing:
        ctx.meta["help_all"] = True
        click.echo(ctx.get_help())
        ctx.exit()


_HELP_ALL = click.Option(
    ["--help-all"],
    is_flag=True,
    is_eager=True,
    expose_value=False,
    callback=_show_all,
    help="Describe all options and exit.",
)

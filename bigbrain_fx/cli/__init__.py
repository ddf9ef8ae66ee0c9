"""The command line; `main` is its door. Commands are added to the group where they are defined."""

from bigbrain_fx.cli import (
    background,
    comparing,
    launching,
    measuring,
    packing,
    planning,
    resplitting,
    running,
    serving,
    starting,
    weights,
)
from bigbrain_fx.cli.group import cli, main
from bigbrain_fx.cli.templates import write_starter

__all__ = [
    "background",
    "cli",
    "comparing",
    "launching",
    "main",
    "measuring",
    "packing",
    "planning",
    "resplitting",
    "running",
    "serving",
    "starting",
    "weights",
    "write_starter",
]

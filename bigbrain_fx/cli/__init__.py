"""The command line; `main` starts it. Commands are added to the group where they are defined."""

from bigbrain_fx.cli import (
    background as background,
    comparing as comparing,
    launching as launching,
    measuring as measuring,
    packing as packing,
    planning as planning,
    resplitting as resplitting,
    running as running,
    serving as serving,
    starting as starting,
    weights as weights,
)
from bigbrain_fx.cli.group import cli as cli, main as main
from bigbrain_fx.cli.templates import write_starter as write_starter

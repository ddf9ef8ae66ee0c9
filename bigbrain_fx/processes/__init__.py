"""Processes that are forks of one that has imported what all of them need; stdlib only."""

from bigbrain_fx.processes.forking import Order as Order, become as become
from bigbrain_fx.processes.forks import (
    PROGRAM as PROGRAM,
    Forked as Forked,
    Forking as Forking,
    ahead as ahead,
    end_ahead as end_ahead,
    start_ahead as start_ahead,
    take as take,
)

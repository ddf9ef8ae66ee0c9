"""Processes that are forks of one that has imported what all of them need; stdlib only."""

from pathlib import Path

from bigbrain_fx.processes.forking import Order as Order, become as become

PROGRAM = Path(__file__).with_name("forking.py")

"""`simulate --mtbf`: what failures would take. Its options, and how the answer is printed."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING

import click

from bigbrain_fx.cli.command import grouped
from bigbrain_fx.cli.options import option
from bigbrain_fx.cli.output import emit
from bigbrain_fx.errors import InputError

if TYPE_CHECKING:
    from bigbrain_fx.plan import Plan, Recovery

TORCHRUN_RESTART_S = 8.0  # to start all processes again, as measured for torchrun: 5.4 to 8.4 s


failure_options = grouped(
    "",
    option(
        "--mtbf",
        metavar="DURATION",
        help='Let processes fail: the mean time between two failures of the job, as "4h".',
    ),
    option(
        "--host-share",
        type=click.FloatRange(0, 1),
        default=0.1,
        help="With --mtbf: share of the failures that take a whole host.",
    ),
)
"""The options of a simulation with failures."""


def read_duration(text: str, flag: str) -> float:
    """Read "4h" as seconds.

    Raises:
        InputError: it is none.
    """
    from bigbrain_fx.cluster import BadValueError, duration_s

    try:
        return duration_s(text)
    except BadValueError as error:
        raise InputError(error.what, code=error.code, at=flag, help=error.help) from error


def print_failures(plan: Plan, mtbf: str, host_share: float, as_json: bool) -> None:
    """Print how much of the time a plan would train, with failures."""
    from bigbrain_fx.plan import Assumptions, choose, closed_form, restart_all

    if plan.mode != "train":
        raise InputError(
            "--mtbf is for training", code="BX3502", help="inference has no state to recover"
        )
    mtbf_s = read_duration(mtbf, "--mtbf")
    recovery = choose(plan, Assumptions(mtbf_s, host_share))
    effective = closed_form(recovery, mtbf_s)
    every_s = max(recovery.step_s, (2 * recovery.commit_s * mtbf_s) ** 0.5)
    restarts = restart_all(recovery, mtbf_s, TORCHRUN_RESTART_S, every_s)
    found = {
        "effective": effective,
        "restart_all": restarts,
        "recovery": dataclasses.asdict(recovery),
    }
    emit(as_json, found, "\n".join(_lines(recovery, effective, restarts)))


def _lines(recovery: Recovery, effective: float, restarts: float) -> list[str]:
    return [
        str(recovery),
        f"training {100 * effective:.2f} % of the time; starting everything again from checkpoints "
        f"would give {100 * restarts:.2f} %",
    ]

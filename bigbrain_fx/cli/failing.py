"""`simulate --mtbf`: what failures would take. Its options, and how the answer is printed."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING

import click

from bigbrain_fx.cli.command import grouped
from bigbrain_fx.cli.options import POSITIVE, option
from bigbrain_fx.cli.output import emit
from bigbrain_fx.errors import InputError

if TYPE_CHECKING:
    from bigbrain_fx.plan import FailureTrial, Plan, Recovery

TORCHRUN_RESTART_S = 8.0  # to start all processes again, as measured for torchrun: 5.4 to 8.4 s


failure_options = grouped(
    "",
    option(
        "--mtbf",
        metavar="DURATION",
        help='Let processes fail: the mean time between two failures of the job, as "4h".',
    ),
    option("--hours", type=POSITIVE, default=100.0, help="With --mtbf: how long to run."),
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


def print_failures(
    plan: Plan, mtbf: str, hours: float, host_share: float, seed: int, as_json: bool
) -> None:
    """Print how much of the time a plan would train, with failures."""
    from bigbrain_fx.plan import Assumptions, choose, closed_form, restart_all, tried

    if plan.mode != "train":
        raise InputError(
            "--mtbf is for training", code="BX3502", help="inference has no state to recover"
        )
    mtbf_s = read_duration(mtbf, "--mtbf")
    recovery = choose(plan, Assumptions(mtbf_s, host_share))
    trial, formula = tried(recovery, mtbf_s, hours, seed), closed_form(recovery, mtbf_s)
    every_s = max(recovery.step_s, (2 * recovery.commit_s * mtbf_s) ** 0.5)
    restarts = restart_all(recovery, mtbf_s, TORCHRUN_RESTART_S, every_s)
    found = {
        "effective": trial.effective,
        "closed_form": formula,
        "restart_all": restarts,
        **dataclasses.asdict(trial),
        "recovery": dataclasses.asdict(recovery),
    }
    emit(as_json, found, "\n".join(_lines(recovery, trial, formula, restarts)))


def _lines(recovery: Recovery, trial: FailureTrial, formula: float, restarts: float) -> list[str]:
    hours = trial.total_s / 3600
    return [
        str(recovery),
        f"{hours:g} hours: {trial.failures} failures, of which {trial.hosts_lost} took a host; "
        f"{trial.recovering_s:.0f} s recovering, {trial.undone_s:.0f} s of steps undone",
        f"training {100 * trial.effective:.2f} % of the time (closed form {100 * formula:.2f} %); "
        f"starting everything again from commits would give {100 * restarts:.2f} %",
    ]

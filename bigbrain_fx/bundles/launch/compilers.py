"""What a plan of compiled stages asks of this host, and of who waits for its devices."""

from __future__ import annotations

from bigbrain_fx.errors import InputError
from bigbrain_fx.plan import Plan
from bigbrain_fx.runtime import LONGEST_COMPILE_S, CompilerError, require_compiler

PATIENCE_S = 300.0  # longest wait for a message


def require_compilers(plan: Plan) -> None:
    """Refuse to start processes that could not compile their stages.

    Raises:
        InputError: this host lacks a C++ compiler, and a CPU device has compiled stages.
    """
    if not plan.stages.compiled:
        return
    for name in plan.stages.devices:
        if plan.cluster.device[name].kind == "cpu":
            try:
                require_compiler(name)
            except CompilerError as error:
                what, _, help_ = str(error).rpartition(": ")
                raise InputError(what, code=error.code, help=help_) from error


def patience_s(plan: Plan, asked_s: float | None) -> float:
    """Return how long a device is waited for: in its first step it may compile."""
    if asked_s is not None:
        return asked_s
    return LONGEST_COMPILE_S if plan.stages.compiled else PATIENCE_S

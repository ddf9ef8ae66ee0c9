"""Verify a bundle: start the process that compares it with the model it was split from.

The process (`bigbrain_fx.verification`) runs the model's code; this file runs none.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

from bigbrain_fx.bundles.found_model import IN_MEMORY
from bigbrain_fx.bundles.launch import RunOptions, require_compilers, run
from bigbrain_fx.core import Shown
from bigbrain_fx.emit import is_bare
from bigbrain_fx.errors import InputError, VerificationError
from bigbrain_fx.frontend import Child, Task, require_folder
from bigbrain_fx.plan import Plan, read_plan
from bigbrain_fx.weights import Scratch

TIME_LIMIT_S = 900.0


@dataclass(frozen=True)
class Check:
    """One link of the chain: whether it holds, and how that was seen, or what differs.

    `passed` is None for a link that was not run; `detail` says why. `rounded`: to rounding only.
    `warns`: the plan itself makes the difference, and its user was warned. `apart`: path of the
    module that first has another result, where that is known.
    """

    name: str
    passed: bool | None
    detail: str
    rounded: bool = False
    warns: bool = False
    apart: str = ""

    @property
    def word(self) -> str:
        """Return the result of a check as one word."""
        if self.warns:
            return "differs"
        if self.passed and self.rounded:
            return "to rounding"
        return {True: "equal", False: "DIFFERENT", None: "not run"}[self.passed]


@dataclass(frozen=True, repr=False)
class Verification(Shown):
    """All links of the chain, in order."""

    checks: tuple[Check, ...]

    @property
    def passed(self) -> bool:
        """Whether every link holds that was run."""
        return all(check.passed is not False for check in self.checks)

    def require_passed(self) -> None:
        """Raise unless every link holds that was run.

        Raises:
            VerificationError: names the first link that does not.
        """
        failed = [check for check in self.checks if check.passed is False]
        if failed:
            notes = tuple(f"{check.name}: {check.detail}" for check in failed)
            raise VerificationError(
                f"the bundle does not compute what the model computes: {failed[0].name}",
                code="BX3800",
                notes=notes,
                help="please report the model; until then, "
                "try `--partitioner naive` or fewer devices",
            )

    def __str__(self) -> str:
        return "\n".join(f"{c.word}  {c.name}: {c.detail}" for c in self.checks)


def verify(
    bundle: str | Path,
    *,
    steps: int = 5,
    model: str | None = None,
    processes: bool = False,
    time_limit_s: float = TIME_LIMIT_S,
) -> Verification:
    """Compare a bundle with the model it was split from.

    Args:
        bundle: the folder that `split` wrote.
        steps: training steps: compared are the losses of all, the gradients of the first, and every
            tensor at the end. For inference batches: compared are all outputs.
        model: the model file, when it has moved.
        processes: run the bundle as real processes over gloo; else all devices in one process.
        time_limit_s: how long the child process may take.

    Raises:
        InputError: no bundle, or the model file is gone or has changed.
    """
    require_folder()
    folder = Path(bundle).resolve()
    plan = read_plan(folder)
    if not model and (not plan.source.path or plan.source.module == IN_MEMORY):
        raise InputError(
            "this bundle was split from a module in memory",
            code="BX3801",
            help="give the model file with --model",
        )
    if is_bare(folder):
        raise InputError(
            f"{folder} was split with --bare, and has nothing that runs it in one process",
            code="BX3166",
            help="split the same with --lean: the device files are the same, and are verified",
        )
    require_compilers(plan)
    task = Task(
        module="bigbrain_fx.verification.child",
        name="verification",
        slow="verification {}",
        slow_help="use fewer --steps",
        ended_help="look at its output above",
        limit_s=time_limit_s,
        subject=Path((model or plan.source.path).partition(":")[0]).name,
        at=model or plan.source.path,
    )
    with Scratch("verify") as scratch:
        trained = _run_processes(plan, folder, steps, Path(scratch)) if processes else None
        wanted = {"bundle": str(folder), "model": model, "steps": steps, "processes": trained}
        with Child(task, wanted, threads=1) as child:
            checks = cast("list[dict[str, Any]]", child.answer()["checks"])
    return Verification(tuple(Check(**check) for check in checks))


def _run_processes(plan: Plan, bundle: Path, steps: int, scratch: Path) -> dict[str, Any]:
    if plan.mode == "eval":
        folder = scratch / "outputs"
        run(bundle, RunOptions(steps, threads=1, logs=scratch / "logs", outputs=folder))
        return {"outputs": str(folder)}
    options = RunOptions(
        steps=steps,
        save=scratch / "tensors",
        first_gradients=scratch / "gradients",
        threads=1,
        logs=scratch / "logs",
        on_nan="ignore" if (bundle / "runtime" / "finite.py").exists() else None,
    )
    done = run(bundle, options)
    paths = {"tensors": str(options.save), "gradients": str(options.first_gradients)}
    return {"losses": [line.loss for line in done.steps], **paths}

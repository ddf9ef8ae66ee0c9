"""Results of each way to split a model, without processes and files."""

from __future__ import annotations

import statistics
from dataclasses import dataclass

from bigbrain_fx.core import Send, Shown
from bigbrain_fx.errors import InputError, VerificationError
from bigbrain_fx.measure.comparison.agreement import Agreement
from bigbrain_fx.plan import Plan, part_channels


@dataclass(frozen=True)
class Contender:
    """One way to split the model: its plan, or why there is none; and what it was measured to take.

    Attributes:
        name: as it was asked for: a preset or a partitioner.
        partitioner: who places the ops.
        estimator: who says what they cost, and so who made the forecast.
        planning_s: seconds that planning took, or failing to; capture is not in it.
        plan: None where none was found.
        reason: why there is no plan, or why it did not run; empty if all went well.
        help: what to do about it.
        code: of the error that the reason is, where that has one.
        bundle: where it was written and kept, as text; empty if it was not kept.
        steps_s: measured seconds of each step (or batch of inference) but the first of each round.
        losses: of the first round, by step; none for inference.
        max_rss_bytes: largest resident memory of each device's process.
    """

    name: str
    partitioner: str
    estimator: str
    planning_s: float
    plan: Plan | None = None
    reason: str = ""
    help: str = ""
    bundle: str = ""
    steps_s: tuple[float, ...] = ()
    losses: tuple[float, ...] = ()
    max_rss_bytes: tuple[tuple[str, int], ...] = ()
    code: str | None = None

    @property
    def step_s(self) -> float | None:
        """Forecast seconds of a step; None without a plan."""
        return self.plan.forecast.step_s if self.plan else None

    @property
    def rows_per_s(self) -> float | None:
        """Forecast samples (rows of the batch) a second."""
        return self._rows_per_s(self.step_s)

    @property
    def measured_step_s(self) -> float | None:
        """Median of the measured steps, in seconds; None if it did not run."""
        return statistics.median(self.steps_s) if self.steps_s else None

    @property
    def measured_rows_per_s(self) -> float | None:
        """Measured samples (rows of the batch) a second."""
        return self._rows_per_s(self.measured_step_s)

    @property
    def cut_bytes(self) -> int | None:
        """Bytes of all messages between devices in one step: tensors, their gradients, the rest."""
        if self.plan is None:
            return None
        orders = (program.instructions for program in self.plan.programs)
        parts = sum(channel.nbytes for channel in part_channels(self.plan))
        sends = (i.edge.nbytes for order in orders for i in order if isinstance(i, Send))
        return parts + sum(sends)

    def _rows_per_s(self, step_s: float | None) -> float | None:
        if self.plan is None or not step_s:
            return None
        return self.plan.micro_batches * self.plan.rows / step_s


@dataclass(frozen=True, repr=False)
class Comparison(Shown):
    """Contenders in the order they were asked for.

    Attributes:
        model: the model's name.
        capture_s: seconds of the one capture that all share (0 for a module in memory).
        steps: that each ran in each round; None if none ran.
        agreements: whether they computed the same, each against an earlier one; none if none ran.
        warnings: of the capture.
    """

    model: str
    contenders: tuple[Contender, ...]
    capture_s: float
    steps: int | None = None
    agreements: tuple[Agreement, ...] = ()
    warnings: tuple[str, ...] = ()

    def of(self, name: str) -> Contender:
        """Return the contender of a name; KeyError if there is none."""
        return {contender.name: contender for contender in self.contenders}[name]

    @property
    def best(self) -> Contender | None:
        """The fastest: by measured step time if any ran, else by forecast; None without plans."""
        ran = [c for c in self.contenders if c.measured_step_s is not None]
        if ran:
            return min(ran, key=lambda c: c.measured_step_s or 0.0)
        planned = [c for c in self.contenders if c.plan is not None]
        return min(planned, key=lambda c: c.step_s or 0.0, default=None)

    @property
    def forecasts_differ_in_kind(self) -> bool:
        """Whether the forecasts were made by several estimators, so that they are not one scale."""
        return len({c.estimator for c in self.contenders if c.plan is not None}) > 1

    def require_sound(self) -> None:
        """Raise unless somebody has a plan (and ran), and what was computed is the same.

        Raises:
            InputError: nobody has a plan, or nobody's bundle ran; the reason of each.
            VerificationError: two with equal micro-batches computed different things.
        """
        done = [c for c in self.contenders if (c.steps_s if self.steps else c.plan)]
        if not done:
            raise InputError(
                "no contender has a plan" if not self._planned else "no contender's bundle ran",
                code="BX3812",
                notes=tuple(f"{c.name}: {c.reason}" for c in self.contenders),
                help=self.contenders[0].help or None,
            )
        failed = [agreement for agreement in self.agreements if not agreement.passed]
        if failed:
            raise VerificationError(
                "contenders computed different things, though their micro-batches are equal",
                code="BX3813",
                notes=tuple(map(str, failed)),
                help="`bigbrain-fx verify BUNDLE` says which differs from the model; "
                "--save FOLDER keeps the bundles",
            )

    @property
    def _planned(self) -> bool:
        return any(contender.plan for contender in self.contenders)

    def __str__(self) -> str:
        """Show the comparison as plain text, a line per contender."""
        lines = [f"{self.model}: captured in {self.capture_s:.1f} s"]
        for each in self.contenders:
            if each.step_s is None:
                lines.append(f"  {each.name}: {each.reason}")
                continue
            measured = each.measured_step_s
            said = "" if measured is None else f", measured {measured:.4f} s"
            why = f"; {each.reason}" if each.reason else ""
            lines.append(
                f"  {each.name}: forecast {each.step_s:.4f} s a step{said}, "
                f"planned in {each.planning_s:.2f} s{why}"
            )
        return "\n".join([*lines, *(f"  {agreement}" for agreement in self.agreements)])

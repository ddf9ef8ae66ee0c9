"""The difference between a training step on a whole batch and the same step in micro-batches.

Both processes, the one that plans and the one that has the model, exchange it: it knows no torch.
"""

from __future__ import annotations

from dataclasses import dataclass

from bigbrain_fx.core import LossCount


@dataclass(frozen=True, slots=True)
class MicroBatchEffect:
    """Losses and gradients of one step, whole and in micro-batches.

    Attributes:
        micro_batches: number of parts of the batch.
        rows: of the batch that was run; fewer than the example's where that is large.
        not_compared: why nothing was run; empty where it was.
        is_equal: whether both are the same step, but for rounding.
        is_sum: whether the loss grows with the rows, so that the parts' mean is smaller.
        whole_loss, parts_loss: loss of the whole batch; mean of the micro-batches' losses.
        gradient_error: norm of the difference of all gradients, over the norm of the batch's.
        parameter, parameter_error: the parameter with the largest difference, and that difference.
        after_steps: whether the difference appears only on weights that training has moved.
        cause: one sentence: which line, which entry.
        remedy: one sentence with the edit, which was tried; empty where only one micro-batch is
            right.
        loss_count: the count by which micro-batches would have to weigh.
        divided: entries with counts of the batch: each micro-batch gets its part of them.
        seen_in: number of parts that show the difference, where the example's micro-batches agree
            by chance; else 0.
        is_carried: whether the last micro-batch reads state that earlier ones wrote. Then
            `whole_loss` is its loss alone, `parts_loss` its loss after them.
    """

    micro_batches: int
    rows: int = 0
    not_compared: str = ""
    is_equal: bool = False
    is_sum: bool = False
    whole_loss: float = 0.0
    parts_loss: float = 0.0
    gradient_error: float = 0.0
    parameter: str = ""
    parameter_error: float = 0.0
    after_steps: bool = False
    cause: str = ""
    remedy: str = ""
    loss_count: LossCount | None = None
    divided: tuple[str, ...] = ()
    seen_in: int = 0
    is_carried: bool = False

    @property
    def differs(self) -> bool:
        """Whether micro-batches train something else: by numbers, else by rules on the graph."""
        return bool(self.cause) if self.not_compared else not self.is_equal

    @property
    def unknown(self) -> tuple[str, ...]:
        """A sentence for the user where nothing is known: neither numbers nor a rule."""
        if not self.not_compared or self.cause:
            return ()
        what = f"whether {self.micro_batches} micro-batches train what the whole batch trains"
        return (f"{what} is not known: {self.not_compared}. --micro-batches 1 trains it",)

    @property
    def difference(self) -> str:
        """Both losses, and by how much the gradients differ."""
        if self.not_compared:
            return f"not measured: {self.not_compared}"
        whole, parts = digits_apart(self.whole_loss, self.parts_loss)
        worst = f", at most {self.parameter_error:.2g} of one ({self.parameter})"
        when = " after a few steps" if self.after_steps else ""
        count = self.seen_in or self.micro_batches
        losses = f"loss {parts} in {count} micro-batches, {whole} whole"
        if self.is_carried:
            losses = f"loss of the last {parts} after the others, {whole} by itself"
        off = f"gradients differ by {self.gradient_error:.2g} of their norm"
        return f"{losses}; {off}{worst if self.parameter else ''}{when}"

    @property
    def warning(self) -> str:
        """The warning for the user who requested these micro-batches."""
        verb = "may train" if self.not_compared else "train"
        return (
            f"{self.micro_batches} micro-batches {verb} something else than the whole batch: "
            f"{self.difference}. {self.cause}. {self.remedy + '; or ' if self.remedy else ''}"
            "--micro-batches 1 trains the whole batch"
        )


_ALL_DIGITS = 17  # of a double


def digits_apart(one: float, other: float) -> tuple[str, str]:
    """Return two numbers with as many digits as it takes to see that they differ, four at least."""
    digits = 4
    while one != other and digits < _ALL_DIGITS and f"{one:.{digits}g}" == f"{other:.{digits}g}":
        digits += 1
    return f"{one:.{digits}g}", f"{other:.{digits}g}"

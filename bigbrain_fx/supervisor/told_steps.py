"""Steps that the caller was told of: each once, whoever ran it again since."""

from __future__ import annotations

from .job import OnStep


class ToldSteps:
    """Tell of steps, once each.

    Args:
        on_step: hears of each as soon as its loss is known.

    Attributes:
        newest: the last that was told; -1: none was.
    """

    def __init__(self, on_step: OnStep | None) -> None:
        self.on_step = on_step
        self.newest = -1

    def tell(self, step: int, loss: float, step_s: float) -> None:
        """Tell of a step, if it was not told before."""
        if step > self.newest:
            self.newest = step
            if self.on_step is not None:
                self.on_step(step, loss, step_s)

    def take_back(self, start: int) -> None:
        """Let steps from `start` on be told again: their losses were wrong."""
        self.newest = min(self.newest, start - 1)

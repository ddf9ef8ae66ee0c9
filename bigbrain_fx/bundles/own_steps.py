"""Steps of a session in the caller's process, each a whole step of the caller's own loop.

This is the last rung of a session: a model that no trace holds, or a change that no devices can
have. The numbers are those of the loop in plain PyTorch.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from bigbrain_fx.bundles.compile import Split
from bigbrain_fx.bundles.device_steps import CHANGED, OF_BATCH, DeviceSteps
from bigbrain_fx.bundles.found_model import Loss, Recipe
from bigbrain_fx.bundles.in_memory import own_loop
from bigbrain_fx.bundles.launch import Run
from bigbrain_fx.bundles.opaque import divides, may_run_whole, noted
from bigbrain_fx.errors import BigBrainError, InputError, warn_caller
from bigbrain_fx.plan import Options, Plan
from bigbrain_fx.supervisor import Event

if TYPE_CHECKING:
    from torch import Tensor, nn

    from bigbrain_fx.frontend import Fork, OwnLoop

_STEPS, _LIMIT_S = 4, 120.0  # of a fork
_FINAL = {
    "BX3047": "what is given is no module",
    "BX3048": "there is no example batch",
    **dict.fromkeys(
        ("BX3000", "BX3001", "BX3002", "BX3003", "BX3004", "BX3005"),
        "a function of the recipe has no source: a `def` in a file has",
    ),
}
"""Code of a refusal -> why it stands though plain PyTorch trains the module."""


class OwnSteps:
    """Steps of a loop in this process.

    Attributes:
        made: the plan and the bundle of the steps before, if devices ran them.
        steps: number of batches taken. events: of the processes of the steps before.
        done: the run of the steps before. has_ended: it takes no batch any more.

    Args:
        loop: the caller's.
        module: the caller's.
        leaves_out: tells whether a batch is not trained on.
    """

    def __init__(
        self, loop: OwnLoop, module: nn.Module, leaves_out: Callable[[object], bool]
    ) -> None:
        self._loop, self._module, self.leaves_out = loop, module, leaves_out
        self.made: Split | None = None
        self.done: Run | None = None
        self.events: list[Event] = []
        self.has_ended = False
        self._losses: dict[int, float] = {}

    @property
    def steps(self) -> int:
        """The number of batches taken."""
        return self._loop.step_number

    def follow(
        self, made: Split | None, events: list[Event], losses: dict[int, float], done: Run | None
    ) -> OwnSteps:
        """Go on after steps of devices; return itself."""
        self.made, self.events, self._losses, self.done = made, events, losses, done
        return self

    def require_open(self) -> None:
        """Refuse to go on after the end.

        Raises:
            InputError: the session has ended.
        """
        if self.has_ended:
            raise InputError(
                "this session has ended", code="BX3141a", help="make another: machine(model, ...)"
            )

    def send(self, batch: object) -> int:
        """Train on a batch; return the number of its step."""
        step = self.steps
        self._losses[step] = self._loop.step(batch)
        return step

    def loss(self, step: int) -> float:
        """Return the loss of a step."""
        return self._losses[step]

    def state_dict(self) -> dict[str, Tensor]:
        """Return copies of the module's weights."""
        return {name: t.detach().clone() for name, t in self._module.state_dict().items()}

    def save(self, to: Path, optimizer: Path | None) -> None:
        """Write the weights; the optimizer is the caller's own.

        Raises:
            InputError: a file for the optimizer is named.
        """
        from safetensors.torch import save_file

        if optimizer is not None:
            raise InputError(
                "the steps run in this process, and the optimizer's state is in your optimizer",
                code="BX3200",
                help="torch.save(optimizer.state_dict(), ...)",
            )
        save_file(self.state_dict(), to)

    def refresh(self) -> None:
        """Do nothing: the module has the weights of now."""

    def close(self) -> None:
        """Do nothing: module and optimizer have the state of the last step."""

    def end(self) -> None:
        """Take no more batches."""
        self.has_ended = True


@dataclass(frozen=True)
class OwnWay:
    """The way from a refusal to steps in this process, for a module that no devices can have."""

    module: nn.Module
    example: object
    loss: Loss | None
    recipe: Recipe
    options: Options

    def as_given(self) -> Fork:
        """Return a fork that has the module as it is now, and trains a few steps when asked."""
        from bigbrain_fx.frontend import Fork

        return Fork(lambda requests, say: say(self._trained()) if requests.readline() else None)

    def instead_of(self, refusal: BigBrainError, given: Fork) -> OwnSteps:
        """Return steps in place of a session that is refused, and warn of it.

        Args:
            refusal: of the session.
            given: made before anything has run the module: see `as_given`.

        Raises:
            BigBrainError: the refusal, where plain PyTorch does not train the module, either, or
                the options ask for devices.
        """
        if not may_run_whole(refusal, self.options, _FINAL):
            raise refusal
        try:
            steps = OwnSteps(self._loop(), self.module, self._leaves_out())
        except BigBrainError as error:
            is_same = error.code == refusal.code
            raise refusal if is_same else noted(refusal, error, "in this process") from error
        self._require_as_given(refusal, given)
        warn_caller(_warning(self.module, refusal))
        return steps

    def go_on(self, before: DeviceSteps, error: InputError, batch: object) -> OwnSteps | None:
        """Return steps that go on after those of devices; None where these cannot, either.

        Args:
            before: the steps of devices.
            error: why they do not take the next batch.
            batch: the next one.
        """
        from bigbrain_fx.runtime import ResumeError

        is_meant = error.code in (*CHANGED, *OF_BATCH)
        if not is_meant or self.options.strict or divides(self.options):
            return None
        try:
            loop = before.hand_over(self._loop, batch)
        except (InputError, ResumeError):
            return None
        if loop is None:
            return None
        own = OwnSteps(loop, self.module, before.leaves_out)
        return own.follow(before.made, before.events, before.losses, before.done)

    def _require_as_given(self, refusal: BigBrainError, given: Fork) -> None:
        """Refuse a module that capture has left otherwise: a counter in a closure, an iterator.

        Raises:
            BigBrainError: the refusal.
        """
        from bigbrain_fx.frontend import apart

        given.ask({})
        before, now = given.answer(_LIMIT_S), apart(self._trained, _LIMIT_S)
        if before is None or before != now:
            refusal.notes = (
                *refusal.notes,
                "nor can the whole step run in this process: the module or the loss keeps what its "
                "calls have changed since; of a model.py one device runs the step",
            )
            raise refusal

    def _trained(self) -> dict[str, str]:
        """Return the losses of a few steps on the example; the process is a fork."""
        import random

        import torch

        random.seed(0)
        torch.manual_seed(0)
        try:
            loop = self._loop()
            return {"losses": repr([loop.step(self.example) for _ in range(_STEPS)])}
        except Exception as error:  # the user's own code
            return {"error": repr(error)}

    def _loop(self) -> OwnLoop:
        return own_loop(self.module, self.example, self.loss, self.recipe)

    def _leaves_out(self) -> Callable[[object], bool]:
        """Return what tells whether a batch is smaller than the example, and left out."""
        from bigbrain_fx.frontend import take_apart

        if not self.recipe.drop_last:
            return lambda _batch: False
        rows = take_apart(self.example, dims=self.recipe.batch_dims).rows
        return lambda batch: take_apart(batch, dims=self.recipe.batch_dims).rows < rows


def require_no_state(plan: Plan, *, is_open: bool) -> None:
    """Refuse parts that keep state in attributes, which the loop may read and set: `net.h = None`.

    Args:
        plan: its devices would have copies of those attributes.
        is_open: whether the steps may run whole in this process; else there is a warning.

    Raises:
        InputError: names the attribute.
    """
    op = next((op for op in plan.graph.ops if op.state), None)
    if op is None:
        return
    refusal = InputError(
        f"forward goes by what earlier calls have left in an attribute ({op.state[0]!r}), which "
        "the loop may read and set, and a device has a copy of it",
        code="BX2152d",
        help="make it a buffer of the model (register_buffer), which forward writes",
    )
    if is_open:
        raise refusal
    warn_caller(f"{refusal.what}: {refusal.help}")


def _warning(module: nn.Module, refusal: BigBrainError) -> str:
    place = f"{refusal.at}: " if refusal.at else ""
    code = f" ({refusal.code})" if refusal.code else ""
    return (
        f"the training step of {type(module).__name__} is opaque: it runs whole in this process, "
        f"as a loop of your own, and no device of the cluster computes. No trace holds {place}"
        f"{refusal.what}{code}. Options(strict=True) refuses instead, with what to change; of a "
        "model.py one device of the cluster runs the step"
    )

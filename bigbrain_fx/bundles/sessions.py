"""A training loop of the caller's own whose steps are run by the devices of a bundle.

with machine(model, example_batch=batch, loss=loss) as session:
    for batch in data:
        loss = session.step(batch)

session ─▶ steps on the devices ─▶ where a change of the loop's cannot be split ─▶ steps here
"""

from __future__ import annotations

import atexit
import weakref
from pathlib import Path
from typing import TYPE_CHECKING

from bigbrain_fx.bundles.callers.elsewhere import Elsewhere
from bigbrain_fx.bundles.compile import Split
from bigbrain_fx.bundles.device_steps import DeviceSteps
from bigbrain_fx.bundles.launch import Run
from bigbrain_fx.bundles.own_steps import OwnSteps, OwnWay
from bigbrain_fx.core import Shown
from bigbrain_fx.errors import BigBrainError, InputError
from bigbrain_fx.plan import Explanation, Plan, explain
from bigbrain_fx.supervisor import Event, warn

if TYPE_CHECKING:
    from torch import Tensor, nn

_RATES = (
    "rates change by the optimizer that you gave (a scheduler of yours, group['lr'] = ...), or by "
    "lr_scale=lambda step: ... or scheduler=..., given to machine(...)"
)
_WHOLE = "session.step(batch) is forward, backward and the optimizer's step, on all devices"


class Session(Shown):
    """Steps of one model, on devices; made by a `Machine`, and a context manager.

    Where a loop changes what no devices can have, its steps go on in this process.

    Attributes:
        module: the caller's own. It has the weights after the last step when it is called, when its
            `state_dict` is read, and after a `with` block. An exception may end that.
    """

    def __init__(
        self, steps: DeviceSteps | OwnSteps, module: nn.Module, way: OwnWay | None
    ) -> None:
        self.module, self._way = module, way
        self._steps: DeviceSteps | OwnSteps = steps
        _OPEN.add(self)

    lr = Elsewhere(_RATES)
    optimizer = Elsewhere(f"the devices have it; {_RATES}")
    parameters = Elsewhere("the devices have them; state_dict() takes them from all, eval() too")
    backward = Elsewhere(_WHOLE)
    zero_grad = Elsewhere(_WHOLE)
    train = Elsewhere("it always trains; eval() gives your model the weights, and computes here")
    load_state_dict = Elsewhere("load it into your model, and make another session of it")
    to = Elsewhere("the cluster's devices are where it is; state_dict() takes the weights here")

    # ------------------------------------------------------------------ what it leads to

    @property
    def steps(self) -> int:
        """The number of batches taken, those before a resumed run included."""
        return self._steps.steps

    @property
    def events(self) -> list[Event]:
        """The deaths and replacements of processes."""
        return self._steps.events

    @property
    def made(self) -> Split:
        """The plan, the bundle, and notes on them.

        Raises:
            InputError: there are none, as no device could have the model.
        """
        if self._steps.made is None:
            raise InputError(
                "this session has no plan and no bundle: its step runs whole in this process",
                code="BX3199",
                help="machine(...) has warned of what no trace holds",
            )
        return self._steps.made

    @property
    def plan(self) -> Plan:
        """Return the plan: the computations of each device."""
        return self.made.plan

    @property
    def bundle(self) -> Path:
        """The folder of Python that the devices run; its weights are those of the beginning."""
        return self.made.bundle

    def explain(self) -> Explanation:
        """Say why each cut is where it is."""
        return explain(self.plan)

    def __str__(self) -> str:
        """Show how far it is."""
        how = "has ended" if self._steps.has_ended else "is open"
        deaths = sum(event["event"] == "died" for event in self.events)
        replaced = f", {deaths} processes replaced" if deaths else ""
        name = type(self.module).__name__
        plan = "whole, in this process" if self._steps.made is None else self.plan
        return f"{name}: {self.steps} steps, {how}{replaced}\n{plan}"

    # ------------------------------------------------------------------ the loop

    def step(self, batch: object) -> float:
        """Train on one batch; return its loss, the mean over micro-batches.

        Raises:
            InputError: it is not like the example batch; nothing was sent.
            RunError: the run has ended.
        """
        return self.loss(self.send(batch))

    def send(self, batch: object) -> int:
        """Hand over a batch, and do not wait; return its step's number, for `loss`."""
        self._steps.require_open()
        if self.leaves_out(batch):
            what = "the batch has fewer rows than the example, and drop_last = True leaves it out"
            raise InputError(
                what, code="BX3138", help="pass it over: if not session.leaves_out(batch)"
            )
        try:
            return self._steps.send(batch)
        except InputError as error:
            if not self._goes_on_here(error, batch):
                raise
        return self._steps.send(batch)

    def _goes_on_here(self, error: InputError, batch: object) -> bool:
        """Go on in this process; tell whether that is possible."""
        if self._way is None or not isinstance(self._steps, DeviceSteps):
            return False
        own = self._way.go_on(self._steps, error, batch)
        if own is None:
            return False
        warn(f"WARNING: {error.what}: the steps go on whole in this process. Else {error.help}")
        self._steps = own
        return True

    def leaves_out(self, batch: object) -> bool:
        """Whether a batch has too few rows, and is not trained on: `drop_last = True`."""
        return self._steps.leaves_out(batch)

    def loss(self, step: int) -> float:
        """Wait for the loss of a step."""
        if not 0 <= step < self.steps:
            raise InputError(
                f"no batch of step {step} was sent", code="BX3139", help="give what `send` returned"
            )
        return self._steps.loss(step)

    def __call__(self, *_: object) -> None:
        """Refuse to be a model: nobody here could give its output a gradient.

        Raises:
            InputError: always.
        """
        raise InputError(
            "a session is a loop, no model: its devices return losses, not outputs",
            code="BX3140",
            help=f"{_WHOLE}; session.eval()(x) computes outputs here",
        )

    # ------------------------------------------------------------------ its state

    def state_dict(self) -> dict[str, Tensor]:
        """Return the model's weights after the last step, by its own names."""
        return dict(self._steps.state_dict())

    def save(self, to: str | Path, optimizer: str | Path | None = None) -> None:
        """Write the weights after the last step, and the optimizer's state, if a file is named.

        The functions that read the optimizer's state are written beside it: see `export_training`.
        """
        self._steps.save(Path(to), None if optimizer is None else Path(optimizer))

    def eval(self) -> nn.Module:
        """Give the caller's module the weights after the last step, and return it in eval mode.

        The module computes in this process; the devices wait for the next batch.
        """
        self._steps.require_open()
        self._steps.refresh()
        return self.module.eval()

    # ------------------------------------------------------------------ its end

    def close(self) -> Run | None:
        """Give your model the weights after the last step, end the processes, return the run."""
        try:
            self._steps.close()
        finally:
            self._end()
        return self.done

    def _end(self) -> None:
        self._steps.end()
        _OPEN.discard(self)

    @property
    def done(self) -> Run | None:
        """The run, once it has ended."""
        return self._steps.done

    def __enter__(self) -> Session:
        return self

    def __exit__(self, failed: type[BaseException] | None, *_: object) -> None:
        if failed is None:
            self.close()
            return
        try:  # as a plain loop leaves them: Ctrl-C, an early end by an exception
            self.close()
        except BigBrainError as error:
            warn(f"WARNING: your model has the weights of an earlier step: {error.what}")


_OPEN: weakref.WeakSet[Session] = weakref.WeakSet()


def _close_all() -> None:
    for session in list(_OPEN):
        session._end()


atexit.register(_close_all)

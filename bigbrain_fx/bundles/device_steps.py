"""Steps of a caller's module on the devices of a bundle: batches go there, losses and states come.

A supervisor in a thread of this process starts, watches, replaces and ends the devices' processes.
This file knows no planning.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, nullcontext, suppress
from pathlib import Path
from typing import TYPE_CHECKING

from bigbrain_fx.bundles.callers.aliases import Aliases
from bigbrain_fx.bundles.callers.optimizer import CallersOptimizer
from bigbrain_fx.bundles.callers.watching import WATCHING, plain_modules
from bigbrain_fx.bundles.compile import Split
from bigbrain_fx.bundles.entries import (
    entries,
    entry_tensor,
    has_fewer,
    require_one_number,
)
from bigbrain_fx.bundles.going_on import commit_held, export_commit, export_training, replacing
from bigbrain_fx.bundles.launch import Run
from bigbrain_fx.bundles.session_devices import require_session
from bigbrain_fx.bundles.session_run import Again, Begun, SessionRun
from bigbrain_fx.core import ROW_COUNTS
from bigbrain_fx.errors import BigBrainError, InputError, warn_caller
from bigbrain_fx.supervisor import Event, warn
from bigbrain_fx.weights import Scratch, tensors_apart

if TYPE_CHECKING:
    from torch import Tensor, nn
    from torch.amp import GradScaler
    from torch.optim import Optimizer
    from torch.optim.lr_scheduler import LRScheduler

    from bigbrain_fx.frontend import OwnLoop

OF_MODULE = "module."  # as in runtime/feeding.py


MOST = 16  # times that a model is split again
CHANGED = ("BX2152", "BX2152b", "BX3190", "BX3198")  # a module, the loss, groups, a state
RESHAPED = ("BX2164", "BX3031")  # another number or text in a batch, another shape: a trace may be
OF_BATCH = (*RESHAPED, "BX3031a")  # another type: none is
_PARTED = "BX3202"  # micro-batches are another objective: one may be the plan's
TRIAL_S = 120.0  # longest step of a fork


class DeviceSteps:
    """Devices at work on one model.

    Attributes:
        made: the plan, the bundle, and notes on them.
        steps: number of sent batches, those before a resumed run included. events: of the
            processes: deaths, replacements.

    Args:
        begun: the bundle.
        module: the caller's own, which gets the weights of the devices.
        optimizer: likewise.
        aliases: memory of its weights that the loop holds itself.
    """

    made: Split | None

    def __init__(
        self,
        begun: Begun,
        module: nn.Module,
        optimizer: CallersOptimizer | None = None,
        aliases: Aliases | None = None,
    ) -> None:
        from bigbrain_fx.bundles.callers.module import CallersModule

        self.module, self._optimizer = module, optimizer
        self._aliases = aliases or Aliases(module)
        self._caller = CallersModule(module, self.refresh)
        self._names = list(module.state_dict())
        self._count = 0  # how often it was split again
        self._given = 0  # the step whose weights the module has
        self._given_state = 0  # and whose state the optimizer
        self.events: list[Event] = []
        self.losses: dict[int, float] = {}
        self._begin(begun)
        self._enter()

    def _begin(self, begun: Begun) -> None:
        """Start the devices of a bundle."""
        plan = begun.made.plan
        devices = [plan.cluster.device[name] for name in plan.stages.devices]
        require_session(devices, backend=begun.options.backend)
        self.made, self._plan, self._bundle = begun.made, plan, begun.made.bundle
        self._constants, self._again = begun.constants, begun.again
        self._row_counts, self._cutter = begun.row_counts, begun.cutter
        self._entries = entries(plan)
        self._parameters = dict(self.module.named_parameters())  # the loop may put others there
        self._run = SessionRun(self._bundle, begun.options, self.events, self.losses)
        try:
            self.steps = self._run.begin()
        except BaseException:
            self._run.end()
            raise
        self._aliases.enter()

    def _begin_again(self, batch: object) -> bool:
        """Go on with a trace of module and batches as they are now; tell whether there is one."""
        if self._again is None or self._count == MOST:
            return False
        from bigbrain_fx.runtime import ResumeError

        self._count += 1
        try:
            self._give_all()
        except (InputError, ResumeError):  # no file has the state; the module has other weights
            return False
        with Scratch("state") as scratch:
            commits = self._commit(Path(scratch, "commit"))
            if self._is_older():
                self._give_weights()
            with self._left(), plain_modules():
                return self._goes_on(self._again, batch, commits)

    def _goes_on(self, again: Again, batch: object, commits: Path) -> bool:
        with suppress(BigBrainError):  # no trace, no device that fits, none that has this state
            begun = again(self._constants, batch, self._bundle, commits, self.steps)
            self._run.end()
            self._begin(begun)
            if self._optimizer is not None:
                self._optimizer.begin_again()
            return True
        return False

    def _enter(self) -> None:
        """Hear of what the loop does with its module and optimizer."""
        self._caller.enter(self._constants.module.others())
        self._constants.module.accept()  # with the hooks of that
        if self._optimizer is not None:
            self._optimizer.enter(self._caller.unread, lambda: self.steps, self._give_all)
        WATCHING.add(self)

    @contextmanager
    def _left(self) -> Iterator[None]:
        """Let module and optimizer be the caller's alone; what has changed counts afterwards, too.

        Unless devices have begun anew: they have the change.
        """
        module = self._constants.module
        known = module.accepted
        self._leave()
        try:
            yield
        finally:
            self._enter()
            module.accepted = known

    def _leave(self) -> None:
        WATCHING.discard(self)
        self._caller.leave()
        if self._optimizer is not None:
            self._optimizer.leave()

    # ------------------------------------------------------------------ the loop

    def send(self, batch: object) -> int:
        """Hand over a batch, and do not wait; return its step's number, for `loss`.

        Raises:
            InputError: it is not like the example batch; nothing was sent.
        """
        from safetensors.torch import save

        self._constants.require_autocast()
        with self._caller.unread():
            found = self._taken(batch)
        self._run.put(self.steps, save(tensors_apart(found)))
        self.steps += 1
        return self.steps - 1

    def _taken(self, batch: object) -> dict[str, Tensor]:
        """Return all that devices take with a batch; where the module has changed, split it again.

        Raises:
            InputError: no trace is possible, or there were too many.
        """
        try:
            return self._entries_of(batch)
        except InputError as error:
            if error.code not in (*CHANGED, *RESHAPED, _PARTED):
                raise
            if self._begin_again(batch):
                warn(f"{error.what}: the model was split again, which takes some seconds")
            elif error.code != _PARTED:
                raise
            else:
                warn_caller(error.what)
        return self._entries_of(batch)

    def _entries_of(self, batch: object) -> dict[str, Tensor]:
        options = {} if self._optimizer is None else self._optimizer.entries()
        return self._found(batch) | self._written() | options

    def _written(self) -> dict[str, Tensor]:
        """Return what the loop wrote into its module since the last batch, for the devices.

        Raises:
            InputError: this plan's devices cannot take it.
        """
        is_read = self._caller.is_read or self._aliases.are_there()
        names = self._constants.module.written(is_read=is_read)
        self._caller.is_read = False
        if not names:
            return {}
        stages = self._plan.stages
        if "weights" in stages.offload or stages.asynchronous:
            raise InputError(
                f"the loop has written into {names[0]}, and devices whose weights are stored "
                "apart, or of an earlier step, cannot take it",
                code="BX2152a",
                help="leave weights out of offload=, or asynchronous= out; or let forward write "
                "it, under torch.no_grad()",
            )
        held = self._constants.module.tensors()
        self._constants.module.renew(names)
        return {f"{OF_MODULE}{name}": held[name].detach() for name in names}

    def _found(self, batch: object) -> dict[str, Tensor]:
        """Return what the devices take of a batch.

        Raises:
            InputError: it is not like the example.
        """
        if self._cutter is not None:
            parts = enumerate(self._cutter.of(batch))
            return {f"{n}.{m}": t for m, part in parts for n, t in self._of_part(part).items()}
        found = self._tensors(batch)
        require_one_number(found, self._entries)
        if self._row_counts is not None:
            found[ROW_COUNTS] = self._row_counts.of(batch)
        return found

    def _tensors(self, batch: object) -> dict[str, Tensor]:
        batch = self._constants.required(batch, self.refresh)
        return {n: entry_tensor(n, batch, entry) for n, entry in self._entries.items()}

    def _of_part(self, part: object) -> dict[str, Tensor]:
        from bigbrain_fx.frontend import part_counts

        found, counts = self._tensors(part), self._row_counts
        return found if counts is None else found | part_counts(counts.count, part)

    def leaves_out(self, batch: object) -> bool:
        """Whether a batch has too few rows, and is not trained on: `drop_last = True`."""
        if not self._plan.source.drop_last:
            return False
        entries = [entry for entry in self._entries.values() if entry.is_split]
        return any(has_fewer(batch, entry) for entry in entries)

    def loss(self, step: int) -> float:
        """Wait for the loss of a step."""
        found = self._run.loss(step)
        if self._aliases.are_there():
            self.refresh()
        return found

    def require_open(self) -> None:
        """Raise what has ended the run, if it has ended."""
        self._run.require_open()

    @property
    def has_ended(self) -> bool:
        """Whether it takes no batch any more."""
        return self._run.has_ended

    # ------------------------------------------------------------------ its state

    def state_dict(self) -> dict[str, Tensor]:
        """Return the model's weights after the last step, by its own names."""
        from safetensors.torch import load_file

        with Scratch("state") as scratch:
            file = Path(scratch, "model.safetensors")
            export_commit(self._bundle, file, self._commit(Path(scratch, "commit")))
            found = {name: tensor.clone() for name, tensor in load_file(file).items()}
        order = [name for name in self._names if name in found]
        return {name: found[name] for name in (*order, *sorted(found.keys() - set(order)))}

    def save(self, to: Path, optimizer: Path | None) -> None:
        """Write the weights after the last step, and the optimizer's state, if a file is named.

        Files that are there are replaced, each at once, when all are written: as torch.save does.
        """
        with self._caller.unread():
            names = self._constants.module.written()
        if names:
            raise InputError(
                f"the loop has written into {names[0]}, and devices get that with the next batch",
                code="BX3197",
                help="save your own module: torch.save(model.state_dict(), ...)",
            )
        with Scratch("state") as scratch, replacing(to, optimizer) as (model, state):
            commit = self._commit(Path(scratch, "commit"))
            if state is None:
                export_commit(self._bundle, model, commit)
            else:
                export_training(self._bundle, model, state, commit)

    def refresh(self) -> None:
        """Give the caller's module the weights of now, unless the caller wrote others."""
        if not self._run.has_ended and self._is_older():
            self._give_weights()

    def _is_older(self) -> bool:
        """Whether the module's weights are of an earlier step."""
        return self._given != self.steps

    def _give_weights(self) -> None:
        self._put(self.state_dict())

    def _put(self, weights: Mapping[str, Tensor]) -> None:
        """Write weights of now into the tensors that devices have copies of, and the loop left."""
        import torch

        self._given, module = self.steps, self._constants.module
        buffers = dict(self.module.named_buffers(remove_duplicate=False))
        with torch.no_grad(), self._caller.unread():
            names = weights.keys() - {*module.written()}
            for name, tensor in {**buffers, **self._parameters}.items():
                if name in names and weights[name].shape == tensor.shape:
                    tensor.copy_(weights[name])
            module.renew(names)

    def _give_all(self) -> None:
        """Give the caller's module the weights of now, and the caller's optimizer its state."""
        made = self._optimizer
        if made is None or made.is_loaded or self._given_state == self.steps:
            return
        self._given_state = self.steps
        self._give_state(made.optimizer)

    def _give_state(
        self,
        optimizer: Optimizer,
        scaler: GradScaler | None = None,
        scheduler: LRScheduler | None = None,
    ) -> None:
        from safetensors.torch import load_file

        is_older = self._is_older()
        with Scratch("state") as scratch, self._caller.unread():
            file, state = Path(scratch, "model.safetensors"), Path(scratch, "state.safetensors")
            export_training(self._bundle, file, state, self._commit(Path(scratch, "commit")))
            if is_older:
                self._put(load_file(file))
            self._load(state, optimizer, scaler, scheduler)

    def _load(
        self,
        state: Path,
        optimizer: Optimizer,
        scaler: GradScaler | None,
        scheduler: LRScheduler | None,
    ) -> None:
        from bigbrain_fx.runtime import load_optimizer, optimizer_states

        made = self._optimizer
        scales = scaler is not None and scaler.is_enabled()
        if made is not None and not made.is_set_there and not scales:
            made.take(lambda own: optimizer_states(state, own), self._parameters)
            return
        taken = nullcontext() if made is None else made.gets_state()
        with taken, self._constants.module.freezing():
            load_optimizer(self.module, optimizer, state, scaler, scheduler)

    def _commit(self, folder: Path) -> Path:
        """Write the state of all devices as a commit; it is taken between two steps."""
        files = self._run.state(self.steps)
        try:
            commit_held(self._bundle, folder, files)
        finally:
            for file in files.values():
                os.close(file)
        return folder

    # ------------------------------------------------------------------ its end

    def close(self) -> None:
        """Give the caller's module the weights after the last step, and the optimizer its state."""
        from bigbrain_fx.runtime import ResumeError

        try:
            if not self._run.has_ended:
                self._give_all()
        except (InputError, ResumeError) as error:  # of plans whose optimizer's state no file has
            warn(f"WARNING: your optimizer does not have the state of the last step: {error}")
        self.refresh()

    def hand_over(self, make: Callable[[], OwnLoop], batch: object) -> OwnLoop | None:
        """Give a loop of this process what the devices have, and end them; None: no step is done.

        Args:
            make: makes the loop, of the caller's module.
            batch: the next one; where a step of it raises, the devices stay.

        Raises:
            InputError, ResumeError: no file has the state, or the loop cannot take it.
        """
        from bigbrain_fx.frontend import apart

        self.refresh()
        with self._left(), plain_modules(), self._constants.module.training():
            if apart(lambda: {"loss": repr(make().step(batch))}, TRIAL_S) is None:
                return None
            loop = make()
        made = self._optimizer
        has_state = made is not None and (made.is_loaded or self._given_state == self.steps)
        if made is None or made.is_set_there or loop.scaler.is_enabled() or not has_state:
            self._give_state(loop.optimizer, loop.scaler, loop.scheduler)
        loop.step_number = self.steps
        self.end()
        return loop

    def end(self) -> None:
        """End the processes, and let the caller's module and optimizer be."""
        self._leave()
        self._aliases.leave()
        self._run.end()

    @contextmanager
    def unwatched(self) -> Iterator[None]:
        """Let the caller's module be plain for a block, with the weights of now."""
        self.refresh()
        with self._left():
            yield

    @property
    def done(self) -> Run | None:
        """The run, once it has ended."""
        return self._run.done

"""A cluster as one device: give it a model, and train.

    machine = bb.machine("cluster.json")
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    trained = machine.train(model, data, loss=loss, optimizer=optimizer)

The module joins `split` and a `Session`; it decides nothing.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import ExitStack
from dataclasses import dataclass, fields, replace
from itertools import chain, islice
from pathlib import Path
from typing import TYPE_CHECKING, Any

from bigbrain_fx.bundles.callers.aliases import Aliases
from bigbrain_fx.bundles.callers.constants import Constants
from bigbrain_fx.bundles.callers.optimizer import CallersOptimizer
from bigbrain_fx.bundles.callers.parts import PartsWatch
from bigbrain_fx.bundles.callers.reading_ahead import first_batches
from bigbrain_fx.bundles.callers.watching import WATCHING, plain_modules, require_own_weights
from bigbrain_fx.bundles.compile import Split, split
from bigbrain_fx.bundles.device_steps import DeviceSteps
from bigbrain_fx.bundles.entries import Cutter, RowCounts
from bigbrain_fx.bundles.found_model import Loss, Recipe
from bigbrain_fx.bundles.launch import RunOptions, started_first
from bigbrain_fx.bundles.opaque import divides
from bigbrain_fx.bundles.own_steps import OwnWay, require_no_state
from bigbrain_fx.bundles.resplitting import commit_of_caller, commit_of_run
from bigbrain_fx.bundles.session_devices import require_session
from bigbrain_fx.bundles.session_run import Again, Begun
from bigbrain_fx.bundles.sessions import Session
from bigbrain_fx.core import Cluster, Shown
from bigbrain_fx.emit import SESSION
from bigbrain_fx.errors import BigBrainError, InputError, about_code
from bigbrain_fx.plan import Options, Plan, Source
from bigbrain_fx.supervisor import warn
from bigbrain_fx.weights import Scratch

if TYPE_CHECKING:
    from torch import Tensor, nn

AHEAD = 2  # batches that are sent before the loss of the first of them is waited for


@dataclass(frozen=True, repr=False)
class Machine(Shown):
    """The devices of a cluster, used as one."""

    cluster: Cluster

    def __str__(self) -> str:
        """Show the devices."""
        return str(self.cluster)

    def __call__(
        self,
        model: nn.Module,
        *,
        example_batch: object,
        loss: Loss | None = None,
        options: Options | None = None,
        run: RunOptions | None = None,
        out: str | Path | None = None,
        rehearse: bool = True,
        **recipe: Any,  # noqa: ANN401  # the fields of a Recipe
    ) -> Session:
        """Split a model over the devices, start them, and return a session that takes batches.

        Args:
            model: an instance; its weights are where training begins. The instance has the weights
                after the last step when it is called, when its `state_dict` is read, and when the
                session ends.
            example_batch: one batch; dimension 0 is the batch. For a batch of another shape, or
                with another number, the model is split again, which takes some seconds; where no
                trace takes it, the steps go on in this process. `drop_last`, `pad`, `lengths` and
                `seen` (a few batches) say beforehand what varies.
            loss: `loss(output, batch)`; else the scalar output, or its `.loss`.
            options: how to plan.
            run: how to run; one spare process is kept, unless this says otherwise.
            out: where the bundle is written; else it is removed when this process ends.
            rehearse: train a few steps of the bundle on the example beside your model in plain
                PyTorch first, and refuse where their numbers differ.
            recipe: `optimizer`, `lr_scale`, `scheduler`, `clip_norm`, `autocast`, `grad_scaler`,
                `loss_weight`, `micro`, `leaves`, `drop_last`, `batch_dims`, `pad`, `lengths`: see
                `Recipe`.

        Raises:
            BigBrainError: the model cannot be captured or placed, or a function of its training has
                no source; nothing runs then.
        """
        require_session(self.cluster.devices, options, run.backend if run else None)
        known = _recipe(recipe)
        callers = _callers_optimizer(known)
        known = replace(known, sends_rates=callers is not None)
        how = run or RunOptions(spares=1)
        how = replace(how, spares=how.spares or 0)
        chosen = replace(options or Options(), tensor=1)  # `auto` would choose groups
        wanted = Wanted(self.cluster, model, example_batch, loss, chosen, how, known, callers)
        way = OwnWay(model, example_batch, loss, known, chosen)
        own = way if out is None and how.commits is None else None
        others, aliases = list(WATCHING), Aliases(model)
        with started_first(self.cluster.devices):
            with ExitStack() as stack:
                stack.enter_context(plain_modules())
                given = stack.enter_context(way.as_given())
                try:
                    with about_code():
                        require_own_weights(model, others)
                    begun = wanted.begun(out, rehearse=rehearse)
                    is_open = own is not None and not divides(chosen)
                    with about_code():
                        require_no_state(begun.made.plan, is_open=is_open)
                except BigBrainError as refusal:
                    if own is None:
                        raise
                    return Session(own.instead_of(refusal, given), model, None)
            if callers is not None and callers.has_state and not how.resume:
                begun = replace(begun, options=_going_on(begun.made, model, callers, how))
            steps = DeviceSteps(begun, model, callers, aliases)
        return Session(steps, model, own)

    def train(
        self,
        model: nn.Module,
        data: Iterable[object],
        *,
        loss: Loss | None = None,
        steps: int | None = None,
        epochs: int = 1,
        on_step: Callable[[int, float], None] | None = None,
        **how: Any,  # noqa: ANN401  # as of __call__
    ) -> nn.Module:
        """Train a model on batches; return it, with the trained weights.

        Args:
            model: as in `__call__`.
            data: batches; what `iter` gives is read once an epoch. The first is the example;
                lengths that vary, and a smaller last batch, are found in those that can be read in
                a second. Data that ask the model, or that `on_step` reads, are read one by one.
            loss: as in `__call__`.
            steps: end after so many, else with the data.
            epochs: how often the data are read.
            on_step: receives each step and its loss, before the next batch is sent. It may read
                and change the model and the optimizer's options, as a loop does between steps.
            how: as in `__call__`.

        Raises:
            BigBrainError: as `__call__`; or the run has failed. The model has the weights of when
                they were last read then.
        """
        if epochs > 1 and isinstance(data, Iterator):  # `iter` would draw from a loader's generator
            raise InputError(
                f"the data are an iterator, which is read once, and epochs is {epochs}",
                code="BX3083",
                help="give what `iter` begins anew: a DataLoader, a list; or epochs=1",
            )
        batches = chain.from_iterable(data for _ in range(epochs))
        first = islice(batches, None if steps is None else max(1, steps))
        seen = first_batches(first, data, model, on_step)
        if not seen:
            raise InputError(
                "there is no batch to train on", code="BX3084", help="give data that yield batches"
            )
        if how.get("drop_last") is None and _has_remainder(data):
            how["drop_last"] = False
        waiting: deque[int] = deque()
        ahead = AHEAD if on_step is None else 0  # it may read and change weights, rates, the loss
        with self(model, example_batch=seen[0], loss=loss, seen=seen, **how) as session:
            kept = (batch for batch in chain(seen, batches) if not session.leaves_out(batch))
            for batch in islice(kept, steps):
                waiting.append(session.send(batch))
                _hear(session, waiting, ahead, on_step)
            _hear(session, waiting, 0, on_step)
            if steps is not None and session.steps < steps:
                warn(f"WARNING: the data ended after {session.steps} of {steps} steps")
        return model


@dataclass(frozen=True)
class Wanted:
    """Arguments of a session: its bundle is split, and where a number changes, again."""

    cluster: Cluster
    model: nn.Module
    example_batch: object
    loss: Loss | None
    options: Options
    run: RunOptions
    recipe: Recipe
    callers: CallersOptimizer | None
    is_first: bool = True  # the model has not been split again

    def begun(self, out: str | Path | None, *, rehearse: bool) -> Begun:
        """Split the model, to begin with its weights."""
        folder = _temporary() if out is None else Path(out)
        begun = self._of(self._split(folder, rehearse), {}, self.run)
        begun.constants.warn_of_written()
        return begun

    def begun_again(
        self, constants: Constants, batch: object, before: Path, commits: Path, steps: int
    ) -> Begun:
        """Split the model as it is now, to go on from a commit of `before` after so many steps.

        Numbers that have changed are inputs of the new trace, where it takes them; so is what
        `batch` has otherwise than the example. The one with more rows is the new example.
        """
        few, many = sorted((batch, self.example_batch), key=self._rows)
        recipe = replace(self.recipe, seen=(*self.recipe.seen, few))
        wanted = replace(self, example_batch=many, recipe=recipe, is_first=False)
        return wanted._begun_again(constants, before, commits, steps)

    def _rows(self, batch: object) -> int:
        from bigbrain_fx.frontend import take_apart

        return take_apart(batch, dims=self.recipe.batch_dims).rows

    def _begun_again(self, constants: Constants, before: Path, commits: Path, steps: int) -> Begun:
        with constants.as_inputs() as inputs:
            out = _temporary()
            made = self._split(out, rehearse=False) if inputs else None
        how = replace(self.run, commits=out.with_name("commits"), commit_every=0, resume=True)
        begun = None if made is None else self._of(made, inputs, how)
        if begun is None or not begun.constants.has_inputs(inputs):
            begun = self._of(self._of_now(constants), {}, how)
        self._write_commit(begun.made, before, commits, steps, out.with_name("commits"))
        return begun

    @property
    def _again(self) -> Again | None:
        is_kept = self.run.commits or self.recipe.grad_scaler  # no other bundle's commit; no scale
        return None if is_kept else self.begun_again

    def _of_now(self, constants: Constants) -> Split:
        with constants.module.training():
            return self._split(_temporary(), rehearse=False)

    def _write_commit(self, made: Split, before: Path, commits: Path, steps: int, to: Path) -> None:
        if self.callers is None:
            return commit_of_run(made.plan, made.bundle, before, commits, to)
        about = made.plan, made.bundle, self.model, self.callers.optimizer
        return commit_of_caller(*about, to, steps)

    def _split(self, out: Path, rehearse: bool) -> Split:
        return split(
            self.model,
            self.cluster,
            out,
            self.options,
            example_batch=self.example_batch,
            loss=self.loss,
            recipe=self.recipe,
            extras=(SESSION,),
            rehearse=rehearse,
        )

    def _of(self, made: Split, inputs: Mapping[str, Tensor], how: RunOptions) -> Begun:
        from bigbrain_fx.frontend import numbers_in

        cutter = _cutter(made.plan, self.recipe)
        example = cutter.of(self.example_batch)[0] if cutter else self.example_batch
        numbers = numbers_in(made.plan.graph, example)
        about = self.model, example, self.loss, self.recipe.autocast
        again = self._again
        is_open = bool(again) and self.is_first and self.options.micro_batches is None
        count, compare = made.plan.micro_batches, made.compare_later
        parts = None if cutter else PartsWatch.of(count, compare, is_open=is_open)
        constants = Constants(*about, made.constants, inputs, parts, numbers)
        if any(op.target.startswith("user.") for op in made.plan.graph.ops):
            constants.require_unwritten()
        counts = _row_counts(made.plan.source, self.recipe)
        return Begun(made, how, constants, counts, cutter, again)


def _callers_optimizer(recipe: Recipe) -> CallersOptimizer | None:
    from torch.optim import Optimizer

    if not isinstance(recipe.optimizer, Optimizer):
        return None
    is_set = recipe.lr_scale is not None or recipe.scheduler is not None
    return CallersOptimizer(recipe.optimizer, is_set_there=is_set)


def _has_remainder(data: object) -> bool:
    """Whether the last batch of a `DataLoader` is smaller than the others."""
    from torch.utils.data import BatchSampler, DataLoader

    sampler = data.batch_sampler if isinstance(data, DataLoader) else None
    if not isinstance(sampler, BatchSampler) or sampler.drop_last:
        return False
    rows = getattr(sampler.sampler, "__len__", int)()
    return rows > sampler.batch_size and rows % sampler.batch_size > 0


def _cutter(plan: Plan, recipe: Recipe) -> Cutter | None:
    """Return what cuts batches; None where devices cut them by rows, or nothing is cut."""
    is_cut = plan.source.has_micro and plan.micro_batches > 1
    return Cutter(recipe.micro, plan.micro_batches) if recipe.micro and is_cut else None


def _row_counts(source: Source, recipe: Recipe) -> RowCounts | None:
    """Return by what micro-batches weigh; None where they weigh by their rows."""
    found = None if source.loss_count is None else source.loss_count.of
    count = recipe.loss_weight or found
    return None if count is None else RowCounts(count, recipe.batch_dims)


def _hear(
    session: Session, waiting: deque[int], most: int, on_step: Callable[[int, float], None] | None
) -> None:
    """Wait for losses until at most so many are under way."""
    while len(waiting) > most:
        step = waiting.popleft()
        found = session.loss(step)
        if on_step is not None:
            on_step(step, found)


def _recipe(given: dict[str, Any]) -> Recipe:
    known = [field.name for field in fields(Recipe)]
    strange = sorted(set(given) - set(known))
    if strange:
        raise InputError(
            f"there is no option {strange[0]!r}",
            code="BX3085",
            help=f"there are {', '.join(known)}",
        )
    return Recipe(**given)


_KEPT: list[Scratch] = []


def _going_on(
    made: Split, model: nn.Module, callers: CallersOptimizer, how: RunOptions
) -> RunOptions:
    """Let devices begin with the state that the caller's optimizer has: after other steps."""
    is_scratch = how.commits is None
    folder = _temporary().with_name("commits") if how.commits is None else how.commits
    commit_of_caller(made.plan, made.bundle, model, callers.optimizer, folder)
    every = 0 if is_scratch else how.commit_every
    return replace(how, commits=folder, commit_every=every, resume=True)


def _temporary() -> Path:
    """Return a folder that goes when this process ends."""
    _KEPT.append(Scratch("machine"))
    return Path(_KEPT[-1].name, "bundle")

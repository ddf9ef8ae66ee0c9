"""A module in memory -> its graph and weights, and a file of source for the devices' calls.

The module is captured in this process; a model file is captured in a child.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from bigbrain_fx.bundles.callers.watching import plain_modules
from bigbrain_fx.bundles.carried import Parts, as_optimizer, carry
from bigbrain_fx.bundles.found_model import (
    IN_MEMORY,
    FoundModel,
    Loss,
    Recipe,
    Rehearse,
    other_rows,
)
from bigbrain_fx.core import ROW_COUNTS, LossCount
from bigbrain_fx.emit import opaque_modules, user_names
from bigbrain_fx.errors import BigBrainError, InputError, about_code
from bigbrain_fx.plan import Options, Source
from bigbrain_fx.processes import Forking, ahead
from bigbrain_fx.weights import Scratch, as_umask_says, tensors_apart

if TYPE_CHECKING:
    from torch import Tensor, nn

    from bigbrain_fx.frontend import Captured, MicroBatchEffect, ModelFile, OwnLoop, Room, Training


@contextmanager
def captured_in_memory(
    module: nn.Module,
    options: Options,
    example_batch: object,
    loss: Loss | None,
    recipe: Recipe | None,
    *,
    is_rehearsed: bool = False,
    room: Room | None = None,
) -> Iterator[FoundModel]:
    """Capture a module that this process has; inside, its weights can be written.

    `is_rehearsed`: it can be trained beside the caller's own loop. `room`: of all devices together.

    Raises:
        BigBrainError: the module cannot be used or captured, or something has no source.
    """
    from bigbrain_fx.frontend import eval_parts_kept, reads_kept, require_room

    with Scratch("code") as scratch, ExitStack() as stack:
        with about_code():
            _require_given(module, example_batch)
            if room is not None:
                require_room(module, room, trains=options.mode == "train")
            stack.enter_context(reads_kept(module, loss))
            if options.mode == "train":
                stack.enter_context(eval_parts_kept(module))
            given = _given(module, options, example_batch, loss, recipe or Recipe())
            waits = is_rehearsed and given.trains
            rehearse = _rehearsal(given, stack) if waits else None  # before anything is captured
            found = _found(given, Path(scratch), rehearse)
        yield found


@dataclass(frozen=True)
class _Given:
    """A module in memory, and how it is trained; `said` has that by the names of a model file.

    `file` is what is captured: its example is the longest, or the first part of the caller's.
    """

    module: nn.Module
    options: Options
    example: object
    loss: Loss | None
    recipe: Recipe
    said: Mapping[str, object]
    file: ModelFile

    @property
    def trains(self) -> bool:
        return self.options.mode == "train"


def _given(
    module: nn.Module, options: Options, example: object, loss: Loss | None, recipe: Recipe
) -> _Given:
    """Check a recipe; with `cache` the module is one of a single position."""
    from bigbrain_fx.frontend import (
        GroupedOptimizer,
        ModelFile,
        for_devices,
        training_of,
        with_cache,
        with_lengths,
        with_parts,
    )

    recipe = replace(recipe, optimizer=as_optimizer(recipe.optimizer))
    if options.cache:
        about: Any = {"autocast": recipe.autocast, "batch_dims": recipe.batch_dims, "loss": loss}
        module, example = with_cache(module, example, options.cache, **about)
        recipe, loss = Recipe(autocast=recipe.autocast), None
    said = training_of(_Defined(recipe, loss), Path("Recipe"), module)
    file = ModelFile(Path("Recipe"), "model", module, example, **cast("Mapping[str, Any]", said))
    for_all = for_devices(cast("Any", said["optimizer"]), module)
    if isinstance(for_all, GroupedOptimizer):
        recipe = replace(recipe, optimizer=for_all)
    if options.mode == "train":
        file = with_parts(file, options.micro_batches or options.replicas or 1)
        file = replace(file, batches=(lambda _seed: iter(recipe.seen)) if recipe.seen else None)
        file = with_lengths(file, 0, draws=bool(recipe.seen))
    return _Given(module, options, example, loss, recipe, said, file)


def own_loop(module: nn.Module, example: object, loss: Loss | None, recipe: Recipe) -> OwnLoop:
    """Return the caller's loop in this process, for a module that no devices can have.

    Raises:
        InputError: plain PyTorch does not train it, either, or the recipe cannot be used.
    """
    from torch.optim import Optimizer

    from bigbrain_fx.frontend import ModelFile, OwnLoop, training_of

    given = recipe.optimizer
    is_made = isinstance(given, Optimizer)
    known = replace(recipe, optimizer=None if is_made else as_optimizer(given))
    said = training_of(_Defined(known, loss), Path("Recipe"), module)
    if is_made:
        said = {**said, "optimizer": lambda _named: given}
    return OwnLoop(
        ModelFile(Path("Recipe"), "model", module, example, **cast("Mapping[str, Any]", said))
    )


class _Defined:
    """A recipe and a loss by the names of a model file."""

    def __init__(self, recipe: Recipe, loss: Loss | None) -> None:
        self.__dict__.update(vars(recipe), loss=loss)


def _rehearsal(given: _Given, stack: ExitStack) -> Callable[[Captured], Rehearse]:
    """Let forks wait that have the module as it is now."""
    from bigbrain_fx.frontend import numbers_in, with_number_inputs
    from bigbrain_fx.verification import Waiting, rehearsed

    elsewhere = {str(t.device) for t in given.module.state_dict().values()} - {"cpu"}
    if elsewhere:
        answer = {"checks": [], "why": f"the module is on {', '.join(sorted(elsewhere))}"}
        return lambda _captured: lambda _bundle, _limit_s: answer
    keep_their_own = given.file.free and not given.said["lengths"]  # so nothing fills one up
    example = given.file.example_batch if keep_their_own else given.example
    file = replace(given.file, example_batch=example, parts=1, whole_batch=None, batches=None)
    forking = ahead()
    if forking is None and sys.platform == "linux":
        forking = stack.enter_context(Forking(os.environ))
    forks = stack.enter_context(Waiting(lambda _wanted: file, forking=forking))

    def with_forks(captured: Captured) -> Rehearse:
        own = with_number_inputs(file, numbers_in(captured.graph, file.example_batch))
        return lambda bundle, limit_s: rehearsed(own, captured, bundle, forks, limit_s)

    return with_forks


def _found(
    given: _Given, scratch: Path, rehearse: Callable[[Captured], Rehearse] | None
) -> FoundModel:
    """Capture, and try what is not traced: padding, the optimizer."""
    from bigbrain_fx.frontend import (
        Training,
        eval_note,
        keeping_smaller,
        optimizer_facts,
        require_padding,
        require_rows,
    )

    module, recipe, loss = given.module, given.recipe, cast("None", given.loss)
    given, captured = _captured_with_numbers(given)
    recipe = replace(recipe, drop_last=keeping_smaller(given.file, 0, captured).drop_last)
    given = replace(given, recipe=recipe, file=replace(given.file, batches=None))
    require_rows(recipe.drop_last, captured, given.trains)
    tried = require_padding(module, loss, recipe.pad, captured, recipe.autocast)
    facts = optimizer_facts(module, cast("None", recipe.optimizer))
    source = replace(
        _carried(given, captured, scratch),
        optimizer_state=facts.state,
        optimizer_temporaries=facts.temporaries,
        optimizer_leftover=facts.leftover,
        optimizer_states=facts.states,
        optimizer_at_once=facts.at_once,
    )
    count = sum(p.numel() for p in {id(p): p for p in module.parameters()}.values())
    narrow = facts.note if captured.graph.training else None
    modes = eval_note(module) if given.trains else None
    later = tuple(batch for batch in recipe.seen if batch is not given.example)
    training = Training(module, loss, recipe.autocast, recipe.loss_weight, lambda: later)
    weights = _InMemory(captured, training, given.file)
    return FoundModel(
        captured.graph,
        source,
        weights,
        (*captured.warnings, *filter(None, (tried, narrow, modes))),
        count,
        module=module,
        recipe=recipe,
        device_lines=captured.device_lines,
        compare=weights.compare,
        compare_later=weights.compare_later,
        rehearse=rehearse(captured) if rehearse else None,
        constants={} if _reads_alone(captured, given) else _constants(captured),
    )


def _captured_with_numbers(given: _Given) -> tuple[_Given, Captured]:
    """Capture the module; numbers that change in the first batches are inputs."""
    from bigbrain_fx.frontend import captured_with_numbers, require_steady_file

    if not given.trains:
        return given, _captured(given)
    file, captured = captured_with_numbers(
        given.file, 0, lambda file: _captured(replace(given, file=file))
    )
    require_steady_file(file, 0)
    return replace(given, file=file), captured


def _reads_alone(captured: Captured, given: _Given) -> bool:
    """Whether devices run Python that reads a name: a constant may be in its text, too."""
    from torch import nn

    from bigbrain_fx.frontend import read_names

    called = [value for _, value in _called(captured, given)]
    return any(isinstance(v, Parts) or read_names(nn.Identity(), v) for v in called)


def _constants(captured: Captured) -> dict[str, Tensor]:
    names = [p.name for p in captured.graph.params if p.kind == "constant"]
    return {name: captured.tensors[name] for name in names}


def _captured(given: _Given) -> Captured:
    """Capture the module; again with other rows where a trace of fixed size needs them."""
    from bigbrain_fx.frontend import capture

    recipe, options, file = given.recipe, given.options, given.file
    trace = partial(
        capture,
        given.module,
        file.example_batch,
        cast("None", given.loss),
        training=given.trains,
        autocast=recipe.autocast,
        assume=dict(options.assume),
        leaves=(*recipe.leaves, *options.leaves),
        loss_needed=given.trains,
        batch_dims=recipe.batch_dims,
        strict=options.strict,
        lengths=file.free,
        parts=None if file.whole_batch is None else file.parts,
    )
    captured = trace(micro_batch=options.rows)
    if given.trains and _unlike(captured, recipe.seen):
        captured = _with_opaque_loss(trace, captured, given) or captured
    rows = other_rows(captured.graph, options)
    return captured if rows is None else trace(micro_batch=rows)


def _with_opaque_loss(
    trace: Callable[..., Captured], captured: Captured, given: _Given
) -> Captured | None:
    """Capture with an opaque loss, if all batches fit then: what only it reads may vary."""
    options, seen = given.options, given.recipe.seen
    is_cut = max(options.micro_batches or 1, options.replicas or 1) > 1
    if given.loss is None or given.recipe.micro or options.strict or is_cut:
        return None
    if len(_unlike(captured, seen)) == len(captured.batch.entries):
        return None  # a batch of fewer rows
    with suppress(BigBrainError):
        found = trace(loss_apart=True)
        varying = {entry.name for entry in found.graph.inputs if entry.varies}
        return found if _unlike(found, seen) <= varying else None
    return None


def _unlike(captured: Captured, batches: Sequence[object]) -> set[str]:
    """Return the entries of which some batches have another shape than the example."""
    batch = captured.batch
    alone = {entry.name: replace(batch, entries=(entry,)) for entry in batch.entries}
    return {name for name, one in alone.items() if not all(map(one.like, batches))}


def _require_given(module: nn.Module, example_batch: object) -> None:
    from torch import nn

    if not isinstance(module, nn.Module):
        raise InputError(
            f"expected a model file or a torch.nn.Module, found {type(module).__name__}",
            code="BX3047",
            help='give "model.py", or an instance of the module',
        )
    if example_batch is None:
        raise InputError(
            "a module in memory needs an example batch",
            code="BX3048",
            help="split(module, devices, out, example_batch={...}, loss=...)",
        )


def _carried(given: _Given, captured: Captured, scratch: Path) -> Source:
    """Write what the devices call as it is to a file, and say what a plan remembers of it.

    Raises:
        InputError: something has no source, or it is a module that no trace can hold.
    """
    from bigbrain_fx.frontend import Cached, GroupedOptimizer, marks_of, pads

    module, recipe, said = given.module, given.recipe, given.said
    named: dict[str, object] = {
        name: value
        for name in ("optimizer", "lr_scale", "scheduler")
        if (value := getattr(recipe, name)) is not None
    }
    grouped = recipe.optimizer if isinstance(recipe.optimizer, GroupedOptimizer) else None
    if grouped is not None:
        del named["optimizer"]
        named[grouped.data.name] = grouped.make.kind
    named |= dict(_called(captured, given))
    return Source(
        path=str(carry(named, scratch)) if named else "",
        has_optimizer=recipe.optimizer is not None,
        has_loss=given.loss is not None,
        has_lr_scale=recipe.lr_scale is not None,
        has_scheduler=recipe.scheduler is not None,
        clip_norm=cast("float | None", said["clip_norm"]),
        grad_scaler=cast("dict[str, int | float] | None", said["grad_scaler"]),
        module=IN_MEMORY,
        cache=given.options.cache,
        positions=module.row.longest if isinstance(module, Cached) else 0,
        drop_last=recipe.drop_last,
        batch_dims={e.name: e.dim for e in captured.batch.entries if e.dim},
        offsets={e.name: e.per_row for e in captured.batch.entries if e.per_row},
        marks=marks_of(module),
        optimizer=replace(grouped.data, module="") if grouped else None,
        pad=pads(captured.batch, recipe.pad),
        lengths=dict(captured.graph.lengths),
        buckets=cast("tuple[int, ...]", said["lengths"] or ()) if captured.graph.lengths else (),
        has_loss_weight=recipe.loss_weight is not None,
        has_micro=given.file.whole_batch is not None,
    )


def _called(captured: Captured, given: _Given) -> Iterator[tuple[str, object]]:
    """Yield name and value of the user's own Python that stages call as it is."""
    from bigbrain_fx.frontend import LOSS

    if LOSS in captured.functions:
        yield "loss", given.loss
    graph = captured.graph
    for module, name in user_names(graph, [op.name for op in graph.ops]):
        if module == IN_MEMORY:
            yield name, getattr(sys.modules[IN_MEMORY], name)
    if paths := opaque_modules(graph):
        yield "model", Parts(given.module, paths)


@dataclass
class _InMemory:
    """The weights of a module captured in this process, and how it is trained.

    `loss_count` is by what micro-batches weigh, once `compare` has found it; `differs` whether
    they train something else.
    """

    captured: Captured
    training: Training
    file: ModelFile
    loss_count: LossCount | None = None
    differs: bool = False

    def compare(self, count: int) -> MicroBatchEffect:
        """Compare a step on the example batch with one in so many micro-batches."""
        from bigbrain_fx.frontend import effect_of_parts, micro_batch_effect

        if self.file.parts > 1:
            return effect_of_parts(self.file, self.training.later())
        effect = micro_batch_effect(self.training, self.captured, count)
        self.loss_count = None if effect.differs else effect.loss_count
        self.differs = effect.differs
        return effect

    def compare_later(self, count: int, batch: object) -> MicroBatchEffect | None:
        """Compare a batch of a loop that is under way, as the module is now."""
        from bigbrain_fx.frontend import eval_parts_kept, later_effect

        if self.differs:  # split has warned of it
            return None
        with plain_modules(), eval_parts_kept(self.training.module):
            return later_effect(self.training, self.captured, count, batch)

    def write_weights(self, folder: Path, files: Mapping[str, Sequence[str]]) -> None:
        from safetensors.torch import save_file

        for name, tensors in files.items():
            found = {t: self.captured.tensors[t] for t in tensors}
            save_file(tensors_apart(found), folder / name)
        as_umask_says(*(folder / name for name in files))

    def write_batch(self, path: Path) -> None:
        from safetensors.torch import save_file

        batch = {**self.captured.inputs(), **self._row_counts()}
        if self.file.parts > 1:
            batch = self._parts()
        save_file(tensors_apart(batch), path)
        as_umask_says(path)

    def _parts(self) -> dict[str, Tensor]:
        """Return the parts of the example, as a caller sends those of a batch."""
        from bigbrain_fx.frontend import cut, graph_inputs, part_counts

        file, batch = self.file, self.captured.batch
        dims = {entry.name: entry.dim for entry in batch.entries}
        parts = cut(file, file.whole_batch, file.parts)
        found = [graph_inputs(self.captured.graph, part, dims) for part in parts]
        own = self.training.loss_weight
        counts = [{} if own is None else part_counts(own, part) for part in parts]
        named = (pair for pair in enumerate(zip(found, counts, strict=True)))
        return {f"{n}.{m}": t for m, (a, b) in named for n, t in {**a, **b}.items()}

    def _row_counts(self) -> dict[str, Tensor]:
        """Return the counts by which the bundle weighs the example's rows."""
        from bigbrain_fx.frontend import counts_by_row

        own = self.training.loss_weight or (self.loss_count.of if self.loss_count else None)
        return {} if own is None else {ROW_COUNTS: counts_by_row(own, self.captured.batch)}

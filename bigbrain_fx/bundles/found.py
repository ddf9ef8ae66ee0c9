"""A model file or module -> its graph, and a source of its weights, for `split` and `estimate`.

The module captures and tries the optimizer; it plans and writes nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import TYPE_CHECKING, Protocol, cast

from bigbrain_fx.bundles.found_model import FoundModel, Loss, Recipe, other_rows
from bigbrain_fx.bundles.in_memory import captured_in_memory
from bigbrain_fx.bundles.rehearsing import CAPTURE_CHILD
from bigbrain_fx.core import Graph, RuleTrial, Shard, TensorParallel
from bigbrain_fx.emit import Weights, batch_specs, takes_file
from bigbrain_fx.errors import BigBrainError, InputError, about_code
from bigbrain_fx.frontend import (
    CHILD,
    BatchReading,
    CaptureSession,
    ModelFacts,
    Room,
    TrialEndedError,
    capture_file,
)
from bigbrain_fx.plan import Options, Plan, Source, of_layers, trials, updating
from bigbrain_fx.weights import Checkpoint, FromCheckpoint, Scratch, match, read_checkpoint

if TYPE_CHECKING:
    from torch import nn


def source_of(facts: ModelFacts) -> Source:
    """Return what a plan remembers of the model file."""
    location = facts.path if facts.name == "model" else f"{facts.path}:{facts.name}"
    own = ("path", "loss_count", "divided")
    same = (entry.name for entry in fields(Source) if entry.name not in own)
    return Source(location, **{name: getattr(facts, name) for name in same})


def _whole_source(facts: ModelFacts) -> Source:
    """Return the same where the file's own step is run: nothing of a batch is filled up."""
    return replace(source_of(facts), ships_file=True, pad={}, fixed=(), lengths={}, buckets=())


@dataclass(frozen=True)
class Given:
    """A checkpoint that the user gave, and whether its numbers stay in it."""

    checkpoint: Checkpoint | None
    by_reference: bool


def checkpoint_of(model: str | Path | nn.Module, weights: str | Path | None) -> Checkpoint | None:
    """Read the checkpoint's headers before any work is done."""
    if weights is None:
        return None
    if not isinstance(model, str | Path):
        raise InputError(
            "a module in memory has its weights already",
            code="BX3033",
            help="load them into it, or give the model file",
        )
    return read_checkpoint(weights)


def _weights(
    session: CaptureSession, given: Given | None, scratch: Path
) -> tuple[Weights, tuple[str, ...]]:
    """Return who writes the bundle's weights, and what to say of it."""
    if given is None or given.checkpoint is None:
        return session, ()
    checkpoint, params = given.checkpoint, session.graph.params
    fit = match(params, session.converted(checkpoint, scratch))
    found = FromCheckpoint(params, fit.sources, checkpoint, session, given.by_reference)
    return found, fit.notes


class TriesRules(Protocol):
    """A process with torch that runs trials of rules."""

    def try_rules(self, trials: Sequence[RuleTrial]) -> list[str | None]:
        """Return for each trial why it failed, or None."""
        ...


def with_tried_rules(
    found: TriesRules, options: Options, make: Callable[[Options], Plan]
) -> tuple[Plan, tuple[str, ...]]:
    """Plan, and try the rules by which the plan divides ops; plan anew where one fails.

    Only what a plan uses is run, so that a search may look at many groups of devices.

    Returns:
        A plan of which every rule was tried, and what the user should know.

    Raises:
        BigBrainError: as `make` does.
    """
    whole: dict[tuple[str, str], str] = {}
    while True:
        plan = make(replace(options, tensor_whole=tuple(whole)))
        tensor = plan.placement.tensor
        if tensor is None:
            return plan, ()
        tried = trials(plan.graph, tensor.axes, tensor.shares)
        try:
            failed = zip(tried, found.try_rules(tried), strict=True)
        except TrialEndedError as error:
            raise _ended(plan, tensor, error) from error
        more = {pair: why for trial, why in failed if why for pair in trial.ops}
        if not more:
            return plan, tuple(_kept_whole(plan.graph, tensor, whole))
        whole |= more


def _kept_whole(
    graph: Graph, tensor: TensorParallel, whole: Mapping[tuple[str, str], str]
) -> Iterator[str]:
    kept = {axis.name for axis in tensor.axes}
    for (axis, op), why in whole.items():
        if axis in kept:
            place = f" ({graph.op[op].source})" if graph.op[op].source else ""
            yield f"{op}{place} is not divided on {axis}: {why}; {_without(tensor, {axis})}"


def _ended(plan: Plan, tensor: TensorParallel, error: TrialEndedError) -> InputError:
    """Say which op's part ends a process: what plain PyTorch would do in training, too."""
    axis, name = error.trial.ops[0]
    op = plan.graph.op[name]
    return InputError(
        f"'{name}' ends its process ({error.how}) where a TP rank has its part of {axis}: torch's "
        f"{op.target.removesuffix('.default')} cannot compute that",
        code="BX3034",
        at=op.source or error.at,
        notes=error.notes,
        help=_without(tensor, {axis for axis, _ in error.trial.ops}),
    )


def _without(tensor: TensorParallel, out: Collection[str]) -> str:
    """Say how to plan without some axes."""
    gone = {of_layers(axis) for axis in tensor.axes if axis.name in out}
    left = dict.fromkeys(name for name in map(of_layers, tensor.axes) if name not in gone)
    if not left:
        return "--tensor-parallel 1 divides nothing"
    return f"--tp-axes '{','.join(left)}' leaves {' and '.join(sorted(gone))} out"


def require_optimizer(found: FoundModel, plan: Plan) -> tuple[str, ...]:
    """Try the optimizer with the parameters of each device, before anything is written.

    Returns:
        What the user should know.

    Raises:
        InputError: it fails there, or updates otherwise than with all parameters.
    """
    if plan.mode != "train" or plan.graph.is_opaque_step:
        return ()
    param, stages = plan.graph.param, plan.stages
    trained = {p.canonical for p in plan.graph.params if p.spec.requires_grad}
    used = {d: {param[n].canonical for s in stages.of(d) for n in s.params} for d in stages.devices}
    if stages.zero_stage:
        updates = updating(plan.sharded.members[0], stages)
        shard = {stage.device: stages.shard_of(stage.replica) for stage in stages.stages}
        used = {d: {n for n in used[d] if updates.get(n) == shard[d]} for d in used}
    held = {device: sorted(names & trained) for device, names in used.items()}
    here = all(plan.cluster.device[name].kind == "cpu" for name in stages.devices)
    shards = plan.sharded.shards
    if found.session is None:
        return _tried_here(found, held, here, shards)
    return found.session.try_optimizer(held, here=here, shards=shards)


def with_seeded_file(found: FoundModel, plan: Plan) -> Plan:
    """Let a bundle seed the model file as `split` does, where it takes the file whole."""
    if found.session is None or plan.graph.is_opaque_step or not takes_file(plan):
        return plan
    return replace(plan, source=replace(plan.source, ships_file=True))


def with_whole_file(found: FoundModel, plan: Plan) -> tuple[Plan, str] | None:
    """Return a plan that takes the model file whole, and what to say; None where no file is cut."""
    if found.session is None or plan.graph.is_opaque_step or takes_file(plan):
        return None
    whole = replace(plan, source=replace(plan.source, ships_file=True))
    return whole, _whole_note(found, "trains something else")


def _whole_note(found: FoundModel, why: str) -> str:
    assert found.session is not None
    return (
        f"the bundle takes {Path(found.session.facts.path).name} whole, with all that it imports: "
        f"a copy of the lines that training needs {why}"
    )


_HOW = ("drop_last", "pad", "fixed", "offsets", "lengths", "buckets")


def require_first_batches(found: FoundModel, plan: Plan) -> None:
    """Read the first batches of a model file as the bundle will.

    Raises:
        CaptureError: one of them does not fit the trace.
    """
    if found.session is None or plan.mode != "train" or not plan.source.has_batches:
        return
    specs = batch_specs(plan)
    entries = [entry for entry in plan.graph.inputs if entry.name in specs]
    found.session.require_first_batches(
        BatchReading(
            {entry.name: entry.key for entry in entries},
            tuple(entry.name for entry in entries if not entry.batched),
            plan.micro_batches,
            {n: (dtype, tuple(map(int, shape))) for n, (dtype, shape) in specs.items()},
            {name: getattr(plan.source, name) for name in _HOW} | {"dims": plan.source.batch_dims},
            plan.source.has_micro,
        )
    )


def _tried_here(
    found: FoundModel,
    held: Mapping[str, Sequence[str]],
    here: bool,
    shards: Sequence[Shard],
) -> tuple[str, ...]:
    from bigbrain_fx.frontend import require_divided, require_made_per_device

    recipe = found.recipe or Recipe()
    if found.module is None or not (recipe.optimizer or recipe.scheduler):
        return ()
    make = cast("Callable[..., object] | None", recipe.optimizer)  # an optimizer is data by now
    with about_code():
        if make and shards:
            require_divided(found.module, make, shards)
        note = require_made_per_device(found.module, make, recipe.scheduler, held, here=here)
    return (note,) if note else ()


@contextmanager
def captured_model(
    model: str | Path | nn.Module,
    options: Options,
    example_batch: object,
    loss: Loss | None,
    time_limit_s: float,
    meta: bool = False,
    given: Given | None = None,
    recipe: Recipe | None = None,
    refusal: BigBrainError | None = None,
    *,
    is_rehearsed: bool = False,
    apart: Sequence[BigBrainError] = (),
    loss_apart: bool = False,
    room: Room | None = None,
) -> Iterator[FoundModel]:
    """Capture a model as `split` does, or `estimate` with `meta`; inside, weights can be written.

    With a `refusal` of its trace the whole step is one op. `is_rehearsed`: what is written of it
    can be trained beside the user's loop. `apart` name modules that are opaque for that.
    With `loss_apart` the loss is opaque: what only it reads has other shapes in other batches.
    A model far larger than the `room` of all devices is refused before its capture.

    Raises:
        BigBrainError: the input cannot be used or captured.
    """
    _require_numbers(model, options, given)
    if not isinstance(model, str | Path):
        about = model, options, example_batch, loss, recipe
        with captured_in_memory(*about, is_rehearsed=is_rehearsed, room=room) as found:
            yield found
        return
    if example_batch is not None or loss is not None or recipe is not None:
        raise InputError(
            "a model file defines its own example_batch, loss and optimizer",
            code="BX3035",
            at=str(model),
            help="leave the arguments out, or give the module itself",
        )
    checkpoint = given.checkpoint if given else None
    is_rehearsed = is_rehearsed and options.mode == "train"
    child = CAPTURE_CHILD if is_rehearsed else CHILD
    blank = checkpoint is not None
    with (
        _session(
            model, options, time_limit_s, meta, blank, refusal, apart, loss_apart, room, child
        ) as session,
        Scratch("weights") as scratch,
    ):
        facts = session.facts
        weights, notes = _weights(session, given, Path(scratch))
        yield FoundModel(
            session.graph,
            source_of(facts) if refusal is None else _whole_source(facts),
            weights,
            (*session.warnings, *notes),
            facts.parameters,
            session.capture_s,
            session,
            device_lines=facts.device_lines,
            compare=session.micro_batch_effect,
            rehearse=session.rehearse if is_rehearsed else None,
        )


def _first_of(what: str) -> str:
    """Return the first difference that an error lists; a line of Python may be its last."""
    return what.partition("; ")[0].rstrip(":")


def _require_numbers(model: str | Path | nn.Module, options: Options, given: Given | None) -> None:
    """Refuse to quantise what is not there, or is the caller's own."""
    if options.quantize is None:
        return
    if not isinstance(model, str | Path):
        raise InputError(
            "--quantize changes the module's layers, and a module in memory is yours",
            code="BX3036",
            help="give the model file, or put quantised layers into the module yourself",
        )
    if given is not None and given.checkpoint is not None:
        raise InputError(
            "--quantize rounds the numbers that model() has, and --weights brings others",
            code="BX3037",
            at="--weights",
            help="load the checkpoint in model(), and leave --weights out",
        )


@contextmanager
def _session(
    model: str | Path,
    options: Options,
    time_limit_s: float,
    meta: bool,
    blank: bool = False,
    refusal: BigBrainError | None = None,
    apart: Sequence[BigBrainError] = (),
    loss_apart: bool = False,
    room: Room | None = None,
    child: str = CHILD,
) -> Iterator[CaptureSession]:
    def start(rows: int | None) -> CaptureSession:
        return capture_file(
            model,
            time_limit_s=time_limit_s,
            meta=meta,
            blank=blank,
            training=options.mode == "train",
            seed=options.seed,
            micro_batch=rows,
            assume=dict(options.assume),
            leaves=options.leaves,
            cache=options.cache,
            quantize=options.quantize,
            refusal=refusal,
            parts=options.micro_batches or options.replicas or 1,
            strict=options.strict,
            apart=[(error.apart or "", _first_of(error.what)) for error in apart],
            loss_apart=loss_apart,
            room=room,
            child=child,
        )

    session = start(options.rows)
    rows = other_rows(session.graph, options)
    if rows is not None:
        session.close()
        session = start(rows)
    with session:
        yield session

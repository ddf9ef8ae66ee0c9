"""A model file or module -> its graph, and who has its weights: what `split` and `estimate` find.

It captures and tries the optimizer; it plans and writes nothing.
"""

from __future__ import annotations

import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, fields, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Protocol, cast

from bigbrain_fx.bundles.carried import as_optimizer, carry
from bigbrain_fx.core import Graph, RuleTrial, Shard
from bigbrain_fx.errors import InputError
from bigbrain_fx.frontend import CaptureSession, ModelFacts, capture_file
from bigbrain_fx.plan import Options, Plan, Source, require_quantisable, trials, updating
from bigbrain_fx.weights import Checkpoint, FromCheckpoint, as_umask_says, match, read_checkpoint

if TYPE_CHECKING:
    from torch import nn

    from bigbrain_fx.frontend import Captured

Loss = Callable[..., object]
IN_MEMORY = "__main__"  # what plans call the module that defined a model in memory


@dataclass(frozen=True)
class Recipe:
    """How a module in memory is trained, as a model file would say it.

    `optimizer` is a function of named parameters, a torch class, or a `functools.partial` of one;
    None is torch's AdamW. Functions reach the devices as text: see `carried`. `drop_last`,
    `batch_dims` and `pad` say how batches split.
    """

    optimizer: Callable[..., object] | None = None
    lr_scale: Callable[[int], float] | None = None
    scheduler: Callable[..., object] | None = None
    clip_norm: float | None = None
    autocast: str | None = None
    grad_scaler: bool | Mapping[str, float] | None = None
    leaves: tuple[str, ...] = ()
    drop_last: bool | None = None
    batch_dims: Mapping[str | int, int | None] = field(default_factory=dict)
    pad: Mapping[str | int, int | float] = field(default_factory=dict)


def source_of(facts: ModelFacts) -> Source:
    """Return what a plan remembers of the model file."""
    location = facts.path if facts.name == "model" else f"{facts.path}:{facts.name}"
    same = (entry.name for entry in fields(Source) if entry.name != "path")
    return Source(location, **{name: getattr(facts, name) for name in same})


class _Weights(Protocol):
    def write_weights(self, folder: Path, files: Mapping[str, Sequence[str]]) -> None: ...

    def write_batch(self, path: Path) -> None: ...


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
            help="load them into it, or give the model file",
        )
    return read_checkpoint(weights)


def _weights(
    session: CaptureSession, given: Given | None, scratch: Path
) -> tuple[_Weights, tuple[str, ...]]:
    """Return who writes the bundle's weights, and what to say of it."""
    if given is None or given.checkpoint is None:
        return session, ()
    checkpoint, params = given.checkpoint, session.graph.params
    fit = match(params, session.converted(checkpoint, scratch))
    found = FromCheckpoint(params, fit.sources, checkpoint, session, given.by_reference)
    return found, fit.notes


@dataclass(frozen=True)
class FoundModel:
    """A captured model, from a file or from memory.

    `parameters` counts trainable numbers, tied ones once; `capture_s` is 0 for a module in memory,
    and `session` none: it has `module` and `recipe`.
    """

    graph: Graph
    source: Source
    weights: _Weights
    warnings: tuple[str, ...]
    parameters: int
    capture_s: float = 0.0
    session: CaptureSession | None = None
    module: nn.Module | None = None
    recipe: Recipe | None = None

    def try_rules(self, trials: Sequence[RuleTrial]) -> list[str | None]:
        """Run trials of rules where torch is; return for each why it failed, or None."""
        if self.session is not None:
            return self.session.try_rules(trials)
        from bigbrain_fx.frontend import try_rule

        return [try_rule(trial) for trial in trials]


def with_tried_rules(
    found: FoundModel, options: Options, make: Callable[[Options], Plan]
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
        failed = zip(tried, found.try_rules(tried), strict=True)
        more = {pair: why for trial, why in failed if why for pair in trial.ops}
        if not more:
            kept = {axis.name for axis in tensor.axes}
            said = ((axis, op, why) for (axis, op), why in whole.items() if axis in kept)
            return plan, tuple(f"{op} is kept whole on {axis}: {why}" for axis, op, why in said)
        whole |= more


def require_optimizer(found: FoundModel, plan: Plan) -> tuple[str, ...]:
    """Try the optimizer with the parameters of each device, before anything is written.

    Returns:
        What the user should know.

    Raises:
        InputError: it fails there, or updates otherwise than with all parameters.
    """
    if plan.mode != "train":
        return ()
    param, stages = plan.graph.param, plan.stages
    trained = {p.canonical for p in plan.graph.params if p.spec.requires_grad}
    used = {d: {param[n].canonical for s in stages.of(d) for n in s.params} for d in stages.devices}
    if stages.zero_stage:
        updates = updating(plan.sharded.members[0], stages)
        replica = {stage.device: stage.replica for stage in stages.stages}
        used = {d: {n for n in used[d] if updates.get(n) == replica[d]} for d in used}
    held = {device: sorted(names & trained) for device, names in used.items()}
    here = all(plan.cluster.device[name].kind == "cpu" for name in stages.devices)
    shards = plan.sharded.shards
    by_pieces = "state" in stages.offload
    if found.session is None:
        return _tried_here(found, held, here, shards, by_pieces)
    return found.session.try_optimizer(held, here=here, shards=shards, by_pieces=by_pieces)


def _tried_here(
    found: FoundModel,
    held: Mapping[str, Sequence[str]],
    here: bool,
    shards: Sequence[Shard],
    by_pieces: bool,
) -> tuple[str, ...]:
    from bigbrain_fx.frontend import require_divided, require_made_per_device

    recipe = found.recipe or Recipe()
    if found.module is None or not (recipe.optimizer or recipe.scheduler):
        return ()
    made = recipe.optimizer, recipe.scheduler
    if recipe.optimizer and shards:
        require_divided(found.module, recipe.optimizer, shards)
    is_scaled = found.source.grad_scaler is not None
    note = require_made_per_device(
        found.module, *made, held, is_scaled=is_scaled, here=here, by_pieces=by_pieces
    )
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
) -> Iterator[FoundModel]:
    """Capture a model as `split` does, or `estimate` with `meta`; inside, weights can be written.

    Raises:
        BigBrainError: the input cannot be used or captured.
    """
    _require_numbers(model, options, given)
    if not isinstance(model, str | Path):
        with tempfile.TemporaryDirectory(prefix="bigbrain-fx-code-") as scratch:
            yield _in_memory(model, options, example_batch, loss, recipe, Path(scratch))
        return
    if example_batch is not None or loss is not None or recipe is not None:
        raise InputError(
            "a model file defines its own example_batch, loss and optimizer",
            at=str(model),
            help="leave the arguments out, or give the module itself",
        )
    checkpoint = given.checkpoint if given else None
    with (
        _session(model, options, time_limit_s, meta, checkpoint is not None) as session,
        tempfile.TemporaryDirectory(prefix="bigbrain-fx-weights-") as scratch,
    ):
        facts = session.facts
        weights, notes = _weights(session, given, Path(scratch))
        yield FoundModel(
            session.graph,
            source_of(facts),
            weights,
            (*session.warnings, *notes),
            facts.parameters,
            session.capture_s,
            session,
        )


def _require_numbers(model: str | Path | nn.Module, options: Options, given: Given | None) -> None:
    """Refuse to quantise what is not there, or is the caller's own."""
    if options.quantize is None:
        return
    require_quantisable(options)
    if not isinstance(model, str | Path):
        raise InputError(
            "--quantize changes the module's layers, and a module in memory is yours",
            help="give the model file, or put quantised layers into the module yourself",
        )
    if given is not None and given.checkpoint is not None:
        raise InputError(
            "--quantize rounds the numbers that model() has, and --weights brings others",
            at="--weights",
            help="load the checkpoint in model(), and leave --weights out",
        )


@contextmanager
def _session(
    model: str | Path, options: Options, time_limit_s: float, meta: bool, blank: bool = False
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
        )

    session = start(options.rows)
    rows = _other_rows(session.graph, options)
    if rows is not None:
        session.close()
        session = start(rows)
    with session:
        yield session


def _in_memory(
    module: nn.Module,
    options: Options,
    example_batch: object,
    loss: Loss | None,
    recipe: Recipe | None,
    scratch: Path,
) -> FoundModel:
    from torch import nn

    from bigbrain_fx.frontend import capture, require_padding, require_rows, training_of, with_cache

    if not isinstance(module, nn.Module):
        raise InputError(
            f"expected a model file or a torch.nn.Module, found {type(module).__name__}",
            help='give "model.py", or an instance of the module',
        )
    if example_batch is None:
        raise InputError(
            "a module in memory needs an example batch",
            help="split(module, devices, out, example_batch={...}, loss=...)",
        )
    recipe = recipe or Recipe()
    recipe = replace(recipe, optimizer=as_optimizer(recipe.optimizer))
    if options.cache:
        module, example_batch = with_cache(
            module,
            example_batch,
            options.cache,
            loss=cast("None", loss),
            autocast=recipe.autocast,
            batch_dims=recipe.batch_dims,
        )
        recipe, loss = Recipe(autocast=recipe.autocast), None
    said = training_of(_Defined(recipe, loss), Path("Recipe"), module)
    trace = partial(
        capture,
        module,
        example_batch,
        cast("None", loss),
        training=options.mode == "train",
        autocast=recipe.autocast,
        assume=dict(options.assume),
        leaves=(*recipe.leaves, *options.leaves),
        loss_needed=options.mode == "train",
        batch_dims=recipe.batch_dims,
    )
    captured = trace(micro_batch=options.rows)
    rows = _other_rows(captured.graph, options)
    if rows is not None:
        captured = trace(micro_batch=rows)
    require_rows(recipe.drop_last, captured, options.mode == "train")
    tried = require_padding(module, cast("None", loss), recipe.pad, captured, recipe.autocast)
    source = _carried(captured, module, recipe, loss, said, scratch, options.cache)
    count = sum(p.numel() for p in {id(p): p for p in module.parameters()}.values())
    weights = _InMemory(captured)
    notes = (*captured.warnings, *([tried] if tried else []))
    return FoundModel(captured.graph, source, weights, notes, count, module=module, recipe=recipe)


class _Defined:
    """A recipe and a loss by the names of a model file."""

    def __init__(self, recipe: Recipe, loss: Loss | None) -> None:
        self.__dict__.update(vars(recipe), loss=loss)


def _carried(
    captured: Captured,
    module: nn.Module,
    recipe: Recipe,
    loss: Loss | None,
    said: Mapping[str, object],
    scratch: Path,
    cache: int,
) -> Source:
    """Write what the devices call as it is to a file, and say what a plan remembers of it.

    Raises:
        InputError: something has no source, or it is a module that no trace can hold.
    """
    from bigbrain_fx.frontend import Cached, optimizer_facts, pads

    named: dict[str, object] = {
        name: value
        for name in ("optimizer", "lr_scale", "scheduler")
        if (value := getattr(recipe, name)) is not None
    }
    named |= dict(_called(captured, loss))
    facts = optimizer_facts(module, cast("None", recipe.optimizer))
    return Source(
        path=str(carry(named, scratch)) if named else "",
        has_optimizer=recipe.optimizer is not None,
        has_loss=loss is not None,
        has_lr_scale=recipe.lr_scale is not None,
        has_scheduler=recipe.scheduler is not None,
        clip_norm=cast("float | None", said["clip_norm"]),
        grad_scaler=cast("dict[str, int | float] | None", said["grad_scaler"]),
        module=IN_MEMORY,
        cache=cache,
        positions=module.row.longest if isinstance(module, Cached) else 0,
        optimizer_state=facts.state,
        optimizer_temporaries=facts.temporaries,
        drop_last=recipe.drop_last,
        batch_dims={e.name: e.dim for e in captured.batch.entries if e.dim},
        pad=pads(captured.batch, recipe.pad),
    )


def _called(captured: Captured, loss: Loss | None) -> Iterator[tuple[str, object]]:
    """Yield name and value of the user's own Python that stages call as it is."""
    from bigbrain_fx.frontend import LEAF, LINES, LOSS

    own = f"opaque.{IN_MEMORY}."
    for target in captured.functions:
        if target.startswith((LEAF, LINES)):
            raise InputError(
                f"BX0140: {target} is kept whole: a device would have to build "
                "it, and only a model file says how",
                help="write a model.py with model(), example_batch() and loss, and give that",
            )
        if target == LOSS:
            yield "loss", loss
        if target.startswith(own):
            name = target.removeprefix(own).partition(".")[0]
            yield name, getattr(sys.modules[IN_MEMORY], name)


def _other_rows(graph: Graph, options: Options) -> int | None:
    """Return the rows to trace again with, when a trace of fixed size has others than asked for."""
    count = options.micro_batches
    if graph.static_batch is None or count is None or count < 1 or graph.batch % count:
        return None
    rows = graph.batch // count
    return rows if rows != graph.static_batch else None


@dataclass(frozen=True)
class _InMemory:
    """The weights of a module captured in this process."""

    captured: Captured

    def write_weights(self, folder: Path, files: Mapping[str, Sequence[str]]) -> None:
        from safetensors.torch import save_file

        for name, tensors in files.items():
            found = {t: self.captured.tensors[t].detach().contiguous().clone() for t in tensors}
            save_file(found, folder / name)
        as_umask_says(*(folder / name for name in files))

    def write_batch(self, path: Path) -> None:
        from safetensors.torch import save_file

        batch = self.captured.inputs()
        save_file({name: tensor.contiguous().clone() for name, tensor in batch.items()}, path)
        as_umask_says(path)

"""A model file or module -> its graph, and who has its weights: what `split` and `estimate` find.

It captures and tries the optimizer; it plans and writes nothing.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Protocol, cast

from bigbrain_fx.core import Graph
from bigbrain_fx.errors import InputError
from bigbrain_fx.frontend import CaptureSession, ModelFacts, capture_file
from bigbrain_fx.plan import Options, Plan, Source, updating
from bigbrain_fx.weights import (
    Checkpoint,
    FromCheckpoint,
    as_umask_says,
    match,
    read_checkpoint,
)

if TYPE_CHECKING:
    from torch import nn

    from bigbrain_fx.frontend import Captured

Loss = Callable[..., object]


def source_of(facts: ModelFacts) -> Source:
    """Return what a plan remembers of the model file."""
    location = facts.path if facts.name == "model" else f"{facts.path}:{facts.name}"
    return Source(
        location,
        facts.has_batches,
        facts.has_optimizer,
        facts.has_loss,
        facts.has_lr_scale,
        facts.clip_norm,
        facts.module,
        facts.optimizer_state,
        facts.optimizer_temporaries,
        facts.has_scheduler,
        facts.grad_scaler,
        facts.optimizer_leftover,
        facts.optimizer_states,
    )


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
    and so is `session` none: it has torch's AdamW.
    """

    graph: Graph
    source: Source
    weights: _Weights
    warnings: tuple[str, ...]
    parameters: int
    capture_s: float = 0.0
    session: CaptureSession | None = None


def require_optimizer(found: FoundModel, plan: Plan) -> tuple[str, ...]:
    """Try the optimizer with the parameters of each device, before anything is written.

    Returns:
        What the user should know.

    Raises:
        InputError: it fails there, or updates otherwise than with all parameters.
    """
    if found.session is None or plan.mode != "train":
        return ()
    param, stages = plan.graph.param, plan.stages
    trained = {p.canonical for p in plan.graph.params if p.spec.requires_grad}
    used = {d: {param[n].canonical for s in stages.of(d) for n in s.params} for d in stages.devices}
    if stages.zero_stage:
        updates = updating(plan.graph, stages)
        replica = {stage.device: stage.replica for stage in stages.stages}
        used = {d: {n for n in used[d] if updates.get(n) == replica[d]} for d in used}
    held = {device: sorted(names & trained) for device, names in used.items()}
    here = all(plan.cluster.device[name].kind == "cpu" for name in stages.devices)
    return found.session.try_optimizer(held, here=here)


@contextmanager
def captured_model(
    model: str | Path | nn.Module,
    options: Options,
    example_batch: object,
    loss: Loss | None,
    time_limit_s: float,
    meta: bool = False,
    given: Given | None = None,
) -> Iterator[FoundModel]:
    """Capture a model as `split` does, or `estimate` with `meta`; inside, weights can be written.

    Raises:
        BigBrainError: the input cannot be used or captured.
    """
    if not isinstance(model, str | Path):
        yield _in_memory(model, options, example_batch, loss)
        return
    if example_batch is not None or loss is not None:
        raise InputError(
            "a model file defines its own example_batch and loss",
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
        )

    session = start(options.rows)
    rows = _other_rows(session.graph, options)
    if rows is not None:
        session.close()
        session = start(rows)
    with session:
        yield session


def _in_memory(
    module: nn.Module, options: Options, example_batch: object, loss: Loss | None
) -> FoundModel:
    from torch import nn

    from bigbrain_fx.frontend import capture

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
    trace = partial(
        capture,
        module,
        example_batch,
        cast("None", loss),
        training=options.mode == "train",
        assume=dict(options.assume),
        leaves=options.leaves,
        loss_needed=options.mode == "train",
    )
    captured = trace(micro_batch=options.rows)
    rows = _other_rows(captured.graph, options)
    if rows is not None:
        captured = trace(micro_batch=rows)
    count = sum(p.numel() for p in {id(p): p for p in module.parameters()}.values())
    weights = _InMemory(captured)
    return FoundModel(captured.graph, Source(""), weights, captured.warnings, count)


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

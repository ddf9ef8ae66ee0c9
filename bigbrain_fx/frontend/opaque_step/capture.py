"""A model file -> a Graph of one op: the training step. The module knows no devices."""

from __future__ import annotations

from typing import TYPE_CHECKING

from bigbrain_fx.core import (
    OPAQUE_STEP,
    Arg,
    Dim,
    Graph,
    Input,
    Op,
    ParamRef,
    Ref,
    Saves,
    TensorSpec,
    dense_strides,
)
from bigbrain_fx.errors import BigBrainError, InputError
from bigbrain_fx.frontend.opaque_step.trial import StepCost, require_optimizer, try_step
from bigbrain_fx.frontend.opaque_step.user_step import call_of
from bigbrain_fx.frontend.tracing.captured import Captured
from bigbrain_fx.frontend.tracing.objective import require_sizes
from bigbrain_fx.frontend.tracing.step import input_names, route
from bigbrain_fx.frontend.translation.batch import Batch, Entry, take_apart, unique
from bigbrain_fx.frontend.translation.params import dtype_name, store, tensor_names
from bigbrain_fx.runtime import keep_sparse_apart

if TYPE_CHECKING:
    from bigbrain_fx.frontend.modelfile import ModelFile

_PER_PARAMETER = 2  # operations of a forward for each row, where nothing was measured


def capture_step(file: ModelFile, seed: int, refusal: BigBrainError, *, runs: bool) -> Captured:
    """Return the user's step as a graph of one op.

    Args:
        file: the model file, loaded.
        seed: of the step that is tried.
        refusal: why it is not traced.
        runs: whether the model has numbers: then one step is tried.

    Raises:
        InputError: eager PyTorch does not train it, either; or no file holds its weights.
    """
    keep_sparse_apart(file.model)
    require_sizes(file.model)
    how = route(file.model, file.example_batch, file.loss is not None)
    call, cost = call_of(file.model, file.example_batch, how), StepCost()
    if runs:
        call, cost = try_step(file, seed)
    else:
        require_optimizer(file)
    batch = _batch(file, input_names(file.model, file.example_batch, how))
    held = store(file.model, {})
    loss = unique("loss", {entry.name for entry in batch.entries} | {p.name for p in held.params})
    args: tuple[Arg, ...] = (
        call,
        file.loss is not None,
        tuple(Ref(entry.name) for entry in batch.entries),
        tuple(ParamRef(param.name) for param in held.params),
    )
    count = sum(p.numel() for p in file.model.parameters() if p.requires_grad)
    op = Op(
        loss,
        OPAQUE_STEP,
        args,
        outputs=(TensorSpec((), cost.dtype, (), requires_grad=True),),
        source=refusal.at or "",
        code=refusal.what,
        flops=_by_rows(
            _PER_PARAMETER * count * batch.rows if cost.flops is None else cost.flops, batch
        ),
        reads_bytes=sum(param.spec.nbytes for param in held.params),
        saves=Saves(
            own_bytes=_by_rows(cost.saved, batch),
            forward_bytes=_by_rows(cost.forward, batch),
            backward_bytes=_by_rows(cost.backward, batch),
        ),
    )
    graph = Graph(
        type(file.model).__name__,
        (op,),
        tuple(map(_input, batch.entries)),
        held.params,
        (),
        loss,
        batch.rows,
        autocast=file.autocast,
    )
    return Captured(graph, held.tensors, {}, (), batch)


def _batch(file: ModelFile, names: dict[tuple[str | int, ...], str]) -> Batch:
    """Return the batch taken apart; one that cannot be has no entries, and is never cut."""
    try:
        return take_apart(file.example_batch, names, tensor_names(file.model), file.batch_dims)
    except InputError:
        return Batch(file.example_batch, (), 1)


def _input(entry: Entry) -> Input:
    sizes: tuple[Dim, ...] = tuple(entry.tensor.shape)
    shape = ("B", *sizes[1:]) if entry.batched else sizes
    spec = TensorSpec(shape, dtype_name(entry.tensor), dense_strides(shape))
    return Input(entry.name, entry.key, spec, entry.batched)


def _by_rows(amount: int, batch: Batch) -> Dim:
    """Return an amount of the example as one that grows with the rows, where these are cut."""
    if not any(entry.batched for entry in batch.entries):
        return amount
    return f"{-(-amount // batch.rows)}*B"

"""Checks of a model file in a capture, function by function; each imports the code that it runs.

The process that traces calls these in its own order: see `capture_service`.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, cast

from bigbrain_fx.errors import BigBrainError, InputError

if TYPE_CHECKING:
    from torch.nn import Module

    from bigbrain_fx.frontend.modelfile import ModelFile
    from bigbrain_fx.frontend.quantised import QuantisedModel
    from bigbrain_fx.frontend.tracing.captured import Captured


def quantised(file: ModelFile, quantize: object) -> QuantisedModel | None:
    """Quantise a model's frozen weights to int8 where the options request it."""
    if quantize is None:
        return None
    from bigbrain_fx.frontend.quantised import quantise

    return quantise(file.model)


def require_read_by_layers(captured: Captured, quantised: QuantisedModel | None) -> None:
    """Refuse quantised weights that something else than their layer reads."""
    if quantised is not None:
        from bigbrain_fx.frontend.quantised import require_read_by_layers

        require_read_by_layers(captured.graph)


def captured(file: ModelFile, wanted: Mapping[str, object]) -> Captured:
    """Trace a model file's model as requested."""
    from bigbrain_fx.frontend.tracing.trace import capture

    return capture(
        file.model,
        file.example_batch,
        file.loss,
        training=bool(wanted["training"]),
        micro_batch=cast("int | None", wanted["micro_batch"]),
        assume=cast("Mapping[str, bool]", wanted["assume"]),
        leaves=(*file.leaves, *cast("list[str]", wanted["leaves"])),
        autocast=file.autocast,
        loss_needed=not wanted["meta"],
        batch_dims=file.batch_dims,
        parts=file.parts if file.whole_batch is not None else None,
        strict=bool(wanted.get("strict")),
        lengths=file.free,
        apart=cast("Sequence[tuple[str, str]]", wanted.get("apart", ())),
        loss_apart=bool(wanted.get("loss_apart")),
    )


def with_optimizer_for_devices(file: ModelFile) -> ModelFile:
    """Return a model file with an optimizer that each device can build for its own parameters."""
    from bigbrain_fx.frontend.tracing.optimizers.as_data import for_devices

    return replace(file, optimizer=for_devices(file.optimizer, file.model))


def with_parts(file: ModelFile, count: int) -> ModelFile:
    """Return a model file whose example is one of so many parts, where it cuts its batches."""
    from bigbrain_fx.frontend.user_cut import with_parts

    return with_parts(file, count)


def with_lengths(file: ModelFile, seed: int, *, draws: bool) -> ModelFile:
    """Return a model file that knows in which dimensions its batches are shorter."""
    from bigbrain_fx.frontend.lengths import with_lengths

    return with_lengths(file, seed, draws=draws)


def captured_with_numbers(
    file: ModelFile, seed: int, wanted: Mapping[str, object]
) -> tuple[ModelFile, Captured]:
    """Trace a model file's model; numbers of a batch that change are inputs of the graph.

    Raises:
        InputError: no trace holds with such a number as a tensor.
    """
    from bigbrain_fx.frontend.plain_entries import (
        assumes_number,
        changing_numbers,
        with_number_inputs,
    )

    own = with_number_inputs(file, changing_numbers(file, seed))
    if not own.numbers:
        return file, captured(file, wanted)
    try:
        found = captured(own, wanted)
    except BigBrainError as error:
        raise _no_tensor(file, own, f"{error.what}") from error
    if assumes_number(found.graph, own.numbers):
        raise _no_tensor(file, own, "a branch goes by it, and may be another one later")
    return own, found


def _no_tensor(file: ModelFile, own: ModelFile, why: str) -> InputError:
    names = ", ".join(".".join(map(str, key)) for key in own.numbers)
    return InputError(
        f"batches() changes {names}, and the model reads it: a trace would keep the first for ever",
        code="BX2198",
        at="batches",
        notes=(f"with a tensor in its place no trace holds, either: {why}",),
        help="let tensors alone decide: compute both ways and choose with torch.where; or split a "
        "model for each value",
    )


def require_divided_optimizer(model: Module, make: Callable[..., object], shards: object) -> None:
    """Refuse an optimizer that cannot update parts of parameters."""
    from pydantic import TypeAdapter

    from bigbrain_fx.core import Shard
    from bigbrain_fx.frontend.tracing.optimizers.per_device import require_divided

    found = TypeAdapter(tuple[Shard, ...]).validate_python(shards)
    require_divided(model, make, found)


def require_optimizer(file: ModelFile) -> None:
    """Refuse an optimizer that fails; `estimate` requests its memory alone."""
    from bigbrain_fx.frontend.tracing.optimizers.memory import optimizer_facts
    from bigbrain_fx.frontend.tracing.optimizers.per_device import require_runnable

    if file.optimizer is not None and not optimizer_facts(file.model, file.optimizer).measured:
        require_runnable(file.model, file.optimizer)


def require_steady_file(file: ModelFile, seed: int) -> None:
    """Refuse batches that change a constant of the trace."""
    from bigbrain_fx.frontend.plain_entries import require_steady
    from bigbrain_fx.frontend.user_cut import as_traced

    if file.batches is not None:
        own = file.batches

        def batches() -> Iterator[object]:
            return (as_traced(file, batch) for batch in own(seed))

        require_steady(file.model, file.example_batch, file.loss, batches, file.autocast)


def fixed_parts(file: ModelFile) -> tuple[object, ...]:
    """Return the entries of a batch beside its tensors that affect the model."""
    from bigbrain_fx.frontend.plain_entries import fixed_entries

    if file.batches is None:
        return ()  # the example again and again
    return fixed_entries(file.model, file.example_batch, file.loss, file.autocast)


def entries_apart(file: ModelFile, captured: Captured) -> tuple[object, ...]:
    """Return the entries that are written, and that no other may be the memory of."""
    from bigbrain_fx.runtime import APART

    if file.batches is None:
        return ()
    entries = captured.batch.entries
    return tuple((entry.key, APART) for entry in entries if entry.name in captured.written)


def on_lengths(file: ModelFile, captured: Captured) -> Captured:
    """Note of lengths that were found and not declared, that longer batches stop a run."""
    names = captured.batch.lengths
    if not names or file.lengths is not None:
        return captured
    from bigbrain_fx.core import longest

    most = max(map(longest, names))
    said = (
        f"batches are of several lengths, at most {most} as far as split has seen: each keeps its "
        f"own, and one longer than {most} stops the run. Let example_batch() have the greatest "
        "length of all"
    )
    return replace(captured, warnings=(*captured.warnings, said))


def require_uneven(file: ModelFile, captured: Captured, training: bool) -> Captured:
    """Require that unequal batches are trained as the file declares; note remarks."""
    from bigbrain_fx.frontend.tracing.batches.uneven import require_padding, require_rows

    require_rows(file.drop_last, captured, training)
    said = require_padding(file.model, file.loss, file.pad, captured, file.autocast)
    return replace(captured, warnings=(*captured.warnings, said)) if said else captured


def module_name(file: ModelFile) -> str:
    """Return the name under which the file was imported."""
    if file.is_data:
        return ""  # no module of the user's
    named = [n for n, m in sys.modules.items() if getattr(m, "__file__", None) == str(file.path)]
    return named[0] if named else file.path.stem


def second_batch(file: ModelFile, seed: int) -> object:
    """Return the second batch of the user's data; all generators are as they were afterwards."""
    from itertools import islice

    from bigbrain_fx.frontend.plain_entries import with_numbers
    from bigbrain_fx.frontend.tracing.state.python_rng import random_state_kept
    from bigbrain_fx.runtime import left_alone

    assert file.batches is not None
    with random_state_kept(), left_alone(file.batches):
        batch = next(islice(file.batches(seed), 1, None))
    return with_numbers(batch, file.numbers) if file.parts == 1 else batch

"""Capture of a model file, and checks of its functions, in the process that traces.

See `capture_service` for their order. What an earlier command has answered needs none of this.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, cast

from bigbrain_fx.core import longest
from bigbrain_fx.errors import BigBrainError, InputError
from bigbrain_fx.frontend.later_batches import require_steady
from bigbrain_fx.frontend.plain_entries import (
    assumes_number,
    changing_numbers,
    with_number_inputs,
)
from bigbrain_fx.frontend.tracing.batches.uneven import require_padding, require_rows
from bigbrain_fx.frontend.tracing.optimizers.memory import optimizer_facts
from bigbrain_fx.frontend.tracing.optimizers.per_device import require_runnable
from bigbrain_fx.frontend.tracing.trace import capture
from bigbrain_fx.frontend.user_cut import as_traced

if TYPE_CHECKING:
    from bigbrain_fx.frontend.modelfile import ModelFile
    from bigbrain_fx.frontend.tracing.captured import Captured


def captured(file: ModelFile, wanted: Mapping[str, object]) -> Captured:
    """Trace a model file's model as requested."""
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


def captured_with_numbers(
    file: ModelFile, seed: int, trace: Callable[[ModelFile], Captured]
) -> tuple[ModelFile, Captured]:
    """Trace a model file's model; numbers of a batch that change are inputs of the graph.

    Args:
        file: says in its first batches what changes.
        seed: of its batches.
        trace: traces the model by the example of a file.

    Raises:
        InputError: no trace holds with such a number as a tensor.
    """
    own = with_number_inputs(file, changing_numbers(file, seed))
    if not own.numbers:
        return file, trace(file)
    try:
        found = trace(own)
    except BigBrainError as error:
        raise _no_tensor(own, f"{error.what}") from error
    if assumes_number(found.graph, own.numbers):
        raise _no_tensor(own, "a branch goes by it, and may be another one later")
    return own, found


def _no_tensor(own: ModelFile, why: str) -> InputError:
    names = ", ".join(".".join(map(str, key)) for key in own.numbers)
    return InputError(
        f"batches() changes {names}, and the model reads it: a trace would keep the first for ever",
        code="BX2198",
        at="batches",
        notes=(f"with a tensor in its place no trace holds, either: {why}",),
        help="let tensors alone decide: compute both ways and choose with torch.where; or split a "
        "model for each value",
    )


def require_optimizer(file: ModelFile) -> None:
    """Refuse an optimizer that fails; `estimate` requests its memory alone."""
    if file.optimizer is not None and not optimizer_facts(file.model, file.optimizer).measured:
        require_runnable(file.model, file.optimizer)


def require_steady_file(file: ModelFile, seed: int) -> None:
    """Refuse batches that change a constant of the trace."""
    if file.batches is not None:
        own = file.batches

        def batches() -> Iterator[object]:
            return (as_traced(file, batch) for batch in own(seed))

        require_steady(file.model, file.example_batch, file.loss, batches, file.autocast)


def on_lengths(file: ModelFile, captured: Captured) -> Captured:
    """Note of lengths that were found and not declared, that longer batches stop a run."""
    names = captured.batch.lengths
    if not names or file.lengths is not None:
        return captured
    most = max(map(longest, names))
    said = (
        f"batches are of several lengths, at most {most} as far as split has seen: each keeps its "
        f"own, and one longer than {most} stops the run. Let example_batch() have the greatest "
        "length of all"
    )
    return replace(captured, warnings=(*captured.warnings, said))


def require_uneven(file: ModelFile, captured: Captured, training: bool) -> Captured:
    """Require that unequal batches are trained as the file declares; note remarks."""
    require_rows(file.drop_last, captured, training)
    said = require_padding(file.model, file.loss, file.pad, captured, file.autocast)
    return replace(captured, warnings=(*captured.warnings, said)) if said else captured

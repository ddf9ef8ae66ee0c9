"""The first batches of a model file, read as a bundle would read them: do they fit its trace?

A trace holds for the example's shapes, types and entries. A run checks later batches. A smaller
last batch that the file does not mention is trained where the trace allows it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import islice
from typing import TYPE_CHECKING, Any

from bigbrain_fx.errors import CaptureError, InputError
from bigbrain_fx.frontend.budget import budget

if TYPE_CHECKING:
    from bigbrain_fx.frontend.micro_batches.effect import MicroBatchEffect
    from bigbrain_fx.frontend.modelfile import ModelFile
    from bigbrain_fx.frontend.tracing.captured import Captured
    from bigbrain_fx.frontend.translation.batch import Batch
    from bigbrain_fx.runtime import Stream

FEW = 3
MOST = 64
READ_S = 1.0  # more batches than a few are read for so long
READ_BYTES = 2**26  # and held, as long as they take no more
RAISES = "BX5030"  # the file's own code, and no batch that does not fit
_LOOP_REMEDY = "mend that line: a plain loop over batches(seed) fails there, too"


@dataclass(frozen=True)
class BatchReading:
    """How a planned bundle reads batches; as of `Stream` and `Splitting` of the runtime.

    Attributes:
        inputs: model input -> its place in a batch.
        whole: inputs that micro-batches share uncut.
        micro_batches: how many parts a batch is cut into.
        specs: model input -> element type and shape in a whole batch.
        splitting: the file's rules for unequal batches.
        by_user: whether the file's `micro` cuts.
    """

    inputs: Mapping[str, tuple[str | int, ...]]
    whole: tuple[str, ...]
    micro_batches: int
    specs: Mapping[str, tuple[str, tuple[int, ...]]]
    splitting: Mapping[str, Any] = field(default_factory=dict)
    by_user: bool = False


def require_first_batches(
    file: ModelFile, seed: int, reading: BatchReading, reason: str = ""
) -> None:
    """Read a few batches; leave the file's generators as they were.

    `reason` is the reason why the trace holds for batches of one length only.

    Raises:
        CaptureError: a batch does not fit the trace.
    """
    import torch

    from bigbrain_fx.frontend.lengths import FIRST_BATCHES
    from bigbrain_fx.frontend.users_code import definition
    from bigbrain_fx.runtime import Splitting, Stream

    how = reading.inputs, reading.whole, reading.micro_batches, torch.device("cpu")
    splitting = Splitting(**reading.splitting, micro=file.micro if reading.by_user else None)
    stream = splitting.stream(Stream, _until_end(file), seed, *how, reading.specs)
    fault = _fault(file, stream, FIRST_BATCHES if reading.splitting.get("lengths") else MOST)
    if fault is not None:
        what, _, remedy = fault.partition(": ")[2].partition(": ")
        raise CaptureError(
            f"batch {stream.step + 1} does not fit the trace: {what}{reason and f'; {reason}'}",
            code="BX0135",
            at=definition(file.batches, file.path),
            help=remedy or None,
        )


def require_batches(file: ModelFile, seed: int) -> None:
    """Read the first batches as a plain loop does; leave the file's generators as they were.

    Raises:
        InputError: the file's `batches` raises, or yields no batch; names the user's line.
    """
    from bigbrain_fx.frontend.users_code import definition, errors_of
    from bigbrain_fx.runtime import left_alone

    batches = file.batches
    if batches is None:
        return
    with left_alone(batches), errors_of(file.path, f"batches({seed}) fails", _LOOP_REMEDY):
        drawn = list(islice(batches(seed), FEW))
    empty = [number for number, batch in enumerate(drawn, 1) if batch is None]
    if empty:
        raise InputError(
            f"batches({seed}) yields None as batch {empty[0]}",
            code="BX2197",
            at=definition(batches, file.path),
            help="yield a batch, or leave it out",
        )


def _until_end(file: ModelFile) -> Callable[[int], Iterator[object]]:
    """Return the file's batches; their regular end is distinct from a fault."""

    def batches(seed: int) -> Iterator[object]:
        assert file.batches is not None
        yield from file.batches(seed)
        raise EndedError

    return batches


class EndedError(Exception):
    """Say that there are no more batches."""


def _fault(file: ModelFile, stream: Stream, count: int = MOST) -> str | None:
    """Return why one of the first batches cannot be read; leave the file's generators alone."""
    from bigbrain_fx.runtime import BatchError, left_alone

    is_over, step = budget(READ_S), 0
    with left_alone(file.batches):
        try:
            for step in range(count):
                if step >= FEW and is_over():
                    break
                stream.advance(step)
        except BatchError as error:
            is_later = error.code == RAISES and step >= FEW  # a run may end before
            return None if is_later or isinstance(error.__cause__, EndedError) else str(error)
    return None


def uncut(effect: MicroBatchEffect, file: ModelFile, batch: Batch, seed: int) -> MicroBatchEffect:
    """Return the effect of micro-batches as not compared, where a later batch cannot be cut.

    Args:
        effect: of the example's micro-batches.
        file: the model file, for its batches.
        batch: the example, taken apart.
        seed: of the batches.
    """
    import torch

    from bigbrain_fx.runtime import Splitting, WholeBatches

    if file.batches is None:
        return effect
    inputs = {entry.name: entry.key for entry in batch.entries}
    whole = tuple(entry.name for entry in batch.entries if not entry.batched)
    how = inputs, whole, effect.micro_batches, torch.device("cpu")
    dims = {entry.name: entry.dim for entry in batch.entries if entry.dim}
    stream = WholeBatches(_until_end(file), seed, *how, splitting=Splitting(dims=dims))
    fault = _fault(file, stream)
    return effect if fault is None else replace(effect, not_compared=fault)


# --------------------------------------------------------------------------- to compare


def further_batches(file: ModelFile, seed: int) -> list[object]:
    """Return copies of the data's batches after the first, as many as are read in a second.

    The second one is among them; all generators are as they were afterwards.

    Raises:
        Exception: the user's own, where the second one cannot be read.
    """
    from bigbrain_fx.frontend.plain_entries import with_numbers
    from bigbrain_fx.frontend.tracing.state.python_rng import random_state_kept
    from bigbrain_fx.frontend.translation.batch import named_tensors
    from bigbrain_fx.runtime import left_alone, mapped

    is_over, left, found = budget(READ_S), READ_BYTES, list[object]()
    if file.batches is None:
        return found
    with random_state_kept(), left_alone(file.batches):
        drawn = islice(file.batches(seed), 1, MOST)
        while not found or not (is_over() or left < 0):
            try:
                batch = next(drawn)
            except Exception:  # the user's own, or the end: a run may be over before
                if found:
                    break
                raise
            found.append(mapped(batch, lambda tensor, _: tensor.clone()))
            left -= sum(tensor.nbytes for _, tensor in named_tensors(batch))
    return [with_numbers(batch, file.numbers) for batch in found] if file.parts == 1 else found


# --------------------------------------------------------------------------- a smaller one


def keeping_smaller(file: ModelFile, seed: int, captured: Captured) -> ModelFile:
    """Return a model file with `drop_last = False` where it has no such name and its data need it.

    Args:
        file: the model file; its first batches are read in a fork.
        seed: of the batches.
        captured: the traced model; with a fixed number of rows no batch can be smaller.
    """
    is_open = file.drop_last is None and file.batches is not None and file.micro is None
    if not is_open or captured.graph.static_batch is not None:
        return file
    from bigbrain_fx.frontend.forked import apart

    found = apart(partial(_smaller, file, seed, captured.batch)) or {}
    return replace(file, drop_last=False) if found.get("smaller") else file


def _smaller(file: ModelFile, seed: int, batch: Batch) -> Mapping[str, str]:
    """Say whether one of the first batches has fewer rows than the example in every entry."""
    from torch import Tensor

    from bigbrain_fx.frontend.plain_entries import nodes

    assert file.batches is not None
    is_over = budget(READ_S)
    for step, drawn in enumerate(islice(file.batches(seed), MOST)):
        values = {key: value for key, value in nodes(drawn) if isinstance(value, Tensor)}
        rows = {
            int(values[entry.key].shape[entry.dim]) if entry.key in values else -1
            for entry in batch.entries
            if entry.batched
        }
        if len(rows) == 1 and 0 < rows.pop() < batch.rows:
            return {"smaller": "yes"}
        if step + 1 >= FEW and is_over():
            break
    return {}

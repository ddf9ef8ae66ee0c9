"""Constants of the trace of a caller's module: what a loop may not change, or what it sends."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from types import MappingProxyType
from typing import TYPE_CHECKING, cast

from bigbrain_fx.bundles.found_model import Loss
from bigbrain_fx.errors import InputError, SplitWarning, about_code

if TYPE_CHECKING:
    from torch import Tensor, nn

    from bigbrain_fx.bundles.callers.parts import PartsWatch
    from bigbrain_fx.frontend import Types

_SAID = 3  # names that a warning has


class Constants:
    """Constants of a trace: numbers and texts of the example, the module's attributes.

    Args:
        module: the caller's.
        example: the batch of the trace.
        loss: the caller's.
        autocast: as it was captured.
        held: tensors that the trace read, by their names in the graph: devices can get others.
        inputs: tensors that stood for numbers, by what is read.
        parts: looks at batches whose micro-batches may train something else.
        numbers: entries of a batch that are tensors to the trace, and their types.
    """

    def __init__(
        self,
        module: nn.Module,
        example: object,
        loss: Loss | None,
        autocast: str | None,
        held: Mapping[str, Tensor] = MappingProxyType({}),
        inputs: Mapping[str, Tensor] = MappingProxyType({}),
        parts: PartsWatch | None = None,
        numbers: Types = MappingProxyType({}),
    ) -> None:
        from bigbrain_fx.frontend import Copied, LaterBatches, with_numbers

        about = module, with_numbers(example, numbers), cast("None", loss), autocast
        self.module = Copied(*about, held, inputs)
        self.batches = LaterBatches(*about)
        self.autocast = autocast
        self.parts, self.numbers = parts, numbers

    @contextmanager
    def as_inputs(self) -> Iterator[dict[str, Tensor]]:
        """Let tensors stand for the numbers that the loop has changed, while a trace is made."""
        from bigbrain_fx.frontend import standing_in

        inputs = self.module.inputs()
        with standing_in(self.module.read, inputs), self.module.training():
            yield inputs

    def has_inputs(self, inputs: Mapping[str, Tensor]) -> bool:
        """Whether devices can get any of these numbers: the trace reads no others."""
        return bool(inputs.keys() & self.module.sent.keys())

    def require_unwritten(self) -> None:
        """Refuse a loss or forward that writes what it reads, where a device runs it as it is.

        Raises:
            InputError: names it; the user's code runs without a split.
        """
        with about_code():
            self.module.require_unwritten()

    def warn_of_written(self) -> None:
        """Warn of what forward or loss leaves for the loop, a number for its log: devices do not.

        A trace has no such lines, and the caller's own are not called.
        """
        with about_code():
            written = self.module.written_by_a_call()
        if written:
            warnings.warn(
                f"forward or loss writes {_joined(written)}, and devices do not bring that back: "
                "the loop reads what it was before the session. To have it, call them in the loop, "
                "under torch.no_grad(): loss(model(x), batch)",
                SplitWarning,
                stacklevel=5,
            )

    def required(self, batch: object, refresh: Callable[[], None] = lambda: None) -> object:
        """Return a batch as the trace has it: with tensors in the place of numbers that change.

        `refresh` gives the module the weights of now, with which a change of it is tried.

        Raises:
            InputError: it has other numbers or texts, or the module is another, where that counts;
                names the entry, or attribute, and both values.
        """
        from bigbrain_fx.frontend import with_numbers

        own = with_numbers(batch, self.numbers)
        self.module.require(own, refresh)
        if self.parts is not None:
            self.parts.look_at(own)
        self.batches.require(own)
        return own

    def require_autocast(self) -> None:
        """Refuse a step under a `torch.autocast` of the loop, which devices do not have.

        Raises:
            InputError: it is on here, and was not asked for.
        """
        import torch

        kinds = [kind for kind in ("cpu", "cuda") if torch.is_autocast_enabled(kind)]
        if kinds and self.autocast is None:
            kind = str(torch.get_autocast_dtype(kinds[0])).rpartition(".")[2]
            raise InputError(
                "the loop computes this step under torch.autocast, and the devices do not",
                code="BX3196",
                help=f"give machine(...) autocast={kind!r}, and call step() outside of the block",
            )


def _joined(names: Sequence[str]) -> str:
    """Return the first names; of a container and its items, the items."""
    items = [n for n in names if not any(o.startswith(f"{n[:-1]}[") for o in names)]
    others = f" and {len(items) - _SAID} others" if len(items) > _SAID else ""
    return f"{', '.join(items[:_SAID])}{others}"

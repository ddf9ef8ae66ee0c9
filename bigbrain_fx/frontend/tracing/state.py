"""Whether what forward leaves in plain attributes changes what the next forward computes.

    forward(x) ─▶ put back ─▶ forward(other), forward(x): the same numbers?
    weights moved: forward(x) ─▶ put back ─▶ forward(x): the same numbers?

A cache made at first use, or a loss that is kept for a look at it, changes nothing and is let be; a
hidden state, a counter that warms something up, a generator of its own would be a constant of the
trace. A cache of what the first weights give is one in plain PyTorch, and would not be in a trace.
This file runs steps; it knows no graphs.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor, nn

from bigbrain_fx.errors import BigBrainError, CaptureError
from bigbrain_fx.frontend.tracing.attributes import FORWARD_HOOKS, Attributes
from bigbrain_fx.frontend.tracing.counters import decision
from bigbrain_fx.frontend.tracing.dice import where_changed
from bigbrain_fx.frontend.tracing.hooks import WITHOUT_GRADIENT
from bigbrain_fx.frontend.tracing.plain import Numbers, Plain, alike, another
from bigbrain_fx.frontend.tracing.step import Step
from bigbrain_fx.frontend.translation.batch import Batch

_FIRST_CALL = (
    "only the first call changes it (a cache that is made or grows, what the first batch sets): "
    "let model() run the model once: def model(): made = Net(); made(example_batch()['x']); "
    "return made"
)


@dataclass(frozen=True)
class State:
    """What a look at a model's state needs: its step, how to run it, and the example."""

    step: Step
    plain: Plain
    batch: Batch

    def refusal(self) -> CaptureError | None:
        """Return why the attributes that moved cannot be constants; None when they can."""
        names = self.step.seen.moved
        if not names:
            return None
        example = list(self.batch.sized(self.batch.rows).values())
        with self._kept():
            before = self._look()
            try:
                first = self.plain.left(example, 0)
            except Exception:
                return None  # `trace` says what is wrong with the example
            after = self._look()
            moved = before.moved(after) or list(names)
            made = [name for name in moved if after.is_part(name)]
            if made or not self._same_later(before, first, example):
                return self._refused(made or moved, before, after, example)
            if self.step.trains and not self._same_when_trained(before, example):
                before.put_back()
                at = where_changed(lambda: self.plain.run(example, 0), before.watch(moved[0]))
                return _stale(moved, at)
        return None

    def _same_later(self, before: Attributes, first: Numbers, example: Sequence[Tensor]) -> bool:
        """Whether the example gives the same numbers after another batch, and much later."""
        before.put_back()
        try:
            self._another()
            again = self.plain.left(example, 0)
            if not alike(first, again):
                return False
            run = partial(self.plain.left, example, 0)
            if decision(run, run, (self.step.model, self.step.own_loss)) is not None:
                return False
        except Exception:
            return False  # it ran the first time
        return True

    def _same_when_trained(self, before: Attributes, example: Sequence[Tensor]) -> bool:
        """Whether what calls before have left gives, with other weights, what a first call does."""
        with other_weights(self.step.model):
            try:
                kept = self.plain.gradients(example, 0)
                before.put_back()
                return alike(kept, self.plain.gradients(example, 0))
            except Exception:
                return False  # it ran with the first weights

    def _another(self) -> None:
        """Run on another batch; where the model takes none that is made up, on the example."""
        rows = self.batch.rows
        try:
            self.plain.gradients(another(self.batch, rows, 1), 1)
        except Exception:
            self.plain.gradients(list(self.batch.sized(rows).values()), 1)

    def _refused(
        self, names: Sequence[str], before: Attributes, after: Attributes, example: Sequence[Tensor]
    ) -> CaptureError:
        before.put_back()
        name = names[0]
        at = where_changed(lambda: self.plain.run(example, 0), before.watch(name))
        before.put_back()
        settles = not after.is_part(name) and self._settles(example)
        before.put_back()
        said = f"before the first call: {before.said(name)}; after it: {after.said(name)}"
        more = f" (and {', '.join(names[1:4])})" if len(names) > 1 else ""
        return CaptureError(
            f"forward leaves {name}{more} for the next call where no state dict finds it, "
            "and what forward computes depends on it: a trace would keep what it is now for ever",
            code="BX0160e",
            at=at,
            notes=(said,) if before.said(name) != after.said(name) else (),
            help=_FIRST_CALL if settles else _remedy(name, after),
        )

    def _settles(self, example: Sequence[Tensor]) -> bool:
        """Whether a first call leaves what every later one finds: a cache that it makes longer."""
        try:
            first, second = self.plain.in_turn(example, self._look)
        except Exception:
            return False  # it ran once
        return not first.moved(second)

    def _look(self) -> Attributes:
        return Attributes.of(self.step.model, self.step.own_loss)

    @contextlib.contextmanager
    def _kept(self) -> Iterator[None]:
        before = self._look()
        self.step.watch.keeps = True
        try:
            yield
        finally:
            self.step.watch.keeps = False
            before.put_back()


@contextlib.contextmanager
def other_weights(model: nn.Module) -> Iterator[None]:
    """Move each trained weight a little in a direction of its own, as training does."""
    trained = [p for p in model.parameters() if p.requires_grad]
    before = [p.detach().clone() for p in trained]
    dice = torch.Generator().manual_seed(0)
    try:
        with torch.no_grad():
            for p in trained:
                noise = torch.randn(p.shape, generator=dice).to(p.dtype)
                p.add_(noise, alpha=0.05 * float(p.abs().mean().nan_to_num()) + 0.01)
        yield
    finally:
        with torch.no_grad():
            for p, numbers in zip(trained, before, strict=True):
                p.copy_(numbers)


def _stale(names: Sequence[str], at: str | None) -> CaptureError:
    """Refuse what is kept of the first weights: a trace computes it of those of each step."""
    last = names[0].rpartition(".")[2]
    return CaptureError(
        f"forward keeps {', '.join(names[:4])} from one call to the next, and what was "
        "made of the first weights is no longer what those of a later step would give",
        code="BX0160f",
        at=at,
        help="compute it in every forward, without the cache; or, where it is to stay as the first "
        f"weights make it, in __init__: self.register_buffer({last!r}, value.detach().clone())",
    )


def _remedy(name: str, after: Attributes) -> str:
    last = name.rpartition(".")[2]
    if last == "requires_grad":
        return WITHOUT_GRADIENT
    if after.is_part(name):
        return (
            "make parameters and modules in __init__, where an optimizer finds them; a weight that "
            "two modules share is tied there, too: self.b.weight = self.a.weight"
        )
    if last in FORWARD_HOOKS:
        return (
            "set hooks once: in __init__, or behind a flag that the first call sets (if not "
            "self.hooked: ...); one for a single call is removed there: handle.remove()"
        )
    if after.is_dice(name):
        return "draw with torch's global generator: torch.rand(...) without generator="
    if "." in name and name.rpartition(".")[0] not in after.paths:
        return (
            "let the model hold it in a buffer, register_buffer() in __init__, and write into it "
            "in place; or let the batch bring it: an entry of batches() with a number for each row"
        )
    scalar = after.is_number(name) or isinstance(after.value(name), bool)
    shape = "()" if scalar else "shape"
    many = (
        "" if after.is_tensor(name) else "keep its tensors and numbers in buffers, each of them: "
    )
    return (
        f"{many}self.register_buffer({last!r}, torch.zeros({shape})) in __init__, and write into "
        f"it in place: with torch.no_grad(): self.{last}.copy_(new); read it as a tensor "
        "(torch.where, not if). Where its shape has the rows of the batch: --micro-batches 1. What "
        "only a first call changes (a cache for longer texts): let model() run the model once"
    )


def unsure(names: Sequence[str]) -> str:
    """Say what a model without weights cannot be asked."""
    return (
        f"forward changes {', '.join(names[:3])}, which no state dict holds; without weights it "
        "cannot be tried whether the next call depends on that"
    )


def refuse_state(state: State, cause: BigBrainError | None = None) -> None:
    """Refuse a model that keeps state in plain attributes.

    Raises:
        CaptureError: names the attribute, and the line that writes it.
    """
    found = state.refusal()
    if found is not None:
        raise found from cause

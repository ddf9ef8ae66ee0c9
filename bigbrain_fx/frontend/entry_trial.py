"""Trial runs of a model on its example batch, with other values in some entries.

    {"x": ..., "phase": "warm"} ─▶ results          {"x": ..., "phase": "main"} ─▶ other results?

A large model runs without numbers: the calls of its ops are compared, not its results.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from torch import Tensor, nn

from bigbrain_fx.errors import InputError
from bigbrain_fx.frontend.tracing.dataflow import Calls, calls_of
from bigbrain_fx.frontend.tracing.plain import Numbers, Plain, alike
from bigbrain_fx.frontend.tracing.state.hidden_state import is_costly
from bigbrain_fx.frontend.tracing.step import Loss, Step, route
from bigbrain_fx.frontend.translation.batch import take_apart
from bigbrain_fx.frontend.translation.batch_dims import Key

NOTHING = object()


def with_value(batch: Any, key: Key, value: object) -> Any:  # noqa: ANN401  # a nest of any kind
    """Return a batch with another value at a key."""
    if not key:
        return value
    if isinstance(batch, Mapping) and value is NOTHING and len(key) == 1:
        return {name: own for name, own in batch.items() if name != key[0]}
    if isinstance(batch, Mapping):
        return {**batch, key[0]: with_value(batch.get(key[0]), key[1:], value)}
    parts = [with_value(v, key[1:], value) if i == key[0] else v for i, v in enumerate(batch)]
    return parts if isinstance(batch, list) else getattr(type(batch), "_make", tuple)(parts)


@dataclass(frozen=True)
class Trial:
    """A model and its example batch, in which other values are tried."""

    model: nn.Module
    example: object
    loss: Loss | None
    autocast: str | None

    @cached_property
    def first(self) -> Numbers:
        """Return the numbers of the example."""
        return self.run(self.example)

    @property
    def runs(self) -> bool:
        """Whether the model runs on its example."""
        try:
            self.first  # noqa: B018  # it is kept
        except Exception:  # the user's own code
            return False
        return True

    def run(self, batch: object) -> Numbers:
        """Run the model on a batch; return its results, their gradients, and its buffers."""
        plain, tensors = self.prepared(batch)
        return plain.left(list(tensors.values()), 0)

    def prepared(self, batch: object) -> tuple[Plain, dict[str, Tensor]]:
        """Return the step on a batch, and its tensors."""
        taken, how = take_apart(batch), route(self.model, batch, self.loss is not None)
        plain = Plain(Step(self.model, self.loss, taken, how), self.model, self.autocast)
        return plain, taken.sized(taken.rows)

    def with_values(self, values: Mapping[Key, object]) -> object:
        """Return the example with other values there."""
        batch = self.example
        for key, value in values.items():
            batch = with_value(batch, key, value)
        return batch

    def run_with(self, values: Mapping[Key, object]) -> Numbers:
        """Run the model on the example with other values there."""
        return self.run(self.with_values(values))

    def differs(self, values: Mapping[Key, object]) -> bool:
        """Whether the model computes something else with other values there."""
        return not alike(self.first, self.run_with(values))

    def reads(self, values: Mapping[Key, object]) -> bool:
        """Whether the model computes something else with other values there, or fails."""
        try:
            return self.differs(values)
        except InputError:  # an entry more, which forward does not take
            return False
        except Exception:  # the user's own code
            return True


@dataclass(frozen=True)
class FakeTrial(Trial):
    """A trial of a model of any size: what other values change is the calls of its ops."""

    @cached_property
    def calls(self) -> Calls:
        """Return the calls on the example."""
        return self._calls(self.example)

    @property
    def runs(self) -> bool:
        """Whether the model runs on its example, and reads no numbers of tensors."""
        try:
            self.calls  # noqa: B018  # it is kept
        except Exception:  # the user's own code
            return False
        return True

    def differs(self, values: Mapping[Key, object]) -> bool:
        """Whether the model calls other ops, or with others' results, with other values there."""
        return self.calls != self._calls(self.with_values(values))

    def _calls(self, batch: object) -> Calls:
        plain, tensors = self.prepared(batch)
        with plain.seeded(list(tensors.values()), 0):
            return calls_of(plain.step, self.model, self.loss, tensors)


def trial_of(model: nn.Module, example: object, loss: Loss | None, autocast: str | None) -> Trial:
    """Return a trial that takes seconds at most: without numbers, where a run of the model is long.

    Of a model whose Python reads numbers that one does not run.
    """
    taken = take_apart(example)
    is_large = is_costly(model, list(taken.sized(taken.rows).values()))
    return (FakeTrial if is_large else Trial)(model, example, loss, autocast)

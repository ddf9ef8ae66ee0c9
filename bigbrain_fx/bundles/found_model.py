"""A captured model, from a file or from memory, and how one in memory is trained: nouns only."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias

from bigbrain_fx.core import Graph, RuleTrial
from bigbrain_fx.emit import GENERATORS, Weights
from bigbrain_fx.frontend import CaptureSession, MicroBatchEffect
from bigbrain_fx.plan import Options, Source

if TYPE_CHECKING:
    from torch import Tensor, nn
    from torch.optim import Optimizer


Loss = Callable[..., object]
Rehearse = Callable[[Path, float], Mapping[str, object]]
IN_MEMORY = "__main__"  # what plans call the module that defined a model in memory


@dataclass(frozen=True)
class Recipe:
    """How a module in memory is trained, as a model file would say it.

    `optimizer` is one of the module's parameters, a function of named
    parameters, a torch class, or a `functools.partial` of one. None is torch's AdamW. Functions
    reach the devices as text: see `carried`. `loss_weight(batch)` is the number of elements that a
    batch's loss is a mean over, by which micro-batches weigh. `micro(batch, parts)` cuts a batch,
    where the caller is. Neither reaches the devices.
    `drop_last`, `batch_dims`, `pad` and `lengths` say how batches split. `seen` are batches that
    were read ahead: lengths that vary, and a smaller batch, are found in them. `sends_rates`: each
    batch of a session comes with the options of the caller's own optimizer.
    """

    optimizer: Callable[..., object] | Optimizer | None = None
    lr_scale: Callable[[int], float] | None = None
    scheduler: Callable[..., object] | None = None
    clip_norm: float | None = None
    autocast: str | None = None
    grad_scaler: bool | Mapping[str, float] | None = None
    loss_weight: Callable[[Any], object] | None = None
    micro: Callable[[Any, int], Any] | None = None
    leaves: tuple[str, ...] = ()
    drop_last: bool | None = None
    batch_dims: Mapping[str | int, int | str | None] = field(default_factory=dict)
    pad: Mapping[str | int, int | float] = field(default_factory=dict)
    lengths: tuple[int, ...] | None = None
    seen: Sequence[object] = ()
    sends_rates: bool = False


CompareLater: TypeAlias = Callable[[int, object], "MicroBatchEffect | None"]
"""Micro-batches and a batch of the caller's loop -> their effect, where it is another step."""


@dataclass(frozen=True)
class FoundModel:
    """A captured model, from a file or from memory.

    `parameters` counts trainable numbers, tied ones once; `capture_s` is 0 for a module in memory,
    and `session` none: it has `module` and `recipe`. `compare` runs a step on the example batch,
    whole and in so many micro-batches. `rehearse` trains a bundle beside the user's loop for at
    most so many seconds: see `verification.rehearsed`; None where nothing is compared. `constants`
    are tensors of this process that a module in memory or its loss reads, by their names in the
    graph. `compare_later` does as `compare` on a batch of a loop that is under way.
    """

    graph: Graph
    source: Source
    weights: Weights
    warnings: tuple[str, ...]
    parameters: int
    capture_s: float = 0.0
    session: CaptureSession | None = None
    module: nn.Module | None = None
    recipe: Recipe | None = None
    device_lines: tuple[str, ...] = ()
    compare: Callable[[int], MicroBatchEffect] = MicroBatchEffect
    compare_later: CompareLater | None = None
    rehearse: Rehearse | None = None
    constants: Mapping[str, Tensor] = field(default_factory=dict)

    @property
    def extras(self) -> tuple[str, ...]:
        """Return extras of a bundle, since the model file's `batches` may draw random numbers."""
        may_draw = self.session is None or self.session.facts.has_generators
        return (GENERATORS,) if self.source.has_batches and may_draw else ()

    def try_rules(self, trials: Sequence[RuleTrial]) -> list[str | None]:
        """Run trials of rules where torch is; return for each why it failed, or None."""
        if self.session is not None:
            return self.session.try_rules(trials)
        from bigbrain_fx.frontend import try_rule

        return [try_rule(trial) for trial in trials]


def other_rows(graph: Graph, options: Options) -> int | None:
    """Return the rows to trace again with, when a trace of fixed size has others than asked for."""
    count = options.micro_batches or sum(options.replica_shares) or options.replicas
    if graph.static_batch is None or count is None or count < 1 or graph.batch % count:
        return None
    rows = graph.batch // count
    return rows if rows != graph.static_batch else None

"""Rounds of runs -> profiles: watched runs and whole steps taken in turn, averaged by signature.

This file knows what to run and how to average; it knows no files.
"""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass, field

from bigbrain_fx.core import Op
from bigbrain_fx.costs import OpProfile, Signature, signatures
from bigbrain_fx.frontend import without_gc
from bigbrain_fx.measure.ops.context import Timed, overheads, timed_step, whole_step_s
from bigbrain_fx.measure.ops.stopwatch import Stopwatch
from bigbrain_fx.measure.ops.subject import Subject

WARM_UP = 2
_CUT = 0.1  # share of the samples left out at either end: other processes disturb some


@dataclass
class Rounds:
    """Measurements so far.

    Attributes:
        whole_s: of whole steps, unwatched. full, frozen: of watched ones, the latter without
            gradients of parameters.
    """

    subject: Subject
    watch: Stopwatch
    whole_s: list[float] = field(default_factory=list)
    full: list[Timed] = field(default_factory=list)
    frozen: list[Timed] = field(default_factory=list)

    def warm_up(self) -> None:
        """Run a few steps that do not count."""
        for _ in range(WARM_UP):
            whole_step_s(self.subject, self.watch)

    def again(self) -> None:
        """Take one round: a whole step, a watched one, and a watched one of frozen parameters."""
        with without_gc():
            costs = overheads(self.watch)
            whole_step_s(self.subject, self.watch)  # not counted: the caches are the chain's
            self.whole_s.append(whole_step_s(self.subject, self.watch))
            self.full.append(timed_step(self.subject, self.watch, costs))
            if self.subject.trained:
                self.frozen.append(timed_step(self.subject, self.watch, costs, frozen=True))

    def profiles(self) -> tuple[OpProfile, ...]:
        """Return the profile of every signature in the graph, in the order of their first op."""
        ops: dict[str, list[Op]] = {}
        signed: dict[str, Signature] = {}
        for op, signature in signatures(self.subject.graph):
            ops.setdefault(signature.key, []).append(op)
            signed.setdefault(signature.key, signature)
        return tuple(self._profile(signed[key], same) for key, same in ops.items())

    def _profile(self, signature: Signature, ops: Sequence[Op]) -> OpProfile:
        ids = [id(op) for op in ops]
        forward_s = [run.forward_s[i] for run in self.full for i in ids]
        nodes_s = [run.nodes_s[i] for run in self.full for i in ids]
        sums_s = [run.sums_s[i] for run in self.full for i in ids]
        input_s = backward_s = 0.0
        if signature.wants_backward:
            input_s = node_s = _positive(trimmed_mean(nodes_s))
            backward_s = node_s + _positive(trimmed_mean(sums_s))
            if any(t.is_parameter and t.wants_grad for t in signature.tensors):
                alone_s = [run.nodes_s[i] for run in self.frozen for i in ids]
                input_s = min(node_s, _positive(trimmed_mean(alone_s)))
        totals_s = [sum(parts) for parts in zip(forward_s, nodes_s, sums_s, strict=True)]
        first = ops[0]
        return OpProfile(
            signature=signature,
            forward_s=_positive(trimmed_mean(forward_s)),
            backward_input_s=input_s,
            backward_weight_s=backward_s - input_s,
            spread=relative_spread(totals_s),
            samples=len(forward_s),
            flops=int(first.flops),
            reads_bytes=int(first.reads_bytes),
            writes_bytes=int(first.writes_bytes),
        )

    @property
    def step_s(self) -> float:
        """Seconds of a whole step."""
        return trimmed_mean(self.whole_s)

    @property
    def ops_s(self) -> float:
        """Seconds of all ops, added up from their profiles."""
        found = {profile.signature.key: profile.total_s for profile in self.profiles()}
        return sum(found[signature.key] for _, signature in signatures(self.subject.graph))


def trimmed_mean(samples: Sequence[float]) -> float:
    """Return the mean without the largest and the smallest tenth.

    Other than medians, means of parts add up to the mean of the whole.
    """
    ordered = sorted(samples)
    cut = int(len(ordered) * _CUT)
    return statistics.fmean(ordered[cut : len(ordered) - cut])


def relative_spread(samples: Sequence[float]) -> float:
    """Return the interquartile range over the median; 0.0 for fewer than two samples."""
    if len(samples) < 2:
        return 0.0
    low, middle, high = statistics.quantiles(samples, n=4)
    return (high - low) / middle if middle > 0 else 0.0


def _positive(seconds: float) -> float:
    return max(0.0, seconds)  # nothing took less than the clock and the hook do

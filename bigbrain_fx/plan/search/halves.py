"""The best trials of whole backwards -> the same lines with backwards in two halves, to be tried.

    1f1b on d0, d1, 4 micro-batches ──▶ zb-h1 and a searched order for its cut, zb-v for its line

To play such a schedule takes much longer than one of whole backwards, so it is looked at for few
cuts: the best as they are. It knows trials and scores; it makes no plan and simulates nothing.

Source: Qi et al., "Zero Bubble Pipeline Parallelism", ICLR 2024; "Pipeline Parallelism with
Controllable Memory", NeurIPS 2024.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace

from bigbrain_fx.plan.search.nouns import Trial
from bigbrain_fx.plan.search.ranking import Scored

NEAR = 1.35
"""Times the best step: what is idle is all that a split backward can fill."""


def halved(scored: Sequence[Scored], schedules: Mapping[str, bool], most: int) -> Iterator[Trial]:
    """Yield trials with split backwards, of the best for each number of micro-batches.

    Args:
        scored: what was simulated, the best first.
        schedules: of split backwards, by name; whether one is for lines only.
        most: lines for each number of micro-batches.
    """
    left: dict[int, int] = {}
    seen: set[tuple[object, ...]] = set()
    for each in scored:
        trial, score = each.trial, each.score
        micro, key = trial.micro_batches, (trial.micro_batches, score.devices, trial.recompute)
        is_far = len(score.devices) == 1 or score.step_s > NEAR * scored[0].score.step_s
        if is_far or key in seen or left.setdefault(micro, most) == 0:
            continue
        seen.add(key)
        left[micro] -= 1
        for schedule, of_lines in schedules.items():
            if score.is_chain or not of_lines:
                yield replace(trial, schedule=schedule, in_flight=None)

"""A plan with groups -> the same, or one that divides the sequence between its sums, too.

Nobody has to ask for it: it gives the same numbers to rounding as the plan without, and it is taken
where its forecast is faster, or where only it fits. This file knows plans; it makes none itself.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

from bigbrain_fx.core import Axis, Graph
from bigbrain_fx.errors import InputError, NoPlanError
from bigbrain_fx.plan.fastest import least_gap
from bigbrain_fx.plan.nouns import Options, Plan
from bigbrain_fx.plan.tensor.asked import named_axes, wanted_axes, with_sequence
from bigbrain_fx.plan.tensor.choices import step_with

Make = Callable[[tuple[Axis, ...]], Plan]


def sequenced(plan: Plan, every: Sequence[Axis], make: Make) -> Plan:
    """Return a plan, or one that divides the sequence, too, where its forecast is faster.

    By more than forecasts can tell apart: the plan without is the simpler one.

    Args:
        plan: with groups.
        every: axes of its graph that may be divided.
        make: plans the same groups with other axes.
    """
    tensor = plan.placement.tensor
    assert tensor is not None
    axes = with_sequence(plan.graph, every, tensor.axes, tensor.members)
    if len(axes) == len(tensor.axes):
        return plan
    enough_s = plan.forecast.step_s * (1 - least_gap(plan.cluster))
    try:
        if step_with(plan, axes) >= enough_s:
            return plan
        other = make(axes)
    except (InputError, NoPlanError):
        return plan
    return other if other.forecast.step_s < enough_s else plan


def grouped_plan(graph: Graph, options: Options, make: Callable[[Options], Plan]) -> Plan:
    """Plan groups of a number; where no axes were named, with the sequence divided if that pays.

    Raises:
        NoPlanError: nothing fits in memory, the sequence divided or not.
        InputError: as `make` does.
    """
    if options.tensor_axes or options.tensor_tried:
        return make(options)
    every = named_axes(graph, options)

    def again(axes: tuple[Axis, ...]) -> Plan:
        return make(replace(options, tensor_tried=axes))

    try:
        plan = make(options)
    except NoPlanError:
        chosen = wanted_axes(graph, options)
        axes = with_sequence(graph, every, chosen, options.tensor or 1)
        if len(axes) == len(chosen):
            raise
        return again(axes)
    return sequenced(plan, every, again) if plan.placement.tensor is not None else plan

"""The time between steps once a pipeline runs: no device waits for others between two steps.

`Forecast.step_s` is the time of one step from a standing start to the last device's end. A device
that is done earlier begins the next step at once, so that in the long run a step takes no longer
than that, and less where the device that ends last is not the one that begins.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from bigbrain_fx.core import Costs, Instruction, OptimizerStep, Program
from bigbrain_fx.plan import Plan
from bigbrain_fx.plan.schedule import StageCosts, stage_costs
from bigbrain_fx.plan.simulate.clock import execute

STEPS = 4


def step_s(plan: Plan, of_ops: Costs) -> float:
    """Simulate one step, as a forecast does; return its seconds."""
    costs = stage_costs(plan.graph.at(plan.rows), plan.stages, of_ops)
    return execute(plan.programs, plan.stages, costs).step_s


def steady_s(plan: Plan, of_ops: Costs, steps: int = STEPS) -> float:
    """Simulate some steps in a row; return what the last one adds, in seconds."""
    costs = stage_costs(plan.graph.at(plan.rows), plan.stages, of_ops)
    costs = replace(costs, optimizer_s=_with_beginnings(costs))
    ends_s = [
        execute(_in_a_row(plan, count), plan.stages, costs).step_s for count in (steps - 1, steps)
    ]
    return ends_s[1] - ends_s[0]


def _with_beginnings(costs: StageCosts) -> Mapping[str, float]:
    """Charge the beginning of a step to the end of the one before: the clock counts one only."""
    devices = costs.cluster.device
    return {d: s + devices[d].overheads.step_s for d, s in costs.optimizer_s.items()}


def _in_a_row(plan: Plan, steps: int) -> tuple[Program, ...]:
    return tuple(
        replace(
            program,
            instructions=tuple(
                _later(instruction, step, plan.micro_batches)
                for step in range(steps)
                for instruction in program.instructions
            ),
        )
        for program in plan.programs
    )


def _later(instruction: Instruction, step: int, micro_batches: int) -> Instruction:
    """Number messages on: each has its own number; those once a step count below zero."""
    if isinstance(instruction, OptimizerStep) or step == 0:
        return instruction
    micro = instruction.micro
    return replace(instruction, micro=-step if micro is None else micro + step * micro_batches)

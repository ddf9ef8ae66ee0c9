"""Print programs as a table, devices x position, with the bad cells marked.

    d0  @0 |  F0.0   s0>1.0   F0.1   s0>1.1 [r1>0.0]  B0.0  ...

F, B and W are forward, backward and backward of weights of stage.micro; s and r send and receive
over an edge source>target; once-a-step messages have no micro. It knows nothing of what the faults
mean.
"""

from __future__ import annotations

from collections.abc import Iterable

from bigbrain_fx.core import (
    Backward,
    BackwardWeight,
    Forward,
    Instruction,
    OptimizerStep,
    Program,
    Recv,
    Send,
)
from bigbrain_fx.plan.schedule.faults import Finding

WINDOW = 9  # cells of one row


def table(programs: Iterable[Program], findings: Iterable[Finding] = ()) -> str:
    """Return one row per device; long programs show the surroundings of their first bad cell."""
    bad: dict[str, list[int]] = {}
    for finding in findings:
        for device, position in finding.cells:
            bad.setdefault(device, []).append(position)
    rows = [_row(program, bad.get(program.device, [])) for program in programs]
    names = max((len(name) for name, _, _ in rows), default=0)
    starts = max((len(start) for _, start, _ in rows), default=0)
    columns = max((len(cells) for _, _, cells in rows), default=0)
    widths = [max(len(cells[i]) for _, _, cells in rows if i < len(cells)) for i in range(columns)]
    return "\n".join(
        f"{name:<{names}} {start:>{starts}} | "
        + " ".join(f"{cell:^{width}}" for cell, width in zip(cells, widths, strict=False)).rstrip()
        for name, start, cells in rows
    )


def _row(program: Program, bad: list[int]) -> tuple[str, str, list[str]]:
    """Return the device, where its row starts, and its cells."""
    count = len(program.instructions)
    first = max(0, min(min(bad, default=0) - WINDOW // 2, count - WINDOW))
    cells = [
        f"[{cell(program.instructions[i])}]" if i in bad else f" {cell(program.instructions[i])} "
        for i in range(first, min(count, first + WINDOW))
    ]
    return program.device, f"@{first}", [*cells, "..."] if first + WINDOW < count else cells


def cell(instruction: Instruction) -> str:
    """Return an instruction in a few letters."""
    match instruction:
        case Forward(stage, micro):
            return f"F{stage}.{micro}"
        case Backward(stage, micro):
            return f"B{stage}.{micro}"
        case BackwardWeight(stage, micro):
            return f"W{stage}.{micro}"
        case Send(edge, micro) | Recv(edge, micro):
            which = "" if micro is None else f".{micro}"
            return f"{instruction.do[0]}{edge.source}>{edge.target}{which}"
        case OptimizerStep():
            return "step"

"""Plan -> Explanation: what each device runs, and why each cut is where it is and not one block further.

For every cut of a chain the plan is made again with one block more on either side, and the forecasts are
compared. This room decides nothing and knows no terminal.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from bigbrain_fx.core import Placement, Stage
from bigbrain_fx.errors import BigBrainError
from bigbrain_fx.plan import Plan, with_placement


@dataclass(frozen=True)
class DevicePart:
    """One device's part: its modules (first to last), and the forecast."""

    device: str
    stages: tuple[int, ...]
    modules: str
    ops: int
    busy_s: float
    idle_s: float
    peak_bytes: int
    memory_bytes: int


@dataclass(frozen=True)
class Alternative:
    """The same plan with one block moved over a cut: its forecast, or why it is none."""

    block: str
    to_device: str
    step_s: float | None
    reason: str = ""


@dataclass(frozen=True)
class Cut:
    """One place where tensors cross: between which stages, how many bytes a micro-batch, and why here."""

    source: int
    target: int
    after: str
    values: tuple[str, ...]
    nbytes: int
    transfer_s: float
    alternatives: tuple[Alternative, ...]


@dataclass(frozen=True)
class Explanation:
    """A plan in words and numbers."""

    step_s: float
    devices: tuple[DevicePart, ...]
    cuts: tuple[Cut, ...]

    def __str__(self) -> str:
        lines = [f"forecast {self.step_s:.4f} s a step"]
        for part in self.devices:
            lines.append(
                f"  {part.device}: {part.modules} ({part.ops} ops); busy {part.busy_s:.4f} s, idle {part.idle_s:.4f} s; "
                f"memory {_mib(part.peak_bytes)} of {_mib(part.memory_bytes)}"
            )
        for cut in self.cuts:
            lines.append(
                f"  cut {cut.source} -> {cut.target} after {cut.after}: {cut.nbytes / 2**10:.1f} KiB a micro-batch "
                f"({', '.join(cut.values)}), {cut.transfer_s * 1e3:.2f} ms each way"
            )
            lines += [f"    {line}" for line in map(self.compare, cut.alternatives)]
        return "\n".join(lines)

    def compare(self, other: Alternative) -> str:
        """Say what moving a block would change."""
        if other.step_s is None:
            return f"not {other.block} on {other.to_device}: {other.reason}"
        change = 100 * (other.step_s / self.step_s - 1)
        return f"with {other.block} on {other.to_device}: {other.step_s:.4f} s ({change:+.1f} %)"


def explain(plan: Plan) -> Explanation:
    """Explain a plan: the parts, and for each cut of a chain the neighbours it was chosen over."""
    parts = tuple(_part(plan, device) for device in plan.stages.devices)
    pairs = {(e.source, e.target) for e in plan.stages.edges if e.kind == "activation" and not plan.stages.is_local(e)}
    return Explanation(plan.forecast.step_s, parts, tuple(_cut(plan, a, b) for a, b in sorted(pairs)))


def _part(plan: Plan, device: str) -> DevicePart:
    stages = plan.stages.of(device)
    names = [block for stage in stages for block in _blocks(plan, stage)]
    entry = plan.forecast.of(device)
    return DevicePart(
        device,
        tuple(stage.index for stage in stages),
        f"{names[0]} to {names[-1]}" if len(names) > 1 else "".join(names),
        sum(len(stage.ops) for stage in stages),
        entry.busy_s,
        entry.idle_s,
        entry.peak_bytes,
        plan.cluster.device[device].memory_bytes,
    )


def _cut(plan: Plan, source: int, target: int) -> Cut:
    edges = [e for e in plan.stages.edges if e.kind == "activation" and (e.source, e.target) == (source, target)]
    nbytes = sum(edge.nbytes for edge in edges)
    a, b = plan.stages.stages[source], plan.stages.stages[target]
    link = plan.cluster.link(a.device, b.device)
    moves = _alternatives(plan, a, b) if plan.stages.is_chain and target == source + 1 else ()
    values = tuple(edge.value for edge in edges)
    after = (_blocks(plan, a) or ["the inputs"])[-1]
    return Cut(source, target, after, values, nbytes, link.transfer_s(nbytes), moves)


def _alternatives(plan: Plan, a: Stage, b: Stage) -> tuple[Alternative, ...]:
    last, first = _blocks(plan, a)[-1:], _blocks(plan, b)[:1]
    forward = [_moved(plan, a, block, b.device) for block in last if len(_blocks(plan, a)) > 1]
    backward = [_moved(plan, b, block, a.device) for block in first if len(_blocks(plan, b)) > 1]
    return (*forward, *backward)


def _moved(plan: Plan, stage: Stage, block: str, device: str) -> Alternative:
    ops = [name for name in stage.ops if _block_of(plan, name) == block]
    placement = Placement({**plan.placement.device_of, **dict.fromkeys(ops, device)})
    try:
        return Alternative(block, device, with_placement(plan, placement).forecast.step_s)
    except BigBrainError as error:
        return Alternative(block, device, None, error.what)


def _blocks(plan: Plan, stage: Stage) -> list[str]:
    """Return the top-level modules of a stage in order, numbered layers one by one."""
    own: Sequence[str] = [name for name in stage.ops if name not in stage.recomputed]
    return [block for block in dict.fromkeys(_block_of(plan, name) for name in own) if block]


def _block_of(plan: Plan, op: str) -> str:
    parts = plan.graph.op[op].module_path.split(".")
    numbered = next((i for i, part in enumerate(parts) if part.isdigit()), 0)
    return ".".join(parts[: numbered + 1])


def _mib(count: int) -> str:
    return f"{count / 2**20:.0f} MiB"

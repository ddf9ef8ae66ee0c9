"""Bundles -> measured steps: run in turns, so that what else the host does meets all of them.

Round 1 goes from the first to the last, round 2 back again. It knows no graphs and no planning.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np

from bigbrain_fx.bundles import Run, RunOptions, run
from bigbrain_fx.errors import BigBrainError
from bigbrain_fx.measure.comparison.agreement import (
    HALF_ROUNDING,
    ROUNDING,
    Agreement,
    Numbers,
    agreement,
)
from bigbrain_fx.measure.comparison.contender import Contender
from bigbrain_fx.plan import Plan
from bigbrain_fx.weights import Scratch

Runner = Callable[[Path, RunOptions], Run]
"""How a bundle is run: `launch.run` here; the `run` of an emulated network elsewhere."""

HALVES = {"bfloat16", "float16"}
DTYPES: Mapping[str, np.dtype[Any]] = {  # of safetensors; others are compared as bytes
    "F64": np.dtype(np.float64),
    "F32": np.dtype(np.float32),
    "F16": np.dtype(np.float16),
    "I64": np.dtype(np.int64),
    "I32": np.dtype(np.int32),
    "BOOL": np.dtype(np.bool_),
}


@dataclass(frozen=True)
class Turns:
    """Contenders with what they were measured to take, and whether they computed the same."""

    contenders: Sequence[Contender]
    agreements: tuple[Agreement, ...] = ()


@dataclass
class _Record:
    """Observations of one contender: `computed` has the arrays of each round."""

    contender: Contender
    computed: list[Sequence[Numbers]] = field(default_factory=list)


def in_turns(
    contenders: Sequence[Contender],
    steps: int,
    rounds: int,
    say: Callable[[str], None],
    runner: Runner = run,
) -> Turns:
    """Run each contender's bundle for so many steps in each round; who fails is not run again."""
    records = [_Record(contender) for contender in contenders]
    for number in range(rounds):
        for record in records if number % 2 == 0 else reversed(records):
            if record.contender.plan is not None and not record.contender.reason:
                say(f"round {number + 1} of {rounds}: running {record.contender.name}")
                _run_once(record, steps, runner)
    return Turns([record.contender for record in records], tuple(_agreements(records)))


def _run_once(record: _Record, steps: int, runner: Runner) -> None:
    with Scratch("turn") as scratch:
        plan, outputs = record.contender.plan, Path(scratch) / "outputs"
        assert plan is not None
        options = RunOptions(steps=steps, logs=Path(scratch) / "logs")
        if plan.mode == "eval":
            options = replace(options, outputs=outputs)
        try:
            done = runner(Path(record.contender.bundle), options)
        except BigBrainError as error:
            said = f" ({'; '.join(error.notes[-2:])})" if error.notes else ""
            reason = f"its bundle did not run: {error.what}{said}"
            record.contender = replace(
                record.contender, reason=reason, help=error.help or "", code=error.code
            )
            return
        computed = _losses(done) if plan.mode == "train" else _outputs(outputs)
    record.computed.append(computed)
    record.contender = _measured(record.contender, done)


def _measured(before: Contender, done: Run) -> Contender:
    """Add a round's steps but the first, which also allocates and starts threads."""
    took = [line.step_s for line in done.steps] or [line.batch_s for line in done.batches]
    peaks = {**done.max_rss_bytes}
    for device, nbytes in before.max_rss_bytes:
        peaks[device] = max(nbytes, peaks.get(device, 0))
    return replace(
        before,
        steps_s=(*before.steps_s, *took[1:]),
        losses=before.losses or tuple(line.loss for line in done.steps),
        max_rss_bytes=tuple(peaks.items()),
    )


def _losses(done: Run) -> list[Numbers]:
    return [np.array([line.loss for line in done.steps])]


def _outputs(folder: Path) -> list[Numbers]:
    """Read the outputs of every batch, in order; 16-bit floats are widened."""
    from safetensors import deserialize

    found = []
    for path in sorted(folder.glob("*.safetensors")):
        for _, entry in sorted(deserialize(path.read_bytes())):  # type: ignore[no-untyped-call]
            found.append(_array(entry["dtype"], bytes(entry["data"])))
    return found


def _array(dtype: str, data: bytes) -> Numbers:
    """Return the numbers of a tensor in a row; numpy has no bfloat16."""
    if dtype == "BF16":
        return (np.frombuffer(data, np.uint16).astype(np.uint32) << 16).view(np.float32)
    return np.frombuffer(data, DTYPES.get(dtype, np.dtype(np.uint8)))


def _agreements(records: Sequence[_Record]) -> list[Agreement]:
    """Compare each with the first that has equal micro-batches, or else with the first of all."""
    found: list[Agreement] = []
    ran = [record for record in records if record.computed]
    for place, record in enumerate(ran):
        found += _with_itself(record)
        same = [other for other in ran[:place] if _split(other) == _split(record)]
        for other in (same or ran[:place])[:1]:
            pair = (other.contender.name, record.contender.name)
            found.append(_agreement(pair, other, record, bool(same)))
    return found


def _with_itself(record: _Record) -> list[Agreement]:
    """Say so where a contender's rounds differ: a bundle is to do the same each time."""
    name, first = record.contender.name, record.computed[0]
    again = [
        agreement((name, f"{name} again"), first, later, _rounding(record), True)
        for later in record.computed[1:]
    ]
    return [one for one in again if one.kind != "bitwise"]


def _agreement(pair: tuple[str, str], ours: _Record, theirs: _Record, alike: bool) -> Agreement:
    return agreement(pair, ours.computed[0], theirs.computed[0], _rounding(ours), alike)


def _split(record: _Record) -> int:
    return _plan_of(record).micro_batches


def _rounding(record: _Record) -> float:
    ops = _plan_of(record).graph.ops
    half = any(spec.dtype in HALVES for op in ops for spec in op.outputs)
    return HALF_ROUNDING if half else ROUNDING


def _plan_of(record: _Record) -> Plan:
    assert record.contender.plan is not None
    return record.contender.plan

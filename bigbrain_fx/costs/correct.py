"""A few ops that were measured on a new device -> a base model of op times, corrected for it.

A device has one factor, and a smaller one for each family of ops: the mean logarithm of measured
over forecast. Each is drawn towards the base as if some more times had been as forecast. Where
nothing was measured, the base stays with the device's factor. Factors that grow with sizes and
Gaussian processes over sizes were tried at 5 to 40 ops (tools/studies/few_ops). Medians came a
little nearer, sums of models were farther off.
"""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from pathlib import Path

import numpy as np

from bigbrain_fx.costs.fit import Row, is_measured, optimizer_of, seconds_of, work_of
from bigbrain_fx.costs.model import SHIPPED, Correction, CostModel, family, read_model, write_model
from bigbrain_fx.costs.profiles import Machine, ProfileStore
from bigbrain_fx.errors import InputError

FEWEST = 5
"""Ops: of fewer, one that is unlike the others decides."""
OF_DEVICE, OF_FAMILY = 5, 2
"""Times that count as forecast, for the device and for each family; 2 and 1 were farther off (tried
on the CPUs of tools/studies/few_ops, so these are not held out)."""


@dataclass(frozen=True)
class CorrectionReport:
    """A corrected base, and its error on the ops that were measured.

    `before` and `after` are medians of |forecast / measured - 1|; after: each op forecast by a
    correction that did not see it.
    """

    model: CostModel
    machine: str
    ops: int
    before: float
    after: float


@dataclass(frozen=True)
class OffBy:
    """One measured time: log2 of it over what the base says."""

    op: str
    family: str
    log_factor: float


def correct_file(profiles: Path, base: str, out: Path) -> CorrectionReport:
    """Correct a base (a file of `bigbrain-fx fit`, or "shipped") by a database; write it.

    Raises:
        InputError: no such files, a base of another version or kind of device, or profiles that
            are too few, of several devices, or unknown to the base.
    """
    known = read_model(SHIPPED if base == "shipped" else Path(base))
    report = correct(known, ProfileStore(profiles, read_only=True).rows())
    write_model(report.model, out)
    return report


def correct(base: CostModel, rows: Sequence[Row]) -> CorrectionReport:
    """Correct a base by what was measured on one device."""
    machine = _only_machine(rows)
    found = offsets(base, rows)
    _require_known(base, found)
    own = correction(found)
    changed: dict[str, object] = {"correction": _sum(base.correction, own)}
    if machine.knows_optimizer:
        touches, launches = optimizer_of([machine])
        changed |= {"optimizer_touches": touches, "optimizer_launches": launches}
    before = statistics.median(abs(2.0**-each.log_factor - 1.0) for each in found)
    after = statistics.median(_left_out(found))
    model = base.model_copy(update=changed)
    return CorrectionReport(model, machine.key, len({each.op for each in found}), before, after)


def offsets(base: CostModel, rows: Sequence[Row]) -> list[OffBy]:
    """Return what every measured time is off by; of phases that the base knows."""
    found: list[OffBy] = []
    for phase in base.phases:
        timed = [row for row in rows if is_measured(row[1], phase)]
        for machine in dict.fromkeys(machine for machine, _ in timed):
            own = [profile for where, profile in timed if where == machine]
            said = base.seconds(phase, [work_of(profile) for profile in own], machine)
            real = [seconds_of(profile, phase) for profile in own]
            logs = np.log2(np.array(real) / said)
            found += [
                OffBy(p.signature.key, family(p.signature.target), float(log))
                for p, log in zip(own, logs, strict=True)
            ]
    return found


def correction(found: Sequence[OffBy]) -> Correction:
    """Return the device's factor, and what families are off by besides."""
    general = sum(each.log_factor for each in found) / (len(found) + OF_DEVICE)
    rest: dict[str, list[float]] = {}
    for each in found:
        rest.setdefault(each.family, []).append(each.log_factor - general)
    families = {name: sum(logs) / (len(logs) + OF_FAMILY) for name, logs in sorted(rest.items())}
    return Correction(device=general, families=families)


def _left_out(found: Sequence[OffBy]) -> list[float]:
    by_op: dict[str, list[OffBy]] = {}
    for each in found:
        by_op.setdefault(each.op, []).append(each)
    errors: list[float] = []
    for op, own in by_op.items():
        seen = correction(list(chain(*(times for key, times in by_op.items() if key != op))))
        errors += [abs(2.0 ** (seen.of(each.family) - each.log_factor) - 1.0) for each in own]
    return errors


def _sum(one: Correction, other: Correction) -> Correction:
    """Return the correction of a base that was corrected before."""
    names = sorted({*one.families, *other.families})
    both: Mapping[str, float] = {
        name: one.families.get(name, 0.0) + other.families.get(name, 0.0) for name in names
    }
    return Correction(device=one.device + other.device, families=both)


def _only_machine(rows: Sequence[Row]) -> Machine:
    machines = {machine.key: machine for machine, _ in rows}
    if len(machines) != 1:
        raise InputError(
            f"a base is corrected for one device, found profiles of {len(machines)}",
            code="BX1450",
            notes=tuple(sorted(machines)),
            help="profile the new device into a database of its own; "
            "without --base a model is fitted to all of them",
        )
    return next(iter(machines.values()))


def _require_known(base: CostModel, found: Sequence[OffBy]) -> None:
    ops = {each.op for each in found if each.family in base.families}
    if found and not ops:
        names = ", ".join(sorted({each.family for each in found}))
        raise InputError(
            f"the base knows none of the ops that were profiled: {names}",
            code="BX1451",
            notes=(f"it knows {', '.join(base.families)}",),
            help="profile a model of such ops too: bigbrain-fx profile model.py",
        )
    if len(ops) < FEWEST:
        raise InputError(
            f"expected at least {FEWEST} measured ops that the base knows, found {len(ops)}",
            code="BX1452",
            help="profile a model, or more of them: bigbrain-fx profile model.py",
        )

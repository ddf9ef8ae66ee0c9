"""Several jobs on one cluster -> a plan for each, together, against one after the other.

The partitioner "auto" finds the step of a job on some devices. Devices of one host are as slow as
they are while the other jobs compute there, too. The module knows no files and no processes.

Source of the question: Mohan et al., Synergy (OSDI 2022), where jobs get shares of processors and
memory; here devices are given whole.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import chain
from typing import TYPE_CHECKING

from bigbrain_fx.core import Cluster, Graph, Host
from bigbrain_fx.errors import InputError, NoPlanError
from bigbrain_fx.plan.dividing import Divided, Names, divide
from bigbrain_fx.plan.making import make_plan
from bigbrain_fx.plan.nouns import Options, Plan, Source
from bigbrain_fx.plan.one import counts, estimated, more_counts
from bigbrain_fx.planning import crowded

if TYPE_CHECKING:
    from bigbrain_fx.planning import Array

MOST_PRICES = 96
"""Plans that `pack` makes at most, about: beyond it, divisions are climbed instead of counted."""
MOST_NOTES = 3


@dataclass(frozen=True)
class PackJob:
    """A model to be run for so many steps; `options` are for the partitioner "auto"."""

    name: str
    graph: Graph
    source: Source
    options: Options
    steps: int


@dataclass(frozen=True)
class PackedJob:
    """Devices of a job, its times there, and its times with every device to itself."""

    name: str
    steps: int
    plan: Plan
    alone: Plan

    @property
    def ends_s(self) -> float:
        """Seconds until it ends, beside the others."""
        return self.steps * self.plan.forecast.step_s

    @property
    def alone_s(self) -> float:
        """Seconds that it takes when it has the cluster."""
        return self.steps * self.alone.forecast.step_s


@dataclass(frozen=True)
class Packing:
    """Division of devices among jobs, forecast.

    Attributes:
        jobs: in the order they were given.
        bound_s: no division, and no order of running one after another, ends before this.
        is_exact: every division was looked at; else the best of those on the way.
    """

    jobs: tuple[PackedJob, ...]
    bound_s: float
    is_exact: bool
    looked_at: int

    @property
    def last_s(self) -> float:
        """When the last job ends."""
        return max(job.ends_s for job in self.jobs)

    @property
    def mean_s(self) -> float:
        """When a job ends, on average."""
        return sum(job.ends_s for job in self.jobs) / len(self.jobs)

    @property
    def in_turn_last_s(self) -> float:
        """When the last job ends where they run one after another, each with every device."""
        return sum(job.alone_s for job in self.jobs)

    @property
    def in_turn_mean_s(self) -> float:
        """When a job ends on average there, the shortest first, which is the best order."""
        each = sorted(job.alone_s for job in self.jobs)
        return sum(s * (len(each) - n) for n, s in enumerate(each)) / len(each)


def pack(jobs: Sequence[PackJob], cluster: Cluster, most_prices: int = MOST_PRICES) -> Packing:
    """Give each job devices of its own, so that the last one ends as early as can be.

    Raises:
        NoPlanError: a job does not fit on the whole cluster, or they do not fit together; the
            arithmetic.
        InputError: there are fewer devices than jobs, or the cluster file fixes replicas.
    """
    _require_possible(jobs, cluster)
    plans = _Plans(jobs, cluster)
    every = tuple(d.name for d in cluster.devices)
    for number, job in enumerate(jobs):
        _require_alone(job, plans.of(number, every, ()))
    found = divide(cluster, len(jobs), plans.price, most_prices)
    if not found.fits:
        raise _no_room(jobs, plans, found)
    packed = tuple(
        PackedJob(job.name, job.steps, plans.given(n, found), plans.alone(n))
        for n, job in enumerate(jobs)
    )
    return Packing(packed, _bound_s(jobs, cluster), found.is_exact, found.looked_at)


def _require_possible(jobs: Sequence[PackJob], cluster: Cluster) -> None:
    if len(jobs) > len(cluster.devices):
        raise InputError(
            f"{len(jobs)} jobs need a device each, and the cluster has {len(cluster.devices)}",
            code="BX1254",
            help="run them one after the other, or give more devices",
        )
    if cluster.replicas:
        raise InputError(
            'the cluster file says which devices are "replicas", and pack gives devices itself',
            code="BX1255",
            help='leave "replicas" out of the cluster file',
        )


def _require_alone(job: PackJob, found: Plan | NoPlanError) -> None:
    if isinstance(found, NoPlanError):
        raise NoPlanError(
            f"{job.name} does not fit, even with every device: {found.what}",
            code="BX1256",
            notes=found.notes,
            help=found.help,
        )


class _Plans:
    """Plans of each job on parts of the cluster, each made once: the dearest thing here."""

    def __init__(self, jobs: Sequence[PackJob], cluster: Cluster) -> None:
        self.jobs, self.cluster = jobs, cluster
        self._first = [  # jobs of one model have one plan on the same devices
            next(n for n, other in enumerate(jobs) if _is_same(other, job)) for job in jobs
        ]
        self._found: dict[tuple[int, Cluster], Plan | NoPlanError] = {}

    def of(self, job: int, own: Names, others: Sequence[Names]) -> Plan | NoPlanError:
        part = part_of(self.cluster, own, others)
        key = self._first[job], part
        if key not in self._found:
            self._found[key] = self._made(self.jobs[job], part)
        return self._found[key]

    def _made(self, job: PackJob, part: Cluster) -> Plan | NoPlanError:
        try:
            return make_plan(job.graph, part, job.source, job.options)
        except NoPlanError as error:
            return error

    def price(self, job: int, own: Names, others: tuple[Names, ...]) -> float:
        found = self.of(job, own, others)
        if isinstance(found, NoPlanError):
            return math.inf
        return self.jobs[job].steps * found.forecast.step_s

    def given(self, job: int, found: Divided) -> Plan:
        rest = found.given[:job] + found.given[job + 1 :]
        plan = self.of(job, found.given[job], rest)
        assert isinstance(plan, Plan)
        return plan

    def alone(self, job: int) -> Plan:
        """Return the fastest plan of a job that is known: on fewer devices it may be as fast."""
        known = [
            p for (n, _), p in self._found.items() if n == self._first[job] and isinstance(p, Plan)
        ]
        return min(known, key=lambda plan: plan.forecast.step_s)

    def refusals(self, job: int) -> list[tuple[Names, NoPlanError]]:
        """Return where a job did not fit, the most devices first."""
        found = [
            (tuple(d.name for d in part.devices), error)
            for (n, part), error in self._found.items()
            if n == self._first[job] and isinstance(error, NoPlanError)
        ]
        return sorted(found, key=lambda each: (-len(each[0]), each[0]))

    def least(self, job: int) -> list[Names]:
        """Return the smallest groups of devices on which a job was found to fit."""
        fits = {
            tuple(d.name for d in part.devices)
            for (n, part), plan in self._found.items()
            if n == self._first[job] and isinstance(plan, Plan)
        }
        return sorted(
            (one for one in fits if not any(set(other) < set(one) for other in fits)),
            key=lambda names: (len(names), names),
        )


def _is_same(one: PackJob, other: PackJob) -> bool:
    return one.graph is other.graph and one.options == other.options


def part_of(cluster: Cluster, own: Names, others: Sequence[Names]) -> Cluster:
    """Return some devices as a cluster, with their rates while other jobs use the other devices.

    Where a job shares a host, its devices have the rates of a full host. The jobs there have equal
    shares of the NIC.
    """
    everyone = {*own, *(name for names in others for name in names)}
    busy = crowded(_only(cluster, everyone)).device
    company = {
        host.name: sum(_is_on(cluster, names, host.name) for names in (own, *others))
        for host in cluster.hosts
        if _is_on(cluster, own, host.name)
    }
    part = _only(cluster, set(own))
    return replace(
        part,
        devices=tuple(busy[d.name] if company.get(d.host, 1) > 1 else d for d in part.devices),
        hosts=tuple(_shared(h, company[h.name]) for h in part.hosts),
    )


def _only(cluster: Cluster, names: set[str]) -> Cluster:
    devices = tuple(device for device in cluster.devices if device.name in names)
    here = {device.host for device in devices}
    return replace(
        cluster,
        devices=devices,
        links=tuple(link for link in cluster.links if {link[0], link[1]} <= names),
        hosts=tuple(host for host in cluster.hosts if host.name in here),
    )


def _is_on(cluster: Cluster, names: Names, host: str) -> bool:
    return any(cluster.device[name].host == host for name in names)


def _shared(host: Host, jobs: int) -> Host:
    if jobs == 1:
        return host
    nic = host.nic_bytes_per_s
    return Host(host.name, None if nic is None else nic / jobs)


# --------------------------------------------------------------------------- refusals and the bound


def _no_room(jobs: Sequence[PackJob], plans: _Plans, found: Divided) -> NoPlanError:
    """Say on what each fits, and what is lacking elsewhere."""
    notes = []
    for number, job in enumerate(jobs):
        least = [" and ".join(names) for names in plans.least(number)]
        more = f" (and {len(least) - MOST_NOTES} more)" * (len(least) > MOST_NOTES)
        notes.append(f"{job.name} fits on no less than {' or '.join(least[:MOST_NOTES])}{more}")
        for names, error in plans.refusals(number)[:1]:
            notes += [f"{job.name} on {' and '.join(names)}: {note}" for note in error.notes]
    which = "all" if found.is_exact else "not all"
    all_jobs = ", ".join(job.name for job in jobs)
    return NoPlanError(
        f"{all_jobs} do not fit together on {len(plans.cluster.devices)} devices "
        f"(divisions tried: {found.looked_at}, {which})",
        code="BX1257",
        notes=tuple(notes),
        help="run them one after the other: each fits on its own with every device; or add devices",
    )


def _bound_s(jobs: Sequence[PackJob], cluster: Cluster) -> float:
    """Return seconds before which no division ends: all work, on all devices, without waiting."""
    import numpy as np  # not with every import of a plan

    from bigbrain_fx.planning import least_busy_s

    seconds = np.concatenate([job.steps * _unit_s(job, cluster) for job in jobs], axis=1)
    return least_busy_s(seconds)


def _unit_s(job: PackJob, cluster: Cluster) -> Array:
    """Return [device, unit]: seconds of a step, by the number of micro-batches that is best."""
    import numpy as np

    from bigbrain_fx.planning import work

    each = []
    usual = counts(job.graph, cluster, job.options, 8)
    for count in chain(usual, more_counts(job.graph, job.options, max(usual))):
        concrete = job.graph.at(job.graph.batch // count)
        costs = estimated(concrete, cluster, job.source, job.options.estimator)
        found = work(concrete, costs.alone or costs)
        on = [found.on[device.name] for device in cluster.devices]
        each.append(np.stack([count * (d.forward_s + d.backward_s) + d.once_s for d in on]))
    if len({one.shape for one in each}) > 1:  # other units at other sizes: nothing is known
        each = [one.sum(axis=1, keepdims=True) * 0.0 for one in each]
    least: Array = np.min(each, axis=0)
    return least

"""One point of the space that `auto` searches: devices of each group, and their divided tensors.

    replicas x ranks of a tensor group x ZeRO x devices of each replica x rows of a micro-batch

The search of one pipeline (`plan.search`) chooses its devices, cuts, schedule and recomputed ops,
and of one replica the rows. These are no part of a strategy. The module knows options and
devices.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import accumulate, pairwise

from bigbrain_fx.core import Axis, Cluster, Exchange, ZeroStage
from bigbrain_fx.errors import InputError
from bigbrain_fx.plan.memory_check import tensor_bytes
from bigbrain_fx.plan.nouns import AUTO, Case, Options
from bigbrain_fx.plan.one import estimated
from bigbrain_fx.plan.replicas import Group, by_speed, divide, only
from bigbrain_fx.plan.shard import chosen_axes
from bigbrain_fx.plan.tensor import Prices, named_axes
from bigbrain_fx.planning import bytes_per_s, crowded, nameless


@dataclass(frozen=True)
class Strategy:
    """A way to use a cluster.

    Attributes:
        replicas: of the model.
        members: of each tensor group; 1: none.
        zero_stage: what replicas divide of weights, gradients and state.
        sets: devices of each replica, group after group; (): all, as `divide` gives them to each.
        micro_batches: of a step of all replicas; None: as asked, or not chosen yet.
    """

    replicas: int = 1
    members: int = 1
    zero_stage: ZeroStage = 0
    sets: tuple[Group, ...] = ()
    micro_batches: int | None = None

    def asked(self, options: Options) -> Options:
        """Return options in which nothing is open but what the search of a pipeline finds."""
        given = replace(options, tensor=self.members)
        if self.members > 1 and options.tensor != self.members and given.schedule == AUTO:
            given = replace(given, schedule=None)
        if options.replicas == 0 or self.sets:
            given = replace(given, replicas=self.replicas)
        micro_batches = self.micro_batches or options.micro_batches
        given = replace(given, zero_stage=self.zero_stage, micro_batches=micro_batches)
        if options.replicas == 0 and self.replicas == 1 and options.all_reduce_order != "tree":
            return replace(given, sum_order="replica")  # the tree is for one, too
        return given

    def on(self, cluster: Cluster) -> Cluster:
        """Return the cluster of its devices, in its order."""
        if not self.sets:
            return cluster
        names = [name for own in self.sets for name in own]
        used = only(cluster, names)
        devices = tuple(cluster.device[name] for name in names)
        return replace(used, devices=devices, replicas=self.sets if len(self.sets) > 1 else ())

    def __str__(self) -> str:
        """Name it, in words."""
        counts = f"{self.replicas} replicas" if self.replicas > 1 else ""
        found = " of ".join(filter(None, (counts, self._groups()))) or "one pipeline"
        return found + (f", ZeRO {self.zero_stage}" if self.zero_stage else "")

    def _groups(self) -> str:
        if self.members > 1:
            return f"tensor groups of {self.members} devices"
        return self._sizes()

    def _sizes(self) -> str:
        """Return how many devices the replicas have, where they are told apart by that."""
        sizes = sorted({len(own) for own in self.sets})
        what = f"{' or '.join(map(str, sizes))} device{'s' * (sizes != [1])}"
        return f"{what}, {sum(map(len, self.sets))} in all" if sizes else ""


# ------------------------------------------------------------------------------------------------
# Strategies -> what no plan of each goes below, about what it takes, and whether its state fits.
#
#   least   micro-batches / the speed of all of its devices; sums of gradients, if these take longer
#   about   (micro-batches of a replica + its stages - 1) x its pace, and sums of gradients
#
# The pace has half of the largest op, which no cut divides. Weights, gradients and the
# optimizer's state must fit beside each other. Nothing is planned: this says what is worth a
# plan.


ROWS = (1, 2, 4, 8)
"""Of a micro-batch, besides all that a replica has: larger ones only fill a pipeline later."""
GRADIENTS = 2.0
"""Tensors of a parameter's size that its gradients take while they are added up."""
SAVED = 0.9
"""Of what an estimator says that ops save for the backward, the least that a ledger counts."""
ROOM = 0.85
"""Of a device's memory for tensors that weights and what belongs to them may take: the rest is for
activations and messages."""
SURE = 0.95
"""Of a group's seconds, which are about right: neighbours need fewer exchanges than are counted."""
FEW = 16
"""Devices of two replicas between which every link is looked at."""


@dataclass(frozen=True)
class Priced:
    """A strategy and what is known of it before it is planned; `about_s` is infinite if nothing.

    One that `lacks` memory has no plan; one that does not fit, by a rule of thumb, may have one.
    """

    strategy: Strategy
    least_s: float
    about_s: float
    fits: bool
    lacks: bool = False


def _first_of(cluster: Cluster) -> dict[str, str]:
    """Return the first device that costs what each does."""
    firsts: dict[object, str] = {}
    return {d.name: firsts.setdefault(nameless(d), d.name) for d in cluster.devices}


class Bound:
    """Lower bound of a model's step on each device: mutable, remembers its results."""

    def __init__(self, case: Case) -> None:
        self.graph, self.cluster = case.graph, case.cluster
        self.source, self.options = case.source, case.options
        self._prices: dict[tuple[int, bool], Prices] = {}
        self._known_speeds: dict[int, Mapping[str, float]] = {}
        self._known_saved: dict[int, int] = {}

    def of(self, strategy: Strategy) -> Priced:
        """Price one."""
        try:
            return self._of(strategy)
        except InputError:  # whoever plans it says what is wrong
            return Priced(strategy, 0.0, float("inf"), fits=True)

    def _of(self, strategy: Strategy) -> Priced:
        sets = strategy.sets or divide(self.cluster, strategy.replicas, strategy.members)
        if any(len(own) % strategy.members for own in sets):
            return Priced(strategy, 0.0, float("inf"), fits=True)
        every = [rows for rows in self.rows(strategy) if not self._lacks(strategy, sets, rows)]
        if not every:
            return Priced(strategy, float("inf"), float("inf"), fits=False, lacks=True)
        seconds = [self._seconds(strategy, sets, rows) for rows in every]
        least_s, about_s = (min(each, default=0.0) for each in zip(*seconds, strict=True))
        sent_s, about_sent_s = self._sent_s(sets)
        sums_s = 2 * (len(sets) - 1) * about_sent_s
        return Priced(strategy, max(least_s, sent_s), about_s + sums_s, self._fits(strategy, sets))

    def sums_s(self, sets: Sequence[Group]) -> float:
        """Return about the seconds in which replicas on these devices add up gradients."""
        return 2 * (len(sets) - 1) * self._sent_s(sets)[1]

    def speeds(self) -> dict[str, float]:
        """Return how often a second each device could do a whole step's work."""
        rows = self.graph.static_batch or self.graph.batch
        times = self.graph.batch // rows
        return {name: each / times for name, each in self.rates(rows).items()}

    def axes(self, members: int) -> tuple[Axis, ...]:
        """Return all axes that so many ranks can divide together."""
        return chosen_axes(self.named, members) if members > 1 else ()

    @cached_property
    def named(self) -> tuple[Axis, ...]:
        """The axes that may be divided."""
        return named_axes(self.graph, self.options)

    def update_s(self) -> float:
        """Return the most that a device takes to update all weights."""
        costs = self._priced(self.graph.static_batch or 1).costs
        sizes = [param.spec.nbytes for param in self.graph.trained.values()]
        firsts = set(_first_of(self.cluster).values())
        return max(costs.optimizer_s(name, len(sizes), sum(sizes)) for name in firsts)

    # ------------------------------------------------------------------ seconds

    def rows(self, strategy: Strategy) -> Iterator[int]:
        """Yield how many rows a micro-batch may have: few, and as many as a replica has."""
        graph, micro = self.graph, strategy.micro_batches or self.options.micro_batches
        if graph.static_batch or micro:
            yield graph.static_batch or max(1, graph.batch // (micro or 1))
            return
        most = max(1, graph.batch // strategy.replicas)
        yield from sorted({most, *(rows for rows in ROWS if rows < most)})

    def _seconds(self, strategy: Strategy, sets: Sequence[Group], rows: int) -> tuple[float, float]:
        """Return the least and about the seconds of a step in micro-batches of so many rows."""
        each = [self._stage_speeds(strategy, own, rows) for own in sets]
        totals = [sum(own) for own in each]
        dealt = self._dealt(self.graph.batch / rows, totals)
        least_s = max(micro / total for micro, total in zip(dealt, totals, strict=True))
        sent_s = [self._message_s(own, rows) for own in sets]
        about = zip(dealt, each, sent_s, strict=True)
        return least_s, max(self._filled_s(*own) for own in about)

    def _dealt(self, micro: float, speeds: Sequence[float]) -> Sequence[float]:
        """Return the micro-batches of each replica: whole ones where their number is given."""
        is_given = self.options.micro_batches or self.graph.static_batch
        if is_given and len(speeds) <= micro:
            return by_speed(int(micro), speeds)
        return [micro * speed / sum(speeds) for speed in speeds]

    def _filled_s(self, micro: float, speeds: Sequence[float], sent_s: float) -> float:
        """Return about the seconds of one replica, on as many of its stages as are best.

        Each of several stages waits besides for what it sends, so many seconds.
        """
        fastest = accumulate(sorted(speeds, reverse=True))
        return min(
            (micro + others) * ((1 + self.largest * others / 2) / speed + sent_s * (others > 0))
            for others, speed in enumerate(fastest)
        )

    def _message_s(self, own: Group, rows: int) -> float:
        """Return how long a device waits that sends an activation and a gradient to the next."""
        if not any(self.cluster.device[name].overheads.blocking for name in own):
            return 0.0
        rate = min((bytes_per_s(self.cluster, *pair) for pair in pairwise(own)), default=0.0)
        return 2 * self.crossing_bytes * rows / self.graph.batch / rate if rate else 0.0

    @cached_property
    def crossing_bytes(self) -> int:
        """The fewest bytes of a batch that a cut in the middle half of the ops sends on."""
        graph = self.graph.at(self.graph.batch)
        place = {op.name: i for i, op in enumerate(graph.ops)}
        changes = [0] * (len(graph.ops) + 1)
        for name, readers in graph.consumers.items():
            if name in place and readers:
                nbytes = sum(spec.nbytes for spec in graph.op[name].outputs)
                changes[place[name]] += nbytes
                changes[max(place[reader] for reader in readers)] -= nbytes
        crossing, quarter = [*accumulate(changes)], len(graph.ops) // 4
        return min(crossing[quarter : 3 * quarter + 1])

    def _stage_speeds(self, strategy: Strategy, own: Group, rows: int) -> list[float]:
        """Return how many micro-batches a second each device, or group, of a replica could do."""
        members, prices = strategy.members, self._priced(rows)
        if members == 1:
            return [self.rates(rows)[name] for name in own]
        axes = [self._of_rows(axis, rows) for axis in self.axes(members)]
        groups = [own[i : i + members] for i in range(0, len(own), members)]
        return [1 / (SURE * each_s) for each_s in prices.least_s(axes, groups)]

    def _of_rows(self, axis: Axis, rows: int) -> Axis:
        """Return an axis with what so many rows exchange: its own is of an example batch."""
        batch = self.graph.batch

        def some(each: Exchange) -> Exchange:
            return replace(each, nbytes=each.nbytes * rows // batch)

        return replace(axis, exchanges=tuple(map(some, axis.exchanges)))

    def _priced(self, rows: int, *, is_crowd: bool = False) -> Prices:
        """Price ops for so many rows, each kind of device once: thousands are of a few kinds."""
        key = rows, is_crowd
        if key not in self._prices:
            where = crowded(self.cluster) if is_crowd else self.cluster
            first_of = _first_of(where)
            about = only(where, set(first_of.values())), self.source, self.options.estimator
            costs = estimated(self.graph.at(rows), *about)
            costs = costs.alone or costs
            ops = {name: costs.ops[first] for name, first in first_of.items()}
            self._prices[key] = Prices(replace(costs, ops=ops), self.cluster)
        return self._prices[key]

    def rates(self, rows: int) -> Mapping[str, float]:
        """Return how many micro-batches of so many rows each device could do a second."""
        if rows not in self._known_speeds:
            self._known_speeds[rows] = self._priced(rows).speeds()
        return self._known_speeds[rows]

    def until_s(self, device: str, rows: int, level: float) -> Sequence[float]:
        """Return the seconds of a micro-batch of so many rows before each op, and of all.

        The level is the contention on the device's host: from 0.0, it is alone, to 1.0.
        """
        alone = self._priced(rows).until_s(device)
        if not level:
            return alone
        crowd = self._priced(rows, is_crowd=True).until_s(device)
        return [own_s + level * (s - own_s) for own_s, s in zip(alone, crowd, strict=True)]

    @cached_property
    def largest(self) -> float:
        """The largest op's share of all work."""
        ops = next(iter(self._priced(self.graph.static_batch or 1).costs.ops.values())).values()
        each_s = [cost.forward_s + cost.backward_s for cost in ops]
        return max(each_s, default=0.0) / max(sum(each_s), 1e-300)

    # ------------------------------------------------------------------ sums, memory

    def _sent_s(self, sets: Sequence[Group]) -> tuple[float, float]:
        """Return the least, and about, in which a device's part of the gradients goes to another.

        The least goes by the fastest link; a ring waits for the slowest between two neighbours.
        """
        if len(sets) == 1 or not self.graph.training:
            return 0.0, 0.0
        few = [own if len(own) <= FEW else own[:1] for own in sets]
        pairs = [(a, b) for i, a in enumerate(few[:FEW]) for b in few[i + 1 : FEW]]
        fastest = max(self._rate(*pair) for pair in pairs)
        slowest = min(self._rate(*pair) for pair in pairwise((*few, few[0])))
        nbytes, sizes = self._held_bytes / len(sets), [*map(len, sets)]
        return nbytes / max(sizes) / fastest, nbytes / min(sizes) / slowest

    def _rate(self, one: Group, two: Group) -> float:
        """Return the bytes a second of the fastest link between devices of two replicas."""
        return max(bytes_per_s(self.cluster, a, b) for a in one for b in two)

    def _lacks(self, strategy: Strategy, sets: Sequence[Group], rows: int) -> bool:
        """Whether some replica's devices cannot hold its state and one micro-batch, all together.

        After a micro-batch's last forward all that its ops save is held, whatever the schedule.
        Nothing is said of groups, whose ranks divide it, nor of recompute and offloading.
        """
        if strategy.members > 1 or self.options.recompute or self.options.offload:
            return False
        needed = self._state_bytes(strategy.zero_stage, len(sets))
        needed += SAVED * self._saved_bytes(rows) if self.graph.training else 0.0
        device = self.cluster.device
        return needed > min(sum(tensor_bytes(device[name]) for name in own) for own in sets)

    def _state_bytes(self, zero_stage: int, replicas: int) -> float:
        """Return the least that a replica holds of weights, gradients and the optimizer's state."""
        if not self.graph.training:
            return self._held_bytes
        states = self.source.optimizer_states.values()
        state = min((self.source.optimizer_state, *states))
        whole = 2 - (zero_stage >= 2) - (zero_stage == 3)
        parts = replicas if zero_stage else 1
        return self._held_bytes * (whole + (2 + state - whole) / parts)

    def _saved_bytes(self, rows: int) -> int:
        """Return the least that ops of one micro-batch save where that is least.

        Sizes are sums of powers of rows: more rows save no less than a straight line says.
        """
        *_, fewer, few = ROWS
        if rows > few and not self.graph.static_batch:
            less, least = self._saved_bytes(fewer), self._saved_bytes(few)
            return least + (rows - few) * (least - less) // (few - fewer)
        if rows not in self._known_saved:
            tables = {id(ops): ops for ops in self._priced(rows).costs.ops.values()}.values()
            each = (sum(cost.saved_bytes for cost in ops.values()) for ops in tables)
            self._known_saved[rows] = min(each)
        return self._known_saved[rows]

    def _fits(self, strategy: Strategy, sets: Sequence[Group]) -> bool:
        state = max((self.source.optimizer_state, *self.source.optimizer_states.values()))
        parts = len(sets) if strategy.zero_stage else 1
        times = 1 + (GRADIENTS + state / parts if self.graph.training else 0.0)
        device = self.cluster.device
        room = min(sum(tensor_bytes(device[name]) for name in own) for own in sets)
        return times * self._held_bytes <= ROOM * room

    @cached_property
    def _held_bytes(self) -> int:
        return sum(param.spec.nbytes for param in self.graph.trained.values())

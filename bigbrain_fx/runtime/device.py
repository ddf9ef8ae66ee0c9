"""One device at work: what the emitted `step_once()` calls, one method per kind of instruction.

The emitted file decides what happens when; this file only does it. It knows no schedule.

    recv ──▶ forward ──▶ send      activations, to later stages
    send ◀── backward ◀── recv     gradients, to earlier stages; summed over micro-batches
    tied gradients, norms ──▶ optimizer_step
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from .channel import Channel, disclose, enclose
from .data import Stream, mean_loss, share_of
from .finite import NotFiniteError, not_finite
from .gradients import Parts, clipped, gradients, norm, or_zeros, summed
from .hooks import Hooks
from .loss_scale import LEAST, LossScale, are_finite, unscaled
from .malloc import apart
from .modules import Stage, active, is_released, refill, release, set_parameter
from .rates import LearningRates, LrScale, MakeScheduler
from .recompute import Read, Twice
from .transport import Transport
from .weights import AGAIN, OwnWeights, WeightsError, fill

if TYPE_CHECKING:  # a bundle has the files of what its plan uses
    from .asynchronous import Versions
    from .buckets import Listed
    from .group import Group
    from .replicas import Replicas
    from .statistics import Statistics
    from .stored_activations import ActivationStore, StoredRead
    from .stored_weights import StoredWeights
    from .stores import StoredState, StoreRoom
    from .unsharded import Unsharded

Optimizer = torch.optim.Optimizer
_NOTHING: Parts = MappingProxyType({})
_NOTHING_LOADED: Mapping[str, Tensor] = MappingProxyType({})
Hook = Callable[[Tensor | None], Tensor | None]  # gradient -> what autograd keeps instead


@dataclass(frozen=True)
class Training:
    """What the user's file says about training; see `training.py` of the bundle."""

    optimizer: Callable[[list[tuple[str, nn.Parameter]]], Optimizer]
    lr_scale: LrScale | None = None
    clip_norm: float | None = None
    scheduler: MakeScheduler | None = None
    grad_scaler: Mapping[str, Any] | None = None  # arguments of `LossScale`


@dataclass
class _Saved:
    """What the backward pass of one stage and micro-batch starts from."""

    leaves: dict[str, Tensor]
    outputs: dict[str, Tensor]


@dataclass
class _Step:
    """What one step gathers."""

    losses: dict[int, Tensor] = field(default_factory=dict)
    gradients: dict[tuple[str, int], Tensor] = field(default_factory=dict)
    counts: dict[tuple[str, int], int] = field(default_factory=dict)
    norms: dict[str, Tensor] = field(default_factory=dict)
    unscaled: dict[str, Tensor] | None = None  # with a loss scale: the gradients as they are used
    finite: bool = True  # before that


class Device:
    """Run one device's part of every step; emitted classes fill in the attributes and `step_once`.

    Attributes:
        name: the device.
        names: all devices, by rank.
        micro_batches: how many a step has, over all replicas.
        micros: of each replica, the numbers of those that it computes; empty: one replica, all.
        replica: which one this device is part of.
        sum_order, zero_stage: how replicas add gradients, and what they divide; see `replicas`.
        members: the devices that run its stages together, this one among them, in the order in
            which parts are added; empty: it has all of their tensors.
        stages: stage number -> class.
        recompute: stages that run forward again before each backward, and keep only what they
            received until then.
        loss: the stage and the value to train on, if it is made here.
        channels: those that start or end here, in the order of the bundle.
        tied: parameters that several stages hold, on any device -> those stages.
        aliases: other names of tied parameters -> the name that the optimizer sees.
        offload: what it keeps in its store; empty: nothing. See `stores`.
        saving: stages of which what the forward saves lies there. See `stored_activations`.
        store: the folder of the store; None: its host's memory.
        store_bytes: what is planned to lie there.
        empties_every: where steps run into each other and processes are replaced, each so-many-th
            ends with nothing under way: a state is of such a step's end.
        begins_empty: the next step begins so.
        stands_for: lost devices, whose files it writes: it holds all that they held.
        compiled: its stages run under torch.compile. See `compiled`.
    """

    name = ""
    names: tuple[str, ...] = ()
    micro_batches = 1
    micros: tuple[Sequence[int], ...] = ()
    replica = 0
    sum_order = "replica"
    zero_stage = 0
    members: tuple[str, ...] = ()
    stages: Mapping[int, type[Stage]] = {}
    recompute: tuple[int, ...] = ()
    loss: tuple[int, str] | None = None
    channels: tuple[Channel, ...] = ()
    tied: Mapping[str, tuple[int, ...]] = {}
    aliases: Mapping[str, str] = {}
    offload: tuple[str, ...] = ()
    saving: tuple[int, ...] = ()
    store: str | None = None
    store_bytes = 0
    empties_every = 1
    begins_empty = True
    stands_for: tuple[str, ...] = ()
    compiled = False

    def __init__(
        self, transport: Transport, stream: Stream, seed: int, device: torch.device
    ) -> None:
        self.transport = transport
        self.stream = stream
        self.seed = seed
        self.device = device
        self.hooks = Hooks()
        self.on_nan = "stop"  # or another of `finite.POLICIES`
        self.updates_together = False  # not before all have all of a step's messages
        self.modules: dict[int, Stage] = {}
        is_stored = "weights" in self.offload  # see `load`
        with apart() if is_stored else nullcontext():
            for number, stage in self.stages.items():
                self.modules[number] = stage.empty(device).train()
                if self.zero_stage == 3 or is_stored:  # others keep most of them: see `join`
                    named = self.modules[number].parameters()
                    release(p for p in named if p.requires_grad or is_stored)
        if self.compiled:
            self._compile()
        self.parameters: dict[str, nn.Parameter] = {}
        self.held: dict[int, list[str]] = {}
        self.owner: Mapping[str, str] = {}
        self.divided: dict[str, str] = {}  # tensors of which it has a part -> the part's name
        self.step = 0
        self.finished = 0  # steps
        self._compared = False  # this step's batch with the others'
        self._saved: dict[tuple[int, int], _Saved | Read | StoredRead] = {}
        self._twice = {number: Twice(self.modules[number]) for number in self.recompute}
        self._kept: dict[int, deque[Tensor]] = {}
        self._now = _Step()
        self._backward_of = self._micro = -1
        self.group = self._group() if self.members else None
        self.replicas: Replicas | None = None
        self.unsharded: Unsharded | None = None
        self.statistics: Statistics | None = None
        self.updated: dict[str, nn.Parameter] = {}  # those that this device's optimizer has
        self.first_gradients: dict[str, Tensor] | None = None
        self.loss_scale: LossScale | None = None
        self.room: StoreRoom | None = None
        self.weights: StoredWeights | None = None
        self.stored: StoredState | None = None
        self.saved: ActivationStore | None = None
        self.versions: Versions | None = None
        self.goes_on_after: Callable[[int], bool] = lambda _step: False  # into the next batch

    def _compile(self) -> None:
        from .compiled import compile_stages  # only bundles of --compile have it
        from .compiler import require_compiler

        if self.device.type == "cpu":
            require_compiler(self.name)
        compile_stages(self.modules.values())

    def _group(self) -> Group:
        from .group import Group  # only bundles with groups have it

        return Group(self.members, self.name, self.channels, self._send, self._receive)

    # ------------------------------------------------------------------ set-up

    def load(self, tensors: Mapping[str, Tensor], owner: Mapping[str, str]) -> None:
        """Give the stages their weights, by their names in the model; with ZeRO 3 `join` does.

        `owner` lists every trained parameter of the whole model, in its order, and the device that
        answers for its norm.

        Raises:
            WeightsError: a tensor is missing or has another shape, or `owner` is not of them.
        """
        self.owner = owner
        self.divided = tensors.divided if isinstance(tensors, OwnWeights) else {}
        for alias, name in self.aliases.items():
            if alias in self.divided:
                self.divided[name] = name + self.divided[alias].removeprefix(alias)
        for number, module in self.modules.items():
            if self.weights is not None:
                self._share(number, module)
                self.weights.fill(number, module, tensors)
                continue
            fill(module, tensors, self._left_out(module, owner))
            self._share(number, module)
        self._require_owners(owner)
        self.parameters = {name: self.parameters[name] for name in owner if name in self.parameters}
        self.held = {
            number: [n for n in self.parameters if n in names]
            for number, names in self.held.items()
        }
        for name, parameter in self.parameters.items():
            parameter.register_hook(self._adder(name, parameter))

    def _left_out(self, module: Stage, owner: Mapping[str, str]) -> set[str]:
        """Return the weights that replicas divide; the others get their memory."""
        if self.zero_stage != 3:
            return set()
        named = dict(module.named_parameters(remove_duplicate=False))
        empty = {name for name, parameter in named.items() if is_released(parameter)}
        divided = {name for name in empty if self.aliases.get(name, name) in owner}
        for name in empty - divided:
            refill(named[name])
        return divided

    def join(self, listed: Listed, tensors: Mapping[str, Tensor] = _NOTHING_LOADED) -> None:
        """Sum gradients with other replicas: `listed` is what buckets.json says.

        With ZeRO 3, take from `tensors` the weights that this replica keeps.

        Raises:
            WeightsError: it names parameters or buffers that this device does not hold.
        """
        from .buckets import buckets_of  # only bundles with replicas have these
        from .replicas import Replicas
        from .statistics import Statistics, groups_of

        sums = {name: entry for name, entry in listed.items() if "params" in entry}
        found = [*buckets_of(sums, self.name, tuple(self.stages), self.channels)]
        about = self.micros, self.replica, self.parameters, self.transport
        make = getattr(self.transport, "groups", None)  # one process has none: it sends messages
        if self.sum_order == "backend" and make is not None:
            from .collectives import CollectiveReplicas, process_groups  # only such bundles have it

            meeting = process_groups(sums, make)
            self.replicas = CollectiveReplicas(found, *about, meeting, self.zero_stage)
        else:
            order = "replica" if self.sum_order == "backend" else self.sum_order
            each = self.sum_order == "micro" or self.zero_stage >= 2
            self.replicas = Replicas(found, order, *about, each)
        written = {name: entry for name, entry in listed.items() if name not in sums}
        groups = [*groups_of(written, self.name, self.modules, self.channels)]
        self.statistics = Statistics(groups, self.micros, self.replica, self.transport)
        if self.zero_stage == 3:
            from .unsharded import Unsharded  # only those that divide weights have it

            self.unsharded = Unsharded(self.replicas, listed)
            for module in self.modules.values():
                self.unsharded.fill(module, tensors, self.aliases)

    def _require_owners(self, owner: Mapping[str, str]) -> None:
        """Refuse an index that names what this device does not hold.

        It lacks those that no gradient reaches (used under `no_grad` only): nobody trains them.
        """
        mine = [n for n, device in owner.items() if device == self.name]
        wrong = {n for n in mine if self._parameter_of(n) not in self.parameters}
        if wrong:
            raise WeightsError(
                f"weights/index.json: {min(wrong)!r} has the owner {self.name}, "
                f"which holds none of that name: {AGAIN}"
            )

    def _parameter_of(self, name: str) -> str:
        """Return the parameter that a name in the index is of: a part's is "NAME[MEMBER]"."""
        return name if name in self.parameters else name.rpartition("[")[0]

    def _share(self, number: int, module: Stage) -> None:
        """Use one Parameter for all names of a tensor, in all stages of this device."""
        self.held[number] = []
        for name, parameter in list(module.named_parameters(remove_duplicate=False)):
            if parameter.requires_grad:
                canonical = self.aliases.get(name, name)
                shared = self.parameters.setdefault(canonical, parameter)
                set_parameter(module, name, shared)
                self.held[number].append(canonical)

    def train_with(self, training: Training) -> None:
        """Make the optimizer for this device's parameters, in the order of the model."""
        self.training = training
        self.updated = {n: p for n, p in self._masters().items() if self._updates(n)}
        named = list(self.updated.items())
        self.optimizer = training.optimizer(named) if named else None
        scaling = training.grad_scaler
        self.loss_scale = None if scaling is None else LossScale(**scaling)
        self.rates = LearningRates(self.optimizer, training.lr_scale, training.scheduler)

    def _masters(self) -> dict[str, nn.Parameter]:
        """Return what the optimizer updates, by name."""
        return self.parameters

    def open_store(self, folder: str | None) -> None:
        """Open the store, before weights are loaded, which may lie there; None: the planned one.

        Raises:
            StoreError: it cannot be used, or lacks the room.
        """
        from .stores import room_of  # only bundles that offload have it

        where = None if self.store is None else folder or self.store
        self.room = room_of(where, self.name, self.store_bytes)
        if "weights" in self.offload:
            from .stored_weights import StoredWeights  # only bundles that offload them

            self.weights = StoredWeights(self.room)

    def offload_to(self, folder: str | None) -> None:
        """Let what else is offloaded lie in the device's store, which is opened if need be.

        Raises:
            StoreError: it cannot be used, or lacks the room.
        """
        from .stores import StoredState  # only bundles that offload have it

        if self.room is None:
            self.open_store(folder)
        assert self.room is not None
        if self.optimizer is not None and "state" in self.offload:
            self.stored = StoredState(self.optimizer, self.room, self.weights)
        if self.saving:
            from .stored_activations import ActivationStore  # only bundles that offload them

            self.saved = ActivationStore(self.room)

    def room_for_state(self, nbytes: int) -> Any:  # noqa: ANN401  # what has bytes
        """Return room for a copy of the state: where the state is kept, so is its copy."""
        if self.room is None or (self.stored is None and self.weights is None):
            return bytearray(nbytes)
        return self.room.buffer(nbytes)

    def _updates(self, name: str) -> bool:
        """Whether this device's optimizer updates a parameter: with ZeRO one replica's does."""
        if not self.zero_stage or self.replicas is None:
            return True
        return self.replicas.updated_here(name)

    def state(self) -> dict[str, Tensor]:
        """Return this device's tensors by their names in the model; parts by those of parts.

        With ZeRO 3 those that it keeps.
        """
        return {
            self.divided.get(name, name): t.detach()
            for module in self.modules.values()
            for name, t in module.state_dict().items()
            if not is_released(t)
        }

    # ------------------------------------------------------------------ a step

    def run_step(self, step: int) -> Tensor | None:
        """Run one training step; return its loss, the mean over its rows, where it is made."""
        for at_begin in self.hooks.on_step_begin:
            at_begin(self, step)
        self.step = step
        self._now = _Step()
        self.first_gradients = None  # for `verify`; as large as the weights, so not kept for long
        self._compared = False
        if self.replicas is not None:
            self.replicas.begin()
        if self.statistics is not None:
            self.statistics.begin()
        self.stream.advance(step)
        incoming = [c for c in self.messaging() if c.receiver == self.name]
        self.transport.begin_step(tuple((channel, self._messages(channel)) for channel in incoming))
        if self.unsharded is not None:
            self.unsharded.begin()
        if self.weights is not None:
            self.weights.let_go_of_all()  # who copied the state has read them all
        self.step_once()
        self.transport.finish()
        self.finished = step + 1
        for at_end in self.hooks.on_step_end:
            at_end(self, step)
        return self.loss_now()

    def loss_now(self) -> Tensor | None:
        """Return this step's loss, as far as it is computed, where it is reported."""
        losses = self._now.losses
        if not losses or not self._reports():
            return None
        return mean_loss([losses[micro] for micro in sorted(losses)], self.stream.sizes)

    def _reports(self) -> bool:
        """Whether the losses made here are those to report: others have the same, or their own."""
        return not self.replica and self.name in (self.members or (self.name,))[:1]

    def give_up_step(self) -> None:
        """Be as this step began, which nobody has updated in: it is begun again."""
        self._saved.clear()
        self._kept.clear()
        if self.statistics is not None:
            self.statistics.take_back()

    def step_once(self) -> None:
        """Run this device's instructions for one step; emitted."""
        raise TypeError("a device file defines step_once")

    def _messages(self, channel: Channel) -> int:
        return channel.messages(self.own_micro_batches())

    @classmethod
    def messaging(cls) -> tuple[Channel, ...]:
        """Return the channels between processes: those of sums carry nothing where torch adds."""
        summed = ("reduce", "gather") if cls.sum_order == "backend" else ()
        return tuple(c for c in cls.channels if not c.is_local and c.kind not in summed)

    @classmethod
    def own_micro_batches(cls) -> int:
        """How many micro-batches of a step this device computes."""
        return len(cls.micros[cls.replica]) if cls.micros else cls.micro_batches

    # ------------------------------------------------------------------ instructions

    def recv(self, channel: Channel, micro: int) -> Tensor:
        """Wait for an activation or a gradient.

        An activation becomes a leaf of this stage's backward.
        """
        kept = self._kept[channel.tag] if channel.is_local else None
        tensor = kept.popleft() if kept is not None else self._receive(channel)
        is_leaf = channel.kind == "activation"
        return tensor.requires_grad_(channel.requires_grad) if is_leaf else tensor

    def send(self, channel: Channel, micro: int, tensor: Tensor) -> None:
        """Start sending a value or a gradient; within this device it is handed over, detached.

        Messages of a channel are in the order in which they are sent: both ends take their
        micro-batches in one order.
        """
        if channel.is_local:
            self._kept.setdefault(channel.tag, deque()).append(tensor.detach())
        else:
            self._send(channel, tensor.detach())

    def _send(self, channel: Channel, tensor: Tensor) -> None:
        if tensor.dtype != channel.dtype:
            raise TypeError(f"{channel} carries {channel.dtype}, found {tensor.dtype}")
        for at_send in self.hooks.on_send:
            at_send(self, channel, tensor)
        self.transport.send(channel, enclose(channel, tensor) if channel.varies else tensor)

    def _receive(self, channel: Channel) -> Tensor:
        arrived = self.transport.recv(channel)
        tensor = disclose(channel, arrived) if channel.varies else arrived
        for at_recv in self.hooks.on_recv:
            at_recv(self, channel, tensor)
        return tensor

    def batch(self, name: str, micro: int) -> Tensor:
        """Return one model input of one micro-batch, from this device's own data stream.

        A device that reads says once a step what the batch is: all must have the same.
        """
        if not self._compared:
            what = f"the batch of step {self.step}"
            self.transport.agree(what, self.stream.digest(), self.name)
            self._compared = True
        return self.stream.get(name, micro)

    # What these two return is known per stage only: one tensor as it is, several as a tuple.

    def forward(self, stage: int, micro: int, /, **values: Tensor) -> Any:  # noqa: ANN401  # above
        """Run a stage forward; remember what its backward needs."""
        with self._weights(stage), self._drawing(micro), self._noting(stage, micro):
            if stage in self._twice:
                result, read = self._twice[stage].first(values)
                self._saved[stage, micro] = self._reading(stage, read)
            else:
                with self._storing(stage, values):
                    result = self.modules[stage](**values)
                saved = self._starting(stage, values, result)
                if saved.outputs:
                    self._saved[stage, micro] = saved
            if self.unsharded is not None:
                result = self.unsharded.apart(result)
        if self.loss is not None and self.loss[0] == stage:
            self._now.losses[micro] = self._named(stage, result)[self.loss[1]].detach()
            if self._looks_at_once():
                self._require_finite()
        return result

    def _looks_at_once(self) -> bool:
        """Whether a number that is not finite ends the run where it is made."""
        stops = self.on_nan == "stop" and self.loss_scale is None
        return stops and self.device.type == "cpu"  # a GPU would be waited for

    def _reading(self, stage: int, read: Read) -> Read | StoredRead:
        """Return what a stage runs again with; what it received may lie in the store."""
        if self.saved is None or stage not in self.saving:
            return read
        return self.saved.put(read, [part for each in self.stream.parts.values() for part in each])

    def _weights(self, stage: int) -> AbstractContextManager[None]:
        """Have a stage's weights meanwhile, where other replicas, or the store, keep some."""
        if self.weights is not None:
            self.weights.visit(stage, self._now.gradients)
        return nullcontext() if self.unsharded is None else self.unsharded.whole(stage)

    def _storing(self, stage: int, values: Mapping[str, Tensor]) -> AbstractContextManager[None]:
        """Let what a stage's forward saves lie in the store, but for what is here anyway."""
        if self.saved is None or stage not in self.saving:
            return nullcontext()
        module = self.modules[stage]
        return self.saved.saving((*module.parameters(), *module.buffers(), *values.values()))

    @contextmanager
    def _drawing(self, micro: int) -> Iterator[None]:
        """Key all random draws by the micro-batch: a second run draws the same."""
        active.key, active.device = self._key(micro), self.device
        active.group = self.group
        try:
            yield
        finally:
            active.key = active.group = None

    def _key(self, micro: int) -> tuple[int, int, int]:
        return self.seed, self.step, micro

    def _noting(
        self, stage: int, micro: int, *, again: bool = False
    ) -> AbstractContextManager[None]:
        """Keep back what a forward writes, where other replicas write it or where it counts not."""
        sizes = self.stream.sizes
        counts = not sizes or sizes[micro] > 0
        if self.statistics is not None and self.statistics.has(stage):
            return self.statistics.noting(stage, micro, again=again, counts=counts)
        return nullcontext() if counts or again else Twice(self.modules[stage]).aside()

    def _named(self, stage: int, result: Any) -> dict[str, Tensor]:  # noqa: ANN401  # as forward's
        results = result if isinstance(result, tuple | list) else (result,)
        return dict(zip(self.modules[stage].returns, results, strict=True))

    def _starting(self, stage: int, values: Mapping[str, Tensor], result: Any) -> _Saved:  # noqa: ANN401
        """Return what a backward pass starts from: what wants a gradient of both ends."""
        outputs = self._named(stage, result)
        return _Saved(_wanting(values), _wanting(outputs))

    def backward(self, stage: int, micro: int, /, **sent: Tensor) -> Any:  # noqa: ANN401
        """Run a stage backward; return the gradients of what it received, in the order received.

        `sent` are the gradients of its results and, relayed from later readers, those of what it
        received: they enter as roots, so that they are added in the order of an unsplit backward
        pass. The loss is seeded with its share of the step's, 1/M where rows are equal.
        """
        with self._weights(stage):
            return self._backward(stage, micro, sent)

    def _backward(self, stage: int, micro: int, sent: Mapping[str, Tensor]) -> Any:  # noqa: ANN401
        saved = self._saved.pop((stage, micro))
        if not isinstance(saved, _Saved):
            saved = saved if isinstance(saved, Read) else saved.back()
            saved = self._run_again(stage, micro, saved)
        roots, seeds = [], []
        if self.loss is not None and self.loss[0] == stage:
            roots.append(saved.outputs[self.loss[1]])
            seeds.append(self._seed(roots[0], micro))
        for name, gradient in sent.items():
            root = saved.outputs.get(name, saved.leaves.get(name))
            if root is not None:  # None: planned to want a gradient, but the forward detached it
                roots.append(root)
                seeds.append(gradient)
        self._backward_of, self._micro = stage, micro
        inputs = [*saved.leaves.values(), *(self.parameters[name] for name in self.held[stage])]
        found = self._gradients(stage, micro, roots, inputs, seeds)
        relayed = tuple(or_zeros(g, x) for g, x in zip(found, saved.leaves.values(), strict=False))
        return relayed[0] if len(relayed) == 1 else relayed

    def _seed(self, loss: Tensor, micro: int) -> Tensor:
        """Return what a micro-batch's loss counts of the step's: its rows over the step's."""
        sizes = self.stream.sizes or (1,) * self.micro_batches
        scale = 1.0 if self.loss_scale is None else self.loss_scale.scale
        return share_of(torch.full_like(loss, scale), sizes, micro)

    def _gradients(
        self, stage: int, micro: int, roots: list[Tensor], inputs: list[Tensor], seeds: list[Tensor]
    ) -> tuple[Tensor | None, ...]:
        return gradients(roots, inputs, seeds)

    def _run_again(self, stage: int, micro: int, read: Read) -> _Saved:
        """Run a stage forward from what it received, with the same draws as the first time."""
        with self._drawing(micro), self._noting(stage, micro, again=True):
            result = self._twice[stage].second(read)
        return self._starting(stage, read.values, result)

    def _adder(self, name: str, parameter: nn.Parameter) -> Hook:
        """Return a hook that adds up a parameter's gradient over micro-batches, in ascending order.

        autograd calls it as soon as the gradient is made, while it is still in the processor's
        cache; it keeps the zero that the hook gives back instead, so that a gradient's memory
        serves the next. The first sum makes a new tensor: autograd may have handed out one that
        something else holds too.
        """
        nothing = torch.zeros((), dtype=parameter.dtype, device=self.device).expand_as(parameter)

        def add(gradient: Tensor | None) -> Tensor | None:
            if gradient is None:
                return None
            self._add(name, self._backward_of, self._micro, gradient)
            return nothing

        return add

    def _add(self, name: str, stage: int, micro: int, gradient: Tensor) -> None:
        """Add one micro-batch's gradient of a parameter, to its bucket or to the sum here."""
        key, now = (name, stage), self._now
        if self.replicas is not None and self.replicas.add(name, stage, micro, gradient):
            return
        count = now.counts.get(key, 0)
        if count == 0:
            now.gradients[key] = gradient
        elif count == 1:
            now.gradients[key] = now.gradients[key] + gradient
        else:
            now.gradients[key].add_(gradient)
        now.counts[key] = count + 1

    # ------------------------------------------------------------------ replicas

    def reduce_gradients(self, stage: int, micro: int, *, deferred: bool = False) -> None:
        """After a stage's backward: send what is complete to the replicas that sum it.

        `deferred`: after its `backward_weight`.
        """
        assert self.replicas is not None
        self.replicas.after(stage, micro, waited=deferred)
        if self.unsharded is not None:
            self.unsharded.take_parts()

    def sum_gradients(self) -> None:
        """Sum gradients over all replicas; without ZeRO, all of them have all sums then."""
        assert self.replicas is not None
        self.replicas.sum()
        if not self.zero_stage:
            self.replicas.send_sums()
            self.replicas.recv_sums()
        self._now.gradients.update(self.replicas.gradients(bool(self.zero_stage)))

    def exchange_statistics(self) -> None:
        """Write what the micro-batches of all replicas add to running statistics, in order."""
        assert self.statistics is not None
        self.statistics.tell()
        self.statistics.take([m for m, rows in enumerate(self.stream.sizes) if not rows])

    def gather_weights(self) -> None:
        """Exchange what each replica has updated."""
        assert self.replicas is not None
        self.replicas.send_weights()
        self.replicas.recv_weights()

    def send_losses(self, channel: Channel) -> None:
        """Send this replica's losses to the first one, which reports their mean."""
        losses = self._now.losses
        self._send(channel, torch.stack([losses[micro] for micro in sorted(losses)]))

    def recv_losses(self, channel: Channel, replica: int) -> None:
        """Take the losses of another replica."""
        found = self._receive(channel).unbind()
        self._now.losses.update(zip(self.micros[replica], found, strict=True))

    # ------------------------------------------------------------------ once a step

    def send_tied(self, channel: Channel) -> None:
        """Send this stage's gradient of a parameter that another device holds too."""
        gradient = self._now.gradients.get((channel.value, channel.source))
        parameter = self.parameters[channel.value]
        self._send(channel, torch.zeros_like(parameter) if gradient is None else gradient)

    def recv_tied(self, channel: Channel) -> None:
        """Take another stage's gradient of a parameter that this device holds too."""
        self._now.gradients[channel.value, channel.source] = self._receive(channel)

    def send_norms(self, channel: Channel) -> None:
        """Send the norms of the gradients that this device answers for."""
        self._send(channel, self._own_norms())

    def recv_norms(self, channel: Channel) -> None:
        """Take the norms of the gradients that another device answers for."""
        owned = [name for name, owner in self.owner.items() if owner == channel.sender]
        self._now.norms.update(zip(owned, self._receive(channel).unbind(), strict=True))

    def optimizer_step(self) -> None:
        """Sum tied gradients, last stage first; clip by the global norm; update the parameters.

        Nothing is updated where a number is not finite and the policy is to skip.

        Raises:
            NotFiniteError: a loss or a gradient is not finite, and the policy is to stop.
        """
        if self.weights is not None:
            self.weights.visit(None, self._now.gradients)
        if self._may_update() and self.optimizer is not None:
            self._update(self.optimizer)
        if self.statistics is not None:
            self.statistics.end()
        self._now.gradients.clear()
        self._now.counts.clear()
        self._now.unscaled = None
        self._advance_rates()

    def _advance_rates(self) -> None:
        self.rates.advance()

    def _update(self, optimizer: Optimizer) -> None:
        found = self._summed()
        limit = self.training.clip_norm
        if limit is not None and self.weights is not None:
            self.weights.clip(found, self._norms(), limit)
        elif limit is not None:
            found = clipped(found, self._norms(), limit)
        if self.step == 0:
            self.first_gradients = {self.divided.get(n, n): g for n, g in found.items()}
        for name, parameter in self.updated.items():
            parameter.grad = found.get(name)
        self.rates.set(self.step)
        optimizer.step() if self.stored is None else self.stored.step()
        optimizer.zero_grad(set_to_none=True)

    def _may_update(self) -> bool:
        """Whether all numbers of this step are finite, or nobody minds."""
        if self.loss_scale is not None:
            return self._may_update_scaled(self.loss_scale)
        fine = True
        if self.on_nan == "skip":
            fine = self._not_finite(self._now.gradients) is None
        elif self.on_nan == "stop":
            self._require_finite(self._now.gradients)
        if self.on_nan == "skip" or self.updates_together:
            return self.transport.vote(self.step, self.name, fine, self.names)
        return True

    def _may_update_scaled(self, scale: LossScale) -> bool:
        """Whether all devices have finite gradients; else the scale falls."""
        self._summed()
        fine = self.transport.vote(self.step, self.name, self._now.finite, self.names)
        scale.update(fine)
        if not fine and scale.scale < LEAST and self.on_nan == "stop":
            raise NotFiniteError(
                f"step {self.step}: the loss or a gradient is not finite, and the loss scale has "
                f"fallen to {scale.scale:g} for it (device {self.name})"
            )
        return fine

    def _require_finite(self, parts: Parts = _NOTHING) -> None:
        found = self._not_finite(parts)
        if found is not None:
            raise NotFiniteError(f"{found} (device {self.name})")

    def _not_finite(self, parts: Parts) -> str | None:
        stage = self.loss[0] if self.loss else None
        if self.weights is None:
            return not_finite(self.step, stage, self._now.losses, parts)
        found = not_finite(self.step, stage, self._now.losses, _NOTHING)
        for key, gradient in parts.items():
            found = found or not_finite(self.step, stage, {}, {key: gradient})
            self.weights.leave(gradient)
        return found

    def _summed(self) -> dict[str, Tensor]:
        """Return this device's gradients; tied ones with what other devices have sent."""
        now = self._now
        if now.unscaled is not None:
            return now.unscaled
        stages_of = {name: self._stages_of(name) for name in self.parameters}
        found = summed(now.gradients, stages_of)
        if self.weights is not None:
            self.weights.leave_all(now.gradients)  # those of tied ones were read
        if self.loss_scale is not None:
            now.finite = are_finite(found.values())
            now.gradients.clear()
            now.unscaled = found = unscaled(found, self.loss_scale.scale)
        return found

    def _stages_of(self, name: str) -> list[int]:
        """Return the stages that hold a parameter, on any device, last first."""
        here = [stage for stage, names in self.held.items() if name in names]
        return sorted(self.tied.get(name, here), reverse=True)

    def _own_norms(self) -> Tensor:
        found = self._summed()
        owned = [name for name, owner in self.owner.items() if owner == self.name]
        names = [self._parameter_of(name) for name in owned]
        norms = []
        for gradient, parameter in ((found.get(name), self.parameters[name]) for name in names):
            norms.append(norm(gradient, parameter))
            if self.weights is not None and gradient is not None:
                self.weights.leave(gradient)
        self._now.norms.update(zip(owned, norms, strict=True))
        return torch.stack(norms)

    def _norms(self) -> list[Tensor]:
        """Return the norms of all gradients of the model, in its order."""
        if not self._now.norms:
            self._own_norms()
        lacking = [owner for name, owner in self.owner.items() if name not in self._now.norms]
        if lacking:
            raise RuntimeError(
                f"clipping needs the norms of device {lacking[0]}, which sends none: "
                "split the model again with clip_norm in its file"
            )
        return [self._now.norms[name] for name in self.owner]


def _wanting(named: Mapping[str, Tensor]) -> dict[str, Tensor]:
    return {name: value for name, value in named.items() if value.requires_grad}


def adamw(named: Iterable[tuple[str, nn.Parameter]]) -> Optimizer:
    """Make torch's AdamW as it comes, which is used where the model file names no optimizer."""
    return torch.optim.AdamW(list(named))

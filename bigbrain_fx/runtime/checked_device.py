"""One device of a plain pipeline, with checks of batches, numbers and copies of weights.

The device is `pipeline_device` with hooks, a policy for numbers that are not finite, and methods
for checkpoints. Bundles whose plan has more (replicas, offloading, recomputation) have `device`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, cast

import torch
from torch import Tensor

from .compared_stream import AgreeingTransport, ComparedStream
from .finite import NotFiniteError, not_finite
from .hooked_device import HookedDevice
from .pipeline_device import PipelineDevice
from .recipe import Training
from .weights import require_owners

if TYPE_CHECKING:  # a bundle has the files of what its plan uses
    from .asynchronous import Versions
    from .loss_scale import LossScale
    from .rates import RewindableRates
    from .replicas import Replicas
    from .statistics import Statistics
    from .stored_weights import StoredWeights
    from .stores import StoredState

Parts = Mapping[tuple[str, int], Tensor]  # (parameter, stage) -> sum over micro-batches
_NOTHING: Parts = MappingProxyType({})


class CheckedDevice(HookedDevice, PipelineDevice):
    """Run one device's part of every training step.

    Attributes:
        micros, members, offload, zero_stage, compiled, is_opaque: as of `device.Device`, and so
            are `replicas` to `objects`: a plain pipeline has none of them.
        empties_every: where steps run into each other and processes are replaced, each so-many-th
            ends with nothing under way: a state is of such a step's end.
        begins_empty: the next step begins so.
        stands_for: lost devices, whose files it writes: it holds all that they held.
    """

    micros: tuple[Sequence[int], ...] = ()
    members: tuple[str, ...] = ()
    offload: tuple[str, ...] = ()
    zero_stage = 0
    compiled = is_opaque = False
    empties_every = 1
    begins_empty = True
    stands_for: tuple[str, ...] = ()
    replicas: Replicas | None = None
    statistics: Statistics | None = None
    loss_scale: LossScale | None = None
    weights: StoredWeights | None = None
    stored: StoredState | None = None
    versions: Versions | None = None
    objects: Any = None  # what the user's keep by value: see `opaque_state` and `module_state`

    def __init__(
        self, transport: AgreeingTransport, stream: ComparedStream, seed: int, device: torch.device
    ) -> None:
        super().__init__(transport, stream, seed, device)
        self.on_nan = "stop"  # or another of `finite.POLICIES`
        self.updates_together = False  # not before all have all of a step's messages
        self.first_gradients: dict[str, Tensor] | None = None
        self.goes_on_after: Callable[[int], bool] = lambda _step: False  # into the next batch

    def load(self, tensors: Mapping[str, Tensor], owner: Mapping[str, str]) -> None:
        """Give the stages their weights, by their names in the model; see `PipelineDevice.load`.

        Raises:
            WeightsError: a tensor is missing or has another shape, or `owner` is not of them.
        """
        super().load(tensors, owner)
        require_owners(self.held)

    def train_with(self, training: Training) -> None:
        """Make the optimizer for this device's parameters, in the order of the model."""
        if training.scheduler is not None:
            from .rates import RewindableRates  # only bundles with a scheduler have it

            self.rates_type = RewindableRates
        super().train_with(training)

    def rewind_rates(self, step: int) -> None:
        """Let learning rates be as after so many steps."""
        if self.training.scheduler is not None:
            cast("RewindableRates", self.rates).rewind(step)

    @classmethod
    def own_micro_batches(cls) -> int:
        """How many micro-batches of a step this device computes."""
        return cls.micro_batches

    def holds(self, tensor: Tensor) -> bool:
        """Whether a tensor of a stage has its numbers here between two steps."""
        return True

    def room_for_state(self, nbytes: int) -> Any:  # noqa: ANN401  # what has bytes
        """Return room for a copy of the state."""
        return bytearray(nbytes)

    def give_up_step(self) -> None:
        """Be as this step began, which nobody has updated in: it is begun again."""
        self._saved.clear()
        self._local.clear()

    # ------------------------------------------------------------------ a step

    def _begin(self, step: int) -> None:
        super()._begin(step)
        self.first_gradients = None  # for `verify`; as large as the weights, so not kept for long

    def _run(self) -> None:
        super()._run()
        is_tied = any(channel.kind == "tied" for channel in self.channels)
        if self.members or is_tied or self.replicas is not None:
            from .copies import require_equal_copies  # only bundles with copies of a weight have it

            require_equal_copies(self)

    def forward(self, stage: int, micro: int, /, **values: Tensor) -> Any:  # noqa: ANN401
        """Run a stage forward; remember what its backward needs."""
        result = super().forward(stage, micro, **values)
        if self.loss is not None and self.loss[0] == stage and self._looks_at_once():
            self._require_finite()
        return result

    # ------------------------------------------------------------------ once a step

    def optimizer_step(self) -> None:
        """Sum tied gradients, last stage first; clip by the global norm; update the parameters.

        Nothing is updated where a number is not finite and the policy is to skip.

        Raises:
            NotFiniteError: a loss or a gradient is not finite, and the policy is to stop.
        """
        if self._may_update() and self.optimizer is not None:
            self._update(self.optimizer)
        self._now.clear()
        self._advance_rates()

    def _advance_rates(self) -> None:
        self.rates.advance()

    def _clipped(self, found: dict[str, Tensor], limit: float | None) -> dict[str, Tensor]:
        found = super()._clipped(found, limit)
        if self.step == 0:
            self.first_gradients = {self.held.divided.get(n, n): g for n, g in found.items()}
        return found

    # ------------------------------------------------------------------ finite numbers

    def _may_update(self) -> bool:
        """Whether all numbers of this step are finite, or nobody minds."""
        fine = True
        if self.on_nan == "skip":
            fine = self._not_finite(self._now.gradients) is None
        elif self.on_nan == "stop":
            self._require_finite(self._now.gradients)
        if self.on_nan == "skip" or self.updates_together:
            return self.transport.vote(self.step, self.name, fine, self.names)
        return True

    def _looks_at_once(self) -> bool:
        """Whether a number that is not finite ends the run where it is made."""
        stops = self.on_nan == "stop" and self.loss_scale is None
        return stops and self.device.type == "cpu"  # a GPU would be waited for

    def _require_finite(self, parts: Parts = _NOTHING) -> None:
        found = self._not_finite(parts)
        if found is not None:
            raise NotFiniteError(f"{found} (device {self.name})", code="BX5005")

    def _not_finite(self, parts: Parts) -> str | None:
        stage = self.loss[0] if self.loss else None
        return not_finite(self.step, stage, self._now.losses, parts)

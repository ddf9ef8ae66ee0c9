"""The trained parameters that one device holds, by their names in the model and by stage."""

from __future__ import annotations

from collections.abc import Collection, Mapping

from torch import Tensor, nn

from .coded import InputError
from .modules import Stage, set_parameter

AGAIN = "copy the bundle again, or put a checkpoint into it with `bigbrain-fx load`"


class WeightsError(InputError, ValueError):
    """Report weights that must not be used: which file and tensor, and what to do."""


class HeldWeights:
    """One Parameter for all names of a tensor, in all stages of a device; args as of that.

    Attributes:
        parameters: by their names, in the order of the model.
        of_stage: stage -> the names of its own.
        owner: every trained parameter of the whole model, in its order, and the device that answers
            for its norm.
        divided: tensors of which it has a part -> the part's name.
        untrained: that no device answers for.
    """

    def __init__(
        self, device: str, aliases: Mapping[str, str], tied: Mapping[str, tuple[int, ...]]
    ) -> None:
        self.device, self.aliases, self.tied = device, aliases, tied
        self.parameters: dict[str, nn.Parameter] = {}
        self.of_stage: dict[int, list[str]] = {}
        self.owner: Mapping[str, str] = {}
        self.divided: dict[str, str] = {}
        self.untrained: frozenset[str] = frozenset()

    def share(self, number: int, module: Stage) -> None:
        """Let a stage use the parameters that are here already under one of their names."""
        self.of_stage[number] = []
        for name, parameter in list(module.named_parameters(remove_duplicate=False)):
            if parameter.requires_grad:
                canonical = self.aliases.get(name, name)
                shared = self.parameters.setdefault(canonical, parameter)
                set_parameter(module, name, shared)
                self.of_stage[number].append(canonical)

    def put_in_order(self) -> None:
        """Keep what is trained, in the order of the model."""
        held = self.parameters
        self.untrained = frozenset(held.keys() - self.owner.keys())
        self.parameters = {name: held[name] for name in self.owner if name in held}
        self.of_stage = {
            number: [n for n in self.parameters if n in names]
            for number, names in self.of_stage.items()
        }

    def owned_by(self, device: str) -> list[str]:
        """Return the names for whose norms a device answers."""
        return [name for name, owner in self.owner.items() if owner == device]

    def parameter_of(self, name: str) -> str:
        """Return the parameter that a name in the index is of: a part's is "NAME[MEMBER]"."""
        return name if name in self.parameters else name.rpartition("[")[0]

    def stages_of(self, name: str) -> list[int]:
        """Return the stages that hold a parameter, on any device, last first."""
        here = [stage for stage, names in self.of_stage.items() if name in names]
        return sorted(self.tied.get(name, here), reverse=True)


def fill(module: nn.Module, tensors: Mapping[str, Tensor], but: Collection[str] = ()) -> None:
    """Copy tensors into a module's state, one at a time, by their names in it, `but` for some."""
    for name, held in module.state_dict().items():
        if name in but:
            continue
        if name not in tensors and name.endswith(".num_batches_tracked"):
            held.zero_()  # a counter of batch norms that inference does not read
            continue
        found = tensors[name]
        if found.shape != held.shape:
            want = f"{name} should have the shape {tuple(held.shape)}"
            raise WeightsError(f"{want}, found {tuple(found.shape)}: {AGAIN}", code="BX5183")
        held.copy_(found)

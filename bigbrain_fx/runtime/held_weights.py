"""The trained parameters that one device holds, by their names in the model and by stage."""

from __future__ import annotations

from collections.abc import Mapping

from torch import nn

from .modules import Stage, is_released, refill, set_parameter
from .weights import AGAIN, WeightsError


class HeldWeights:
    """One Parameter for all names of a tensor, in all stages of a device.

    Args:
        device: its name.
        aliases: other names of tied parameters -> the name that the optimizer sees.
        tied: parameters that several stages hold, on any device -> those stages.

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

    def know(self, owner: Mapping[str, str], divided: Mapping[str, str]) -> None:
        """Take what the bundle says of owners and parts."""
        self.owner, self.divided = owner, dict(divided)
        for alias, name in self.aliases.items():
            if alias in self.divided:
                self.divided[name] = name + self.divided[alias].removeprefix(alias)

    def share(self, number: int, module: Stage) -> None:
        """Let a stage use the parameters that are here already under one of their names."""
        self.of_stage[number] = []
        for name, parameter in list(module.named_parameters(remove_duplicate=False)):
            if parameter.requires_grad:
                canonical = self.aliases.get(name, name)
                shared = self.parameters.setdefault(canonical, parameter)
                set_parameter(module, name, shared)
                self.of_stage[number].append(canonical)

    def left_out(self, module: Stage) -> set[str]:
        """Return the weights that replicas divide; the others get their memory."""
        named = dict(module.named_parameters(remove_duplicate=False))
        empty = {name for name, parameter in named.items() if is_released(parameter)}
        divided = {name for name in empty if self.aliases.get(name, name) in self.owner}
        for name in empty - divided:
            refill(named[name])
        return divided

    def put_in_order(self) -> None:
        """Keep what is trained, in the order of the model."""
        held = self.parameters
        self.untrained = frozenset(held.keys() - self.owner.keys())
        self.parameters = {name: held[name] for name in self.owner if name in held}
        self.of_stage = {
            number: [n for n in self.parameters if n in names]
            for number, names in self.of_stage.items()
        }

    def require_owners(self) -> None:
        """Refuse an index that names what this device does not hold, or nothing at all.

        It lacks those that no gradient reaches (used under `no_grad` only): nobody trains them.

        Raises:
            WeightsError: it is such a one.
        """
        if self.untrained and not self.owner:
            raise WeightsError(
                f"weights/index.json: expected the owner of each trained parameter, as of "
                f"{min(self.untrained)!r}, found none: {AGAIN}",
                code="BX5045",
            )
        wrong = {
            n for n in self.owned_by(self.device) if self.parameter_of(n) not in self.parameters
        }
        if wrong:
            raise WeightsError(
                f"weights/index.json: {min(wrong)!r} has the owner {self.device}, "
                f"which holds none of that name: {AGAIN}",
                code="BX5046",
            )

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

"""The condition that the schedules for chains share: every device has exactly one stage."""

from __future__ import annotations

from bigbrain_fx.core import Stages
from bigbrain_fx.errors import InputError


def require_chain(name: str, stages: Stages) -> None:
    """Raise InputError, naming a device with several stages, unless `stages` is a chain."""
    if stages.is_chain:
        return
    device = next(device for device in stages.devices if len(stages.of(device)) > 1)
    indices = ", ".join(str(stage.index) for stage in stages.of(device))
    raise InputError(
        f"schedule '{name}' needs one stage per device, but device '{device}' has stages {indices}",
        code="BX1306",
        help="use --schedule list, which runs any stage graph",
    )

"""Text that ends the second device's process once, for a bundle's train.py; waits for an end."""

from __future__ import annotations

import os
import select
from pathlib import Path

from tests.support.bundles import edit_last

END_S = 60.0
_ONCE = '''def kill_once(device, step):
    """End the second device's process, the first time."""
    mark = Path(__file__).with_name("killed")
    if device.name == "d1" and step == {step} and not mark.exists():
        mark.touch()
        os.kill(os.getpid(), 9)


HOOKS.on_step_end.append(kill_once)

if __name__'''


def kill_once(bundle: Path, step: int = 2) -> None:
    """Have d1's process end itself after a step; train.py must import os."""
    edit_last(bundle / "train.py", "if __name__", _ONCE.format(step=step))


def wait_for_end(pid: int) -> None:
    """Wait until a process, which need not be a child of this one, has ended."""
    try:
        end = os.pidfd_open(pid)
    except ProcessLookupError:
        return
    with open(end, "rb", buffering=0) as file:
        assert select.select([file], [], [], END_S)[0]

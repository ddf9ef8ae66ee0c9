"""Text that ends the second device's process once, for a bundle's train.py."""

from __future__ import annotations

from pathlib import Path

from tests.support.bundles import edit_last

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

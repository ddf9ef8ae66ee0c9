"""What happened to the processes of a run: JSON lines for programs, one line for people."""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from pathlib import Path
from typing import IO, Any

Event = dict[str, Any]
Hear = Callable[[Event], None]


class EventLog:
    """Write events to a file, a JSON object a line, and hand each on.

    Every event has `time` (seconds since 1970), `generation` and `event`:

        started, spare_ready        device or spare, pid
        died                        device, pid, step, how, silent_s
        assigned                    device, pid, warm, step that it starts from
        formed                      after_s since the first death, or since the start
        caught_up                   device, step, after_s since its death, steps replayed
        hang, slow                  device, seconds in one instruction or silent
        links_lost                  device, text: connections failed though nobody died
        snapshot                    step that all devices now have, every: steps between
        skipped                     step whose update was left out, devices with bad numbers
        log_dropped                 device, step, bytes: too much to keep; log_whole: no more
        rolled_back                 step from which all devices start again
        moved                       step, devices, bundle: goes on without a device
        stopping, stopped, failed, finished
    """

    def __init__(self, path: Path | None, hear: Hear | None = None) -> None:
        self.file: IO[str] | None = None
        if path is not None:
            path.parent.mkdir(parents=True, exist_ok=True)
            self.file = path.open("a", encoding="utf-8", buffering=1)
        self.hear = hear

    def write(self, event: str, generation: int, **facts: object) -> None:
        """Write one event."""
        entry: Event = {"time": round(time.time(), 6), "generation": generation, "event": event}
        entry |= {k: round(v, 6) if isinstance(v, float) else v for k, v in facts.items()}
        if self.file is not None:
            self.file.write(json.dumps(entry) + "\n")
        if self.hear is not None:
            self.hear(entry)

    def close(self) -> None:
        """Close the file."""
        if self.file is not None:
            self.file.close()


def status(entry: Event) -> str | None:
    """Return what people want to read of an event; None: nothing."""
    words = {
        "died": "{device} {how} {where}",
        "assigned": "{device} goes on as process {pid} from step {step}",
        "formed": "all devices are connected, {after_s:.2f} s later",
        "caught_up": "{device} has caught up at step {step}: {after_s:.2f} s, {steps} steps again",
        "hang": "{device} hangs: no progress for {seconds:.0f} s; ending it",
        "slow": "{device} is slow: {seconds:.0f} s in one instruction",
        "links_lost": "connections were lost: {text}",
        "stopping": "stopping before step {step}",
        "skipped": "no update at step {step}: not finite on {devices}",
        "log_dropped": "WARNING: the messages that {device} keeps have grown to {bytes} bytes and "
        "were dropped: until the next snapshot a death takes all devices back",
        "log_whole": "a death takes back the dead device only, again",
        "rolled_back": "all devices start again from step {step}",
        "moved": "going on from step {step} on {devices}: {bundle}",
    }
    text = words.get(entry["event"])
    if text is None or (entry["event"] in ("formed", "assigned") and entry["generation"] == 0):
        return None
    where = f"in step {entry['step']}" if entry.get("step", -1) >= 0 else "before its first step"
    return f"[generation {entry['generation']}] {text.format(**entry, where=where)}"

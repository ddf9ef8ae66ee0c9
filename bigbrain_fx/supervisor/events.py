"""Events of the processes of a run: JSON lines for programs, one line for people."""

from __future__ import annotations

import errno
import json
import os
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

Event = dict[str, Any]
Hear = Callable[[Event], None]

FLAGS = os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC | os.O_NONBLOCK
LONGEST_WHY = 200  # characters of an error in a line for people
FULL = (errno.ENOSPC, errno.EDQUOT)  # may pass; a folder that is none, or another's, does not


class EventLog:
    """Write events to a file, a JSON object a line, and hand each on; the docs list them.

    An event that the file does not take is lost, and the run goes on. The first loss is an event of
    its own, for `hear`.

    Raises:
        OSError: the file cannot be opened, and not because its disk is full.
    """

    def __init__(self, path: Path | None, hear: Hear | None = None) -> None:
        self.path = path
        self.file: int | None = None
        self.hear = hear
        self.is_whole = True  # the file ends with a whole line
        self.is_told = False  # that an event was lost
        if path is not None:
            try:
                path.parent.mkdir(parents=True, exist_ok=True)
                self.file = os.open(path, FLAGS, 0o666)
            except OSError as error:
                if error.errno not in FULL:
                    raise
                self._lose(error)

    def write(self, event: str, generation: int, **facts: object) -> None:
        """Write one event."""
        entry: Event = {"time": round(time.time(), 6), "generation": generation, "event": event}
        entry |= {k: round(v, 6) if isinstance(v, float) else v for k, v in facts.items()}
        self._keep(json.dumps(entry) + "\n")
        if self.hear is not None:
            self.hear(entry)

    def _keep(self, line: str) -> None:
        if self.file is None:
            return
        data = (line if self.is_whole else f"\n{line}").encode()
        try:
            written = os.write(self.file, data)
            self.is_whole = written == len(data)
            if not self.is_whole:
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        except OSError as error:
            self._lose(error)

    def _lose(self, error: OSError) -> None:
        if self.is_told:
            return
        self.is_told = True
        self.write("events_lost", -1, path=str(self.path), text=str(error.strerror or error))

    def close(self) -> None:
        """Close the file."""
        if self.file is not None:
            with suppress(OSError):
                os.close(self.file)
            self.file = None


def status(entry: Event) -> str | None:
    """Return what people want to read of an event; None: nothing."""
    words = {
        "died": "{device} {how} {where}{why}",
        "assigned": "{device} goes on as process {pid} from step {step}",
        "took_state": "{device} has its state of step {step} from {peers}",
        "state_lost": "WARNING: {text}: all devices begin again, from the newest checkpoint, or "
        "from the start where there is none",
        "formed": "all devices are connected, {after_s:.2f} s later",
        "caught_up": "{device} has caught up at step {step}: {after_s:.2f} s, {steps} steps again",
        "hang": "{device} hangs: no progress for {seconds:.0f} s; ending it",
        "starved": "{device} had no processor for {seconds:.0f} s of an instruction: this host is "
        "busy, and that time does not count for --hang",
        "slow": "{device} is slow: {seconds:.0f} s in one instruction",
        "links_lost": "connections were lost: {by}{text}",
        "stopping": "stopping before step {step}",
        "skipped": "no update at step {step}: not finite on {devices}",
        "log_dropped": "WARNING: the messages that {device} keeps have grown to {bytes} bytes and "
        "were dropped: until the next in-memory checkpoint a death takes all devices back",
        "snapshots_large": "WARNING: in-memory checkpoints take {bytes} bytes of memory, and half "
        "of that is still to come of {left} that are left here: --memory-checkpoint-dir FOLDER "
        "keeps them on a disk, --no-replay none",
        "log_whole": "a death takes back the dead device only, again",
        "log_lost": "WARNING: what {device} writes is not kept: {text}",
        "no_spare": "WARNING: there is no spare: {text}",
        "left": "WARNING: process {pid} of {device} could not be ended",
        "events_lost": "WARNING: events are lost, the run goes on: {path}: {text}",
        "suspect": "SUSPECT: {device} in step {step}: a spare computes otherwise {text}",
        "unchecked": "WARNING: step {step} of {device} was not computed again: {text}",
        "rolled_back": "all devices start again from step {step}",
        "missed": "WARNING: no checkpoint at step {step}: {text}; training goes on, and "
        "{newest_kept}",
        "warned": "WARNING: {text}",
        "committed_again": "checkpoints are written again: step {step}, after {missed} were missed",
        "rescued": "from step {step} checkpoints are in {folder}: go on from there with --resume",
        "at_risk": "WARNING: the last {missed} checkpoints were missed, and {newest_kept}: what "
        "was trained up to step {step} is in the files of --save only, or nowhere",
        "replica_lost": "replica {replica} ({devices}) is lost for good, {text}: the others have "
        "its micro-batches from step {step}, which they begin again; {left} replicas stand",
        "standing": "{replicas} replicas stand at the end: {devices}; lost: {lost}",
        "moved": "going on from step {step} on {devices}: {bundle}",
    }
    text = words.get(entry["event"])
    if entry["event"] == "assigned" and entry.get("step", 0) < 0:
        text = "{device} goes on as process {pid}"
    if text is None or (entry["event"] in ("formed", "assigned") and entry["generation"] == 0):
        return None
    if entry["event"] in ("missed", "rescued") and entry["row"] > 1:  # one line for all in a row
        return None
    where = f"in step {entry['step']}" if entry.get("step", -1) >= 0 else "before its first step"
    newest = entry.get("newest", -1)
    kept = f"the newest checkpoint is of step {newest}" if newest >= 0 else "there is no checkpoint"
    first = (str(entry.get("text") or "").splitlines() or [""])[0][:LONGEST_WHY]
    why = f": {first}" if first and entry["event"] == "died" else ""
    by = f"{entry['device']}: " if "device" in entry else ""
    said = text.format(**entry, where=where, newest_kept=kept, why=why, by=by)
    return said if entry["generation"] < 0 else f"[generation {entry['generation']}] {said}"

"""Processes on other hosts, and the devices of a host whose head is lost: asked for a last commit.

    head ── orders ──▶ agent ── orders ──▶ device        what passes by is remembered: what the head
    head ◀── words ─── agent ◀── words ─── device        would still have answered is answered here

A device that has voted on a step may not know whether all have. It then cannot know whether the
head's own devices have gone past it; a device of this host that knows reports it. From there
on no device takes another step. This file knows neither torch nor what a commit is.
"""

from __future__ import annotations

import json
import os
import subprocess
import threading
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from .pipe import Orders
from .starving import ToldStarving

LAST_COMMIT = "last_commit"  # the order, and what a program must know to be given it
MOST_PEEKED = 1 << 16  # bytes of a word; longer ones are none of those looked for
Places = Sequence[tuple[str, Sequence[str]]]  # each host, and its devices

Object = dict[str, Any]


class Remaining:
    """An agent's knowledge of its devices, and their choices when the head is lost.

    Args:
        host: the agent's.
        places: all hosts but the head's, in the order of the plan.
        orders: to each process, by number.
    """

    def __init__(self, host: str, places: Places, orders: Mapping[int, Orders]) -> None:
        self.host, self.places, self.orders = host, places, orders
        self.devices: dict[int, str] = {}  # of the processes that have been told what to be
        self.able: set[int] = set()  # processes whose program can write a last commit
        self.firsts: dict[str, str] = {}  # what was said first, as the head has told it
        self.asked: dict[tuple[int, str], str] = {}  # what it has not answered yet
        self.voted: Object | None = None  # the newest answer to votes
        self.newest = -1  # the step of the newest commit that was heard of
        self.is_alone = False  # the head is lost
        self.kept: dict[int, Object] = {}  # what each device says of the last commit
        self.why = "its devices did not say that they had written one"  # there is none

    # ------------------------------------------------------------------ while there is a head

    def pass_order(self, number: int, order: Mapping[str, Any]) -> None:
        """Remember the orders of a process."""
        do = order.get("do")
        if do == "be" and order.get("device"):
            self.devices[number] = order["device"]
        elif do == "voted":
            self.voted = {"step": order["step"], "yes": order["yes"]}
        elif do == "first":
            self.firsts[order["what"]] = order["text"]
            self.asked.pop((number, order["what"]), None)
        elif do == "post" and order.get("key") == "kept":
            steps = (int(name.split("-")[1]) for name in json.loads(order["text"]))
            self.newest = max(steps, default=self.newest)

    def pass_word(self, number: int, packet: bytes) -> None:
        """Remember what a process says; where there is no head any more, act on it."""
        said = _object_of(packet)
        what = said.get("say")
        if what == "hello" and LAST_COMMIT in said.get("knows", ()):
            self.able.add(number)
        elif what == "first":
            self._ask(number, said["what"], said["text"])
        elif what == "post" and self.is_alone:
            self._tell("post", key=said["key"], text=said["text"])
        elif what == "kept" and self.is_alone:
            self.kept[number] = said

    def end(self, number: int) -> None:
        """Note that a process has ended."""
        self.devices.pop(number, None)

    # ------------------------------------------------------------------ when it is lost

    def begin(self, *, is_gone: bool) -> bool:
        """Ask all devices for a last commit; return whether there is one to wait for.

        Args:
            is_gone: the head's process has ended; else it may be there, and go on without us.
        """
        self.is_alone = True
        if not self.devices:
            self.why = "no device was at work here"
            return False
        if self.devices.keys() - self.able:
            self.why = "the bundle is older than last checkpoints: split again"
            return False
        if self.voted is not None:
            self._tell("voted", **self.voted)
        for (number, what), text in sorted(self.asked.items()):
            self._answer(number, what, text)
        places = [[host, list(devices)] for host, devices in self.places]
        here = {"host": self.host, "here": sorted(self.devices.values())}
        self._tell(LAST_COMMIT, **here, places=places, is_gone=is_gone)
        return True

    @property
    def is_over(self) -> bool:
        """Whether every device has said what it kept, or has ended."""
        return not self.devices.keys() - self.kept.keys()

    @property
    def commit(self) -> Object | None:
        """Return step and file of the last commit; None: there is none."""
        return next((said for said in self.kept.values() if said.get("file")), None)

    @property
    def why_none(self) -> str:
        """Why there is none."""
        found = [str(said["text"]) for said in self.kept.values() if said.get("text")]
        return found[0] if found else self.why

    def _ask(self, number: int, what: str, text: str) -> None:
        if self.is_alone:
            self._answer(number, what, text)
        else:
            self.asked[number, what] = text

    def _answer(self, number: int, what: str, text: str) -> None:
        self.orders[number].give("first", what=what, text=self.firsts.setdefault(what, text))

    def _tell(self, do: str, **facts: Any) -> None:  # noqa: ANN401  # JSON
        for number in self.devices:
            self.orders[number].give(do, **facts)


def _object_of(packet: bytes) -> Object:
    if len(packet) > MOST_PEEKED:
        return {}
    try:
        found = json.loads(packet)
    except (ValueError, RecursionError):
        return {}
    return found if isinstance(found, dict) else {}


def said_of(remaining: Remaining, *, is_gone: bool) -> str:
    """Say what is kept, and how to go on."""
    commit = remaining.commit
    before = f" (the one before was of step {remaining.newest})" if remaining.newest >= 0 else ""
    if commit is None:
        return _nothing(remaining)
    step, file = int(commit["step"]), str(commit["file"])
    folder, _, name = file.rpartition("/")
    on = _how_on(folder)
    if is_gone:
        return f"the devices here have committed step {step}{before}: {file}. {on}"
    counts = name.removesuffix(".set-aside")
    return (
        f"the first host may still be there, and go on without this one, so what the devices here "
        f"hold, step {step}{before}, is set aside: {file}. If the first host has gone on, go on "
        f"from its checkpoints and remove this. If it is lost: mv {file} {folder}/{counts}. {on}"
    )


def _nothing(remaining: Remaining) -> str:
    """Say that there is no last commit, and what there is."""
    if remaining.newest < 0:
        found = "go on from the newest checkpoint with --resume, on all hosts, where there is one"
    else:
        found = (
            f"the newest is of step {remaining.newest}: go on from it with --resume, on all hosts; "
            "what came after is computed again"
        )
    return f"nothing was committed since ({remaining.why_none}): {found}"


def _how_on(folder: str) -> str:
    return (
        f"It has the states of all devices: where the first host is back, copy {folder} to it "
        "unless all hosts see it, and give all of them --resume; without it, "
        f"bigbrain-fx resplit BUNDLE -d LEFT.json --checkpoint-dir {folder} -o NEW, where "
        "LEFT.json names "
        "the devices that are left: another host listens then"
    )


class RemoteProcess:
    """A process behind a bridge, as `subprocess.Popen` shows one."""

    def __init__(self, kill: Callable[[], None]) -> None:
        self.pid = -1
        self.code: int | None = None
        self.is_lost = False  # with its host
        self.starving = ToldStarving()
        self.ended = threading.Event()
        self.end, self._end = os.pipe()  # readable once it has ended
        self._kill = kill

    def poll(self) -> int | None:
        """Return its exit code; None while it runs."""
        return self.code

    def wait(self, timeout: float | None = None) -> int:
        """Wait for its end; `subprocess.TimeoutExpired` after `timeout` seconds."""
        if not self.ended.wait(timeout) or self.code is None:
            raise subprocess.TimeoutExpired(f"process {self.pid}", timeout or 0.0)
        return self.code

    def kill(self) -> None:
        """End it."""
        self._kill()

    def dispose(self) -> None:
        """Give the pipe back."""
        if self.end >= 0:
            os.close(self.end)
            self.end = -1

    def has_ended(self, code: int) -> None:
        """Take note of its end."""
        if self.code is None:
            self.code = code
            os.close(self._end)
            self.ended.set()

"""Requests -> slots of a fixed shape -> answers: the queue, what is under way, and who is gone.

    ask ──▶ waiting ──take: as many as fit──▶ slot ──▶ devices, several slots at once ──▶ answers

A slot starts as soon as a device can take it, with the requests that wait then. One request alone
is not held up, and many share slots. It knows no HTTP.
"""

from __future__ import annotations

import math
import subprocess
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from bigbrain_fx.errors import BigBrainError, InputError
from bigbrain_fx.serving.crew import ServingCrew, SlotSpec
from bigbrain_fx.serving.rows import Raw, RawTensor, decode, encode, joined, taken

_FORGETTING = 0.8  # of the mean seconds of a slot


class UnansweredError(Exception):
    """Say why a request has no answer, though it was a good one."""

    def __init__(self, what: str, *, code: str) -> None:
        super().__init__(what)
        self.code = code


class QueueFullError(UnansweredError):
    """Say that as many requests wait as may; `retry_s` is when a place may be free."""

    def __init__(self, limit: int, retry_s: int) -> None:
        super().__init__(
            f"{limit} requests are waiting, and no more may: try again in {retry_s} s",
            code="BX3114",
        )
        self.retry_s = retry_s


@dataclass(eq=False)
class Request:
    """Some rows that one client asked for.

    Attributes:
        is_gone: whether the client has left; then it is not computed.
        epoch: how often the processes have been started again, where it counts: what they keep
            dies with them.
        slot, start: which slot it was in, from which row on.
    """

    tensors: Raw
    rows: int
    is_gone: Callable[[], bool] = field(default=lambda: False)
    epoch: int | None = None
    slot: int = -1
    start: int = 0
    outputs: Mapping[str, RawTensor] = field(default_factory=dict)
    error: str = ""
    done: threading.Event = field(default_factory=threading.Event)

    def fail(self, error: str) -> None:
        """Say why there will be no answer."""
        self.error = error
        self.done.set()


@dataclass
class Counted:
    """Counters of a server."""

    slots: int = 0
    rows: int = 0
    requests: int = 0
    left: int = 0  # clients that had gone before their rows were computed
    restarts: int = 0


class Engine:
    """A bundle's processes and the requests for them.

    Processes that die are started again, and the requests of the slots under way fail with a
    message. It ends where processes die before any slot was answered.

    Attributes:
        filling: a row that fills slots up; None leaves that to the devices.
        slot_s: mean seconds from a slot's start to its answer.
        ended: why nothing is answered any more; None while it works.
    """

    def __init__(
        self,
        start: Callable[[], ServingCrew],
        depth: int,
        limit: int,
        ready_s: float,
        filling: Raw | None = None,
    ) -> None:
        self.start, self.depth, self.limit, self.ready_s = start, depth, limit, ready_s
        self.filling = filling
        self.counted, self.slot_s = Counted(), 0.0
        self.ended: BigBrainError | None = None
        self._moved = threading.Condition()
        self._waiting: deque[Request] = deque()
        self._under_way: deque[tuple[float, tuple[Request, ...]]] = deque()
        self._closing = False
        self._crew = self.start()
        self.spec = self._heard()
        self.is_ready = True
        self._threads = [
            threading.Thread(target=run, daemon=True, name=run.__name__)
            for run in (self._send_slots, self._read_answers)
        ]
        for thread in self._threads:
            thread.start()

    def _heard(self) -> SlotSpec:
        """Wait until the processes are ready; end them if they will not be."""
        try:
            return self._crew.hello(time.monotonic() + self.ready_s)
        except BaseException:
            self._crew.stop()
            raise

    @property
    def processes(self) -> Mapping[str, subprocess.Popen[bytes]]:
        """The processes that work now, by device."""
        return self._crew.processes

    @property
    def waiting(self) -> int:
        """How many requests wait for a slot."""
        return len(self._waiting)

    @property
    def under_way(self) -> int:
        """How many slots the devices have."""
        return len(self._under_way)

    def ask(self, request: Request) -> None:
        """Queue a request; its `done` is set when it has outputs or an error.

        Raises:
            QueueFullError: too many wait.
            UnansweredError: the server is closing.
        """
        assert 0 < request.rows <= self.spec.rows, "a request fits into one slot"
        with self._moved:
            if self._closing or self.ended is not None:
                raise UnansweredError("the server is closing", code="BX3115")
            if len(self._waiting) >= self.limit:
                each_s = self.slot_s * (len(self._waiting) + len(self._under_way))
                raise QueueFullError(self.limit, max(1, math.ceil(each_s)))
            self._waiting.append(request)
            self._moved.notify_all()

    def close(self) -> None:
        """Answer what is under way, refuse what waits, end the processes."""
        with self._moved:
            self._closing = True
            self._refuse("the server is closing")
            self._moved.notify_all()
        self._crew.stop()
        for thread in self._threads:
            thread.join()
        self._crew.close()

    # ------------------------------------------------------------------ to the devices

    def _send_slots(self) -> None:
        while True:
            with self._moved:
                self._moved.wait_for(lambda: self._closing or self._can_send())
                if self._closing:
                    return
                taken_now = self._taken()
                if taken_now:
                    self._send(taken_now)

    def _can_send(self) -> bool:
        return bool(self._waiting) and self.is_ready and len(self._under_way) < self.depth

    def _taken(self) -> tuple[Request, ...]:
        """Take the requests of the next slot, in the order they came."""
        found: list[Request] = []
        rows = 0
        while self._waiting and rows + self._waiting[0].rows <= self.spec.rows:
            request = self._waiting.popleft()
            if request.is_gone():
                self.counted.left += 1
                request.fail("the client has gone")
                continue
            if request.epoch not in (None, self.counted.restarts):
                request.fail("a device's process died, and what it had read of this with it")
                continue
            request.start = rows
            rows += request.rows
            found.append(request)
            if self.spec.whole:  # what all rows of a slot share is of one request
                break
        return tuple(found)

    def _send(self, requests: tuple[Request, ...]) -> None:
        for request in requests:
            request.slot = self.counted.slots
        self.counted.slots += 1
        self._under_way.append((time.monotonic(), requests))
        parts = [request.tensors for request in requests]
        if self.filling is not None:
            rows = sum(request.rows for request in requests)
            parts += [self.filling] * (self.spec.rows - rows)
        self._crew.send(encode(joined(parts) if len(parts) > 1 else parts[0]))

    # ------------------------------------------------------------------ from the devices

    def _read_answers(self) -> None:
        answered = 0
        while True:
            content = self._crew.receive()
            if content is not None:
                self._answer(decode(content))
                answered += 1
                continue
            if not self._again(worth_it=answered > 0):
                return
            answered = 0

    def _answer(self, outputs: Mapping[str, RawTensor]) -> None:
        with self._moved:
            begun, requests = self._under_way.popleft()
            took = time.monotonic() - begun
            self.slot_s = _FORGETTING * self.slot_s + (1 - _FORGETTING) * took
            self.counted.requests += len(requests)
            self.counted.rows += sum(request.rows for request in requests)
            self._moved.notify_all()
        for request in requests:
            request.outputs = {
                name: taken(outputs[name], dim or 0, request.start, request.rows)
                for name, dim in self.spec.outputs.items()
            }
            request.done.set()

    def _again(self, worth_it: bool) -> bool:
        """Start the processes anew after one has died; return whether there are any."""
        with self._moved:
            self.is_ready = False
            lost = [request for _, requests in self._under_way for request in requests]
            self._under_way.clear()
        for request in lost:
            request.fail("a device's process died while it computed this")
        try:
            return not self._closing and self._restarted(worth_it)
        except BigBrainError as error:
            self._end(error)
            return False

    def _restarted(self, worth_it: bool) -> bool:
        error = self._crew.failure()
        self._crew.stop()
        if not worth_it:
            raise error
        with self._moved:
            if self._closing:
                return False
            self._crew.close()
            self._crew = self.start()
        self._heard()
        with self._moved:
            self.is_ready = True
            self.counted.restarts += 1
            self._moved.notify_all()
        return True

    def _end(self, error: BigBrainError) -> None:
        with self._moved:
            self.ended = error
            self._refuse(error.what)
            self._moved.notify_all()

    def _refuse(self, error: str) -> None:
        while self._waiting:
            self._waiting.popleft().fail(error)


def require_rows(spec: SlotSpec) -> None:
    """Refuse a bundle whose outputs are not of single rows.

    Raises:
        InputError: one has a value for a micro-batch; names it.
    """
    without = [name for name, dim in spec.outputs.items() if dim is None]
    if without:
        raise InputError(
            f"output {without[0]!r} has one value for a whole micro-batch, not one for each row",
            code="BX3116",
            help="let the model return it per row, or use `run --inputs --outputs`",
        )

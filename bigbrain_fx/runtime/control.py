"""A device process's line to its supervisor: orders come in, progress goes out.

Orders have "do", what is said has "say". One thread listens, and tells at an even pace how far the
main thread has come, so that a hang shows. The line (`packets`) closes when the supervisor ends,
and then this process ends. This file knows neither torch nor steps.
"""

from __future__ import annotations

import io
import os
import signal
import socket
import sys
import threading
import time
import traceback
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from types import MappingProxyType
from typing import Any, NoReturn

from .coded import CodedError
from .launcher import end_with_parent
from .limits import SHORT, is_of_memory, shown, told
from .packets import LATER, LATER_S, Duty, HeadLostError, JsonLine, Meeting
from .peers import CONTROL, PEER_LOST, PeerLostError
from .protocol import LastWord, Wait


class _Log(io.RawIOBase):
    """A file to write to; what a full disk does not take is dropped: no print ends a training."""

    def __init__(self, fd: int) -> None:
        self.fd = fd

    def writable(self) -> bool:
        return True

    def fileno(self) -> int:
        return self.fd

    def write(self, data: Any) -> int:  # noqa: ANN401  # any buffer
        rest = memoryview(data).cast("B")
        with suppress(OSError):
            while rest:
                rest = rest[os.write(self.fd, rest) :]
        return len(memoryview(data).cast("B"))


def let_prints_be_lost() -> None:
    """Let prints of this process be lost, rather than raise, where its log cannot take them."""
    for name in ("stdout", "stderr"):
        old = getattr(sys, name)
        if old is not None:
            fd = old.fileno()
            setattr(
                sys, name, io.TextIOWrapper(_Log(fd), old.encoding, "replace", None, True, True)
            )


LONGEST_TEXT = 2_000  # characters of an error that travel


def last_word(error: BaseException, exit_code: int) -> LastWord:
    """Return what a process says of the error that ends it, short enough to travel."""
    code = error.code if isinstance(error, CodedError) else ""
    words = told(error)[:LONGEST_TEXT]
    return LastWord(words, exit_code, type(error).__name__, code, is_of_memory(error))


def log_limit() -> int | None:
    """Return how many bytes of sent messages this process may keep; None: nobody has said."""
    given = os.environ.pop("BIGBRAIN_LOG_BYTES", None)
    return None if given is None else int(given)


def said(error: BaseException) -> str:
    """Return an error as one line: its class, its code and its words."""
    return last_word(error, 1).said


class Control:
    """The line of this process; `inherited` finds it.

    Args:
        line: a connected SOCK_SEQPACKET socket.
        beat_s: seconds between two words on how far the main thread is.
    """

    def __init__(self, line: socket.socket, beat_s: float) -> None:
        self.line = JsonLine(line)
        self.beat_s = beat_s
        self.changed = threading.Condition()
        self.duties: deque[Any] = deque()  # a `Duty`, or a feature's
        self.orders: dict[str, Callable[..., None]] = {}  # what features obey, see `listen_to`
        self.features: dict[str, Any] = {}  # by their files
        self.generation = -1  # the newest that was announced
        self.meeting: Meeting | None = None
        self.values: dict[str, bytes] = {}
        self.said_first: dict[str, str] = {}
        self.board: dict[str, str] = {}
        self.voted: dict[int, bool] = {}
        self.epoch = -1
        self.every: int | None = None
        self.stop_at: int | None = None
        self.log_bytes = log_limit()
        self.ended = False
        self.last: object = None  # a `LastDuty`: the supervisor that decides is lost
        self.peers = False  # a dead device's state comes from its peers, not from a snapshot
        self.lost: frozenset[str] = frozenset()  # devices that the run goes on without
        self.fed = False  # the caller's process sends the batches, see `feeding`
        self.batch_bytes = 0  # of the newest of those
        self.suspect = 0.0  # the share of steps that spares compute again
        self.is_busy: Callable[[], bool] = lambda: False  # with what is no instruction
        self.on_generation: Callable[[], None] = lambda: None
        self._paused = False
        self._step = -1
        self._instruction = 0
        self._waiting: Wait | None = None

    @staticmethod
    def inherited() -> Control:
        """Return the line that a supervisor gave this process, and start to listen."""
        number = os.environ.pop(CONTROL)
        line = socket.socket(fileno=os.dup(int(number)))
        if int(number) == 0:  # the line came as stdin, which user code may read
            with open(os.devnull, encoding="utf-8") as nothing:
                os.dup2(nothing.fileno(), 0)
        end_with_parent()
        for known in (signal.SIGINT, signal.SIGTERM):  # the supervisor's to handle; what this
            signal.signal(known, lambda *_: None)  # process starts does not inherit a function
        let_prints_be_lost()
        control = Control(line, float(os.environ.pop("BIGBRAIN_BEAT_S", "1")))
        thread = threading.Thread(target=control.listen, daemon=True, name="control")
        try:
            thread.start()
        except RuntimeError as error:
            _HELD.append(control)  # once its line is closed this process is killed
            control.fail(error, SHORT)
        return control

    # ------------------------------------------------------------------ for the main thread

    def say(self, say: str, **facts: object) -> None:
        """Tell the supervisor something."""
        try:
            self.line.say({"say": say, **facts})
        except OSError:  # it is gone
            _leave()

    def fail(self, error: BaseException, code: int) -> NoReturn:
        """Report why this process ends, and end it with a message."""
        self.say_failed(error, code)
        print(shown(error), file=sys.stderr)
        sys.exit(code)

    def say_failed(self, error: BaseException, code: int) -> None:
        """Say why this process ends, and in which step: a beat may be a while ago."""
        self._beat()
        self.say("failed", **last_word(error, code)._asdict())

    def tick(self) -> None:
        """Count an instruction: this thread is alive."""
        self._instruction += 1

    @contextmanager
    def waiting(self, text: str, device: str = "", kind: str = "") -> Iterator[None]:
        """Say, while inside, for what this thread waits, as `Wait` has it."""
        self._waiting = Wait(device, text, kind)
        try:
            yield
        finally:
            self._waiting = None
            self._instruction += 1

    def listen_to(self, orders: Mapping[str, Callable[..., None]]) -> None:
        """Let a feature obey orders of its own; each gets the files that came with it."""
        self.orders.update(orders)

    def next_duty(self) -> Any:  # noqa: ANN401  # a `Duty`, or a feature's
        """Wait for what to be."""
        with self.changed:
            self.changed.wait_for(lambda: self.duties)
            return self.duties.popleft()

    def begin(self, step: int, *, has_begun: bool = False) -> bool:
        """Say whether `step` may begin; wait while the supervisor finds the step to stop at.

        One that `has_begun`, in the step before, is run: the next that has not is where it stops.
        """
        with self.changed:
            self._until_decided(lambda: not self._paused or self.stop_at is not None)
            if self.stop_at is not None and step >= self.stop_at and not has_begun:
                return False
            self._step = step
        self.tick()
        return True

    def wait_generation(self, above: int) -> int:
        """Wait until a generation newer than `above` is announced."""
        with self.changed:
            self.changed.wait_for(lambda: self.generation > above)
            return self.generation

    def meet(
        self,
        generation: int,
        expected: Mapping[int, int],
        layouts: Mapping[str, object],
        lacks: int | None = None,
    ) -> Meeting | None:
        """Report which messages this device waits for, and wait until all have reported.

        `lacks`: the step whose beginning it has to take from its peers.

        Returns:
            None when the generation has been given up meanwhile.
        """
        more = {} if lacks is None else {"lacks": lacks}
        self.say("ready", generation=generation, expected=expected, layouts=layouts, **more)
        with self.changed:
            self._until_decided(
                lambda: (
                    self.generation > generation
                    or (self.meeting is not None and self.meeting.generation == generation)
                )
            )
            return self.meeting if self.generation == generation else None

    def put(self, key: str, value: bytes) -> None:
        """Tell all devices of the newest generation a value."""
        self.say("put", key=key, value=value.hex())

    def _until_decided(self, is_so: Callable[[], bool]) -> None:
        """Wait for what only the supervisor that decides brings about.

        Raises:
            HeadLostError: it is lost.
        """
        self.changed.wait_for(lambda: is_so() or self.last is not None)
        if self.last is not None and not is_so():
            raise HeadLostError("the supervisor that decides is lost", code="BX5021")

    def take(self, key: str, generation: int, timeout_s: float) -> bytes:
        """Wait for a value that some device has put.

        Raises:
            PeerLostError: the generation has been given up.
            TimeoutError: it did not come in time.
        """
        with self.changed:
            found = self.changed.wait_for(
                lambda: key in self.values or self.generation > generation, timeout_s
            )
            if self.generation > generation:
                raise PeerLostError(f"generation {generation} was given up", code="BX5022")
            if not found:
                raise TimeoutError(f"no device has put {key} within {timeout_s:g} s")
            return self.values[key]

    def wake(self) -> None:
        """Let those who wait look again."""
        with self.changed:
            self.changed.notify_all()

    def wait_unless_moved(self, generation: int, is_done: Callable[[], bool]) -> None:
        """Wait until something is done; `wake` says when to look.

        Raises:
            PeerLostError: the generation has been given up.
        """
        with self.changed:
            self.changed.wait_for(lambda: is_done() or self.generation > generation)
            if self.generation > generation:
                raise PeerLostError(f"generation {generation} was given up", code="BX5023")

    def post(self, key: str, text: str) -> None:
        """Put something on the board of all processes, also of those that start later."""
        self.say("post", key=key, text=text)

    def until(self, is_so: Callable[[], bool], generation: int, text: str, kind: str = "") -> bool:
        """Wait until something is so; False if the devices meet anew before it is."""
        with self.waiting(text, kind=kind), self.changed:
            self.changed.wait_for(lambda: is_so() or self.generation > generation)
            return is_so()

    @property
    def stops(self) -> bool:
        """Whether this device has been asked to stop; `begin` knows before which step."""
        return self._paused or self.stop_at is not None

    def wait_end(self, generation: int) -> bool:
        """Wait until all devices have finished; False if they meet anew before."""
        with self.changed:
            self.changed.wait_for(lambda: self.ended or self.generation > generation)
            return self.ended

    # ------------------------------------------------------------------ the listening thread

    def listen(self) -> None:
        """Take orders until the line closes; then, or if anything goes wrong, end this process.

        Without this thread it would receive and report nothing, and look like one that hangs.
        """
        told = 0.0
        try:
            while True:
                if time.monotonic() - told >= self.beat_s:
                    told = time.monotonic()
                    self._beat()
                try:
                    self._take_order()
                except ConnectionError:
                    _leave()  # the supervisor has ended
                except OSError as error:
                    if error.errno not in LATER:
                        raise
                    time.sleep(LATER_S)
        except BaseException:  # whatever it is: the main thread would not see it
            traceback.print_exc()
        finally:
            _leave()

    def _beat(self) -> None:
        if self.is_busy():
            self._instruction += 1
        waiting = self._waiting
        self.say("beat", n=self._instruction, step=self._step, waiting=waiting)

    def _take_order(self) -> None:
        """Take one, if it comes before the next beat."""
        taken = self.line.take(self.beat_s)
        if taken is not None:
            self._obey(*taken)

    def _obey(self, order: dict[str, Any], files: tuple[int, ...]) -> None:
        do = order.pop("do")
        with self.changed:
            obey = self.orders.get(do) or getattr(self, f"_do_{do}")
            obey(files=files, **order)
            self.changed.notify_all()

    def _do_be(self, files: tuple[int, ...], device: str | None, **rest: Any) -> None:  # noqa: ANN401
        rest["slots"] = tuple(rest.get("slots", ()))
        self.epoch = rest.get("epoch", -1)
        self.every = rest.pop("every", None)
        self.stop_at = rest.pop("stop_at", None)
        self.fed = rest.pop("fed", False)
        self.peers = rest.pop("peers", False)
        self.lost = frozenset(rest.pop("lost", ()))
        self.suspect = rest.pop("suspect", 0.0)
        self.duties.append(Duty(device, files=files, **rest))

    def _do_generation(self, files: tuple[int, ...], number: int, lost: Sequence[str] = ()) -> None:
        self.generation, self.lost = number, frozenset(lost)
        self.values.clear()
        self.on_generation()

    def _do_go(
        self,
        files: tuple[int, ...],
        generation: int,
        expected: dict[str, int],
        layouts: dict[str, tuple[list[int], list[int]]],
        peers: bool = False,
        lacking: Mapping[str, int] = MappingProxyType({}),
    ) -> None:
        self.peers = peers
        self.meeting = Meeting(
            generation,
            {int(tag): number for tag, number in expected.items()},
            {int(tag): (tuple(a), tuple(b)) for tag, (a, b) in layouts.items()},
            lacking,
        )

    def _do_value(self, files: tuple[int, ...], key: str, value: str) -> None:
        self.values[key] = bytes.fromhex(value)

    def _do_first(self, files: tuple[int, ...], what: str, text: str) -> None:
        self.said_first[what] = text

    def _do_post(self, files: tuple[int, ...], key: str, text: str) -> None:
        self.board[key] = text

    def _do_forget(self, files: tuple[int, ...], keys: list[str]) -> None:
        for key in keys:
            self.board.pop(key, None)

    def _do_voted(self, files: tuple[int, ...], step: int, yes: bool) -> None:
        self.voted[step] = yes
        if self.peers:
            self.epoch = step + 1  # nobody wants a message of this step again

    def _do_epoch(self, files: tuple[int, ...], step: int) -> None:
        self.epoch = step

    def _do_every(self, files: tuple[int, ...], steps: int) -> None:
        self.every = steps

    def _do_pause(self, files: tuple[int, ...]) -> None:
        self._paused = True
        self.say("at", step=self._step)

    def _do_stop_at(self, files: tuple[int, ...], step: int) -> None:
        self.stop_at = step

    def _do_end(self, files: tuple[int, ...]) -> None:
        self.ended = True


def _leave() -> None:
    os._exit(PEER_LOST)


_HELD: list[Control] = []

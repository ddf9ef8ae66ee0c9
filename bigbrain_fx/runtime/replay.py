"""Messages that outlive a process: logged until no device can need them again.

    send ──▶ log ──▶ transport of generation g ──▶ recv, counted
                       │ a device dies
                       ▼
             transport of generation g+1: messages not counted by receivers are sent again

Every message has a number: step × messages per step + its place in the step. A device that starts
again from a snapshot computes the same messages again. Those that were received before stay in its
log and are not sent. All others therefore go on with the very call that failed. This is
sender-based message logging (Johnson and Zwaenepoel, FTCS 1987) of a program whose messages depend
on nothing but its inputs. Here, all devices take snapshots at the same steps, so that any number of
them may die at once.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from .channel import Channel, Layout
from .coded import MisuseError
from .compared_stream import Subject, require_same
from .control import Control, said
from .mesh import MeshTransport, seal
from .network import pack
from .packets import Meeting, SpoiledError, StepAgainError
from .peers import PeerLostError

if TYPE_CHECKING:
    from .peer_states import PeerStates
    from .suspicion import Tape

Connect = Callable[[int], MeshTransport]  # a generation's number -> its transport


@dataclass(frozen=True)
class _Logged:
    """A sent message: its bytes as they left, with their checksum; nothing else holds them."""

    number: int
    payload: Tensor

    @property
    def nbytes(self) -> int:
        """Return its bytes in memory."""
        return self.payload.numel()


@dataclass
class _End:
    """One end of a channel: `next` is the number of its next message."""

    channel: Channel
    per_step: int
    next: int = 0
    layout: Layout | None = None


@dataclass
class _Sent(_End):
    """The sending end."""

    peer_next: int = 0  # the receiver has all messages below this
    log: deque[_Logged] = field(default_factory=deque)


@dataclass
class _Received(_End):
    """The receiving end: `due` is the number after the last of this step."""

    due: int = 0


class ReplayTransport:
    """Send and receive whatever happens to the other ends; a `Transport` for `Device`.

    Args:
        name: of this device.
        channels: those that start or end here; local ones are left out.
        micro_batches: how many messages of a step an activation's or gradient's channel carries.
        control: the line to the supervisor.
        connect: makes the transport of a generation.
    """

    def __init__(
        self,
        name: str,
        channels: Iterable[Channel],
        micro_batches: int,
        control: Control,
        connect: Connect,
    ) -> None:
        self.control = control
        self.connect = connect
        self.generation = -1
        self.inner: MeshTransport | None = None
        self.sent: dict[int, _Sent] = {}
        self.received: dict[int, _Received] = {}
        self.step_bytes = 0  # received since the step began
        self.epoch = -1  # the log has been dropped up to this step
        self.held_bytes = 0  # by the log
        self.asked: deque[tuple[Subject, str]] = deque()  # told, not compared
        self.peers: PeerStates | None = None  # instead of snapshots
        self.lost: frozenset[str] = frozenset()  # devices that it has no channels to any more
        self.go_on_without: Callable[[frozenset[str]], object] | None = None  # see `standing`
        self.tape: Tape | None = None  # of this step, where it is computed again
        self.carry(name, channels, micro_batches)
        control.on_generation = self._wake

    def carry(self, name: str, channels: Iterable[Channel], micro_batches: int) -> None:
        """Have these channels, of which nothing was sent; what others carried is forgotten."""
        self.sent, self.received, self.held_bytes = {}, {}, 0
        self.asked.clear()
        for channel in channels:
            per_step = channel.messages(micro_batches)
            if channel.is_local:
                continue
            if channel.sender == name:
                self.sent[channel.tag] = _Sent(channel, per_step)
            else:
                self.received[channel.tag] = _Received(channel, per_step)

    def start(self, step: int, layouts: dict[str, tuple[list[int], list[int]]]) -> None:
        """Number messages from the beginning of `step`; `layouts` as `known_layouts` gave them."""
        for end in self._ends():
            end.next = step * end.per_step
            known = layouts.get(str(end.channel.tag))
            end.layout = _layout(known) if known else None
        for received in self.received.values():
            received.due = received.next
        self.epoch = step

    def known_layouts(self) -> dict[str, tuple[tuple[int, ...], tuple[int, ...]]]:
        """Return shape and strides of each channel's messages, by tag; JSON can hold it."""
        return {
            str(end.channel.tag): (end.layout.shape, end.layout.strides)
            for end in self._ends()
            if end.layout is not None
        }

    def _ends(self) -> Iterator[_End]:
        yield from self.sent.values()
        yield from self.received.values()

    # ------------------------------------------------------------------ a Transport

    def begin_step(self, channels: tuple[tuple[Channel, int], ...]) -> None:
        """Expect so many messages on each incoming channel."""
        self._drop()
        self.step_bytes = 0
        for channel, count in channels:
            self.received[channel.tag].due += count
        try:
            self._living().begin_step(channels)
        except (PeerLostError, TimeoutError) as error:
            self._form_in_step(error)

    def send(self, channel: Channel, tensor: Tensor) -> None:
        """Keep a message and start sending it, unless the receiver has it already."""
        self.control.tick()
        sent = self.sent[channel.tag]
        entry = self._logged(sent, tensor)
        sent.log.append(entry)
        sent.next += 1
        self.held_bytes += entry.nbytes
        if self.tape is not None:
            self.tape.tell(channel, entry.payload)
        if entry.number >= sent.peer_next:
            try:
                self._send(self._living(), sent, entry)
            except (PeerLostError, TimeoutError) as error:
                self._form_in_step(error)  # sends all that is in the log
        self._keep_within(sent)

    def recv(self, channel: Channel) -> Tensor:
        """Wait for the channel's next message, through any number of deaths."""
        received = self.received[channel.tag]
        while True:
            try:
                inner = self._living()
                with self.control.waiting(str(channel), channel.sender):
                    tensor = inner.recv(channel)
                break
            except (PeerLostError, TimeoutError) as error:
                self._form_in_step(error)
        received.next += 1
        received.layout = received.layout or inner.layout(channel)
        self.step_bytes += tensor.untyped_storage().nbytes()
        if self.tape is not None:
            self.tape.hear(channel, tensor)
        return tensor

    def agree(self, what: Subject, digest: str, device: str) -> None:
        """Tell the supervisor, who keeps what was said first, before a death too.

        No step waits for its answer: `finish` compares, before anything is kept of the step.
        """
        mine = f"{device} {digest}"
        self.control.say("first", what=what.key, text=mine)
        self.asked.append((what, mine))

    def vote(self, step: int, device: str, yes: bool, names: tuple[str, ...]) -> bool:
        """Report this device's vote to the supervisor, which stores it; return whether all say yes.

        If states come from peers, a vote also says that all of the step's messages are here.
        """
        about = {} if self.peers is None else self.peers.so_far()
        self.control.say("vote", step=step, yes=yes, **about)
        voted, text = self.control.voted, f"all devices' votes on step {step}"
        while not self.control.until(lambda: step in voted, self.generation, text):
            self._form_in_step()
        voted.pop(step - 1, None)
        all_say = voted[step]
        if self.tape is not None:
            self.tape.votes.append(all_say)
        return all_say

    def finish(self) -> None:
        """Wait until everything sent has been received; see `agree` for what it raises."""
        self._compare()
        if self.tape is not None:
            self.tape.end()
        if self.control.peers:
            return  # all devices have voted, and so have all of it
        while True:
            try:
                inner = self._living()
                slow = inner.background.current
                with self.control.waiting(str(slow), slow.receiver if slow else ""):
                    inner.finish()
                return
            except (PeerLostError, TimeoutError) as error:
                self._form_in_step(error)

    def _compare(self) -> None:
        """Raise if another device, or this one before it died, has read another batch."""
        while self.asked:
            what, mine = self.asked.popleft()
            require_same(what, mine, self._first(what))

    def _first(self, what: Subject) -> str:
        known = self.control.said_first
        with self.control.waiting(str(what)), self.control.changed:
            self.control.changed.wait_for(lambda: what.key in known)
            return known.pop(what.key)

    # ------------------------------------------------------------------ generations

    def form(self, error: Exception | None = None) -> bool:
        """Meet the other devices in a new generation and send them what they have not received.

        Nothing of this device is lost: parameters, activations and log stay as they are.

        Returns:
            Whether there are fewer of them: then it is where its step began.
        """
        before = self.lost
        with self.control.waiting("all devices, to connect anew"):
            self._form(error)
        return self.lost != before

    def _form_in_step(self, error: Exception | None = None) -> None:
        """Meet the others within a step.

        Raises:
            StepAgainError: there are fewer of them.
        """
        if self.form(error):
            raise StepAgainError

    def _form(self, error: Exception | None) -> None:
        while True:
            if error is not None and self.control.generation == self.generation:
                # before the others lose this device and say so
                alive = isinstance(error, SpoiledError)
                self.control.say("lost", generation=self.generation, text=said(error), alive=alive)
            self._let_go()
            newest = self.control.wait_generation(self.generation)
            if self.control.peers and self.peers is not None and self.peers.must_end_step:
                return  # its next message finds no connection
            self.generation = newest
            if self.control.lost != self.lost:
                self.lost = self.control.lost
                assert self.go_on_without is not None
                self.go_on_without(self.lost)
            try:
                if self._meet(self.generation):
                    return
            except (PeerLostError, TimeoutError) as found:
                error = found

    def linger(self) -> None:
        """Serve the log until every device has finished, then close."""
        self.control.say("finished")
        while not self.control.wait_end(self.generation):
            self.form()
        self._let_go()

    def _meet(self, generation: int) -> bool:
        expected = {tag: received.next for tag, received in self.received.items()}
        lacks = self.peers.lacks if self.peers is not None else None
        meeting = self.control.meet(generation, expected, self.known_layouts(), lacks)
        if meeting is None:
            return False
        self.inner = self.connect(generation)
        inner = self._living()  # `_wake` had nothing to close if another died while they connected
        for tag, sent in self.sent.items():
            sent.peer_next = meeting.expected.get(tag, 0)
        self._learn_layouts(meeting)
        if self.peers is not None and meeting.lacking:
            self.peers.exchange(inner, meeting.lacking)
        rest = [(r.channel, r.due - r.next) for r in self.received.values()]
        inner.begin_step(tuple((channel, count) for channel, count in rest if count))
        for sent in self.sent.values():
            self._send_again(inner, sent)
        self.control.say("formed", generation=generation)
        return True

    def _learn_layouts(self, meeting: Meeting) -> None:
        for end in self._ends():
            if end.layout is None and end.channel.tag in meeting.layouts:
                end.layout = _layout(meeting.layouts[end.channel.tag])

    def _send_again(self, inner: MeshTransport, sent: _Sent) -> None:
        oldest = sent.next - len(sent.log)
        if sent.peer_next < oldest:
            raise MisuseError(
                f"{sent.channel}: message {sent.peer_next} is wanted again, "
                f"but the log starts at {oldest}",
                code="BX5134",
            )
        for entry in sent.log:
            if entry.number >= sent.peer_next:
                self._send(inner, sent, entry)

    def _send(self, inner: MeshTransport, sent: _Sent, entry: _Logged) -> None:
        assert sent.layout is not None
        inner.send_bytes(sent.channel, sent.layout, entry.payload)

    def _living(self) -> MeshTransport:
        """Return the transport of the newest generation."""
        if self.inner is None or self.control.generation > self.generation:
            raise PeerLostError(f"generation {self.generation} has ended", code="BX5135")
        return self.inner

    def _wake(self) -> None:
        """Close the connections of an older generation; the control thread calls this."""
        inner = self.inner
        # on a busy machine this comes late: the device may have met the others again already
        if inner is not None and self.generation < self.control.generation:
            inner.abandon()

    def _let_go(self) -> None:
        if self.inner is not None:
            self.inner.close()
            self.inner = None

    # ------------------------------------------------------------------ the log

    def _logged(self, sent: _Sent, tensor: Tensor) -> _Logged:
        """Return what to keep of a message: the copy that carries its checksum."""
        sent.layout = sent.layout or Layout.of(tensor)
        flat = pack(tensor, sent.layout).to("cpu")
        return _Logged(sent.next, seal(flat.view(torch.uint8)))

    def _drop(self) -> None:
        """Forget what no device can need again: all of them have a later snapshot."""
        if self.control.epoch == self.epoch:
            return
        self.epoch = self.control.epoch
        for sent in self.sent.values():
            while sent.log and sent.log[0].number < self.epoch * sent.per_step:
                self.held_bytes -= sent.log.popleft().nbytes

    def _keep_within(self, last: _Sent) -> None:
        """Forget all messages when they take too much memory; a death then takes all back."""
        limit = self.control.log_bytes
        if limit is None or self.held_bytes <= limit:
            return
        step = (last.next - 1) // last.per_step
        self.control.say("log_dropped", step=step, bytes=self.held_bytes)
        for sent in self.sent.values():
            sent.log.clear()
        self.held_bytes = 0


def _layout(found: tuple[Iterable[int], Iterable[int]]) -> Layout:
    shape, strides = found
    return Layout(tuple(shape), tuple(strides))

"""A device that dies while the others connect: nobody waits in a generation that was given up."""

from __future__ import annotations

from typing import Any, cast

from bigbrain_fx.runtime.control import Control
from bigbrain_fx.runtime.mesh import MeshTransport
from bigbrain_fx.runtime.packets import Meeting
from bigbrain_fx.runtime.peer_states import PeerStates
from bigbrain_fx.runtime.replay import ReplayTransport


class Line:
    """What a device hears of its supervisor: generation 0, and 1 while it connects for 0."""

    peers, lost = True, frozenset[str]()

    def __init__(self) -> None:
        self.generation = 0
        self.on_generation: Any = None
        self.said: list[tuple[str, int]] = []

    def say(self, what: str, **rest: Any) -> None:
        self.said.append((what, rest["generation"]))

    def waiting(self, text: str) -> Line:
        return self

    def __enter__(self) -> None: ...

    def __exit__(self, *error: object) -> None: ...

    def wait_generation(self, above: int) -> int:
        assert self.generation > above
        return self.generation

    def meet(self, generation: int, *told: object) -> Meeting:
        return Meeting(generation, {}, {}, {"d1": 3})


class Connections:
    """Those of one generation."""

    def __init__(self, generation: int) -> None:
        self.generation, self.is_closed = generation, False

    def begin_step(self, expected: object) -> None: ...

    def abandon(self) -> None:
        self.is_closed = True

    close = abandon


class Peers:
    """Has a state to give, and would wait for who takes it."""

    lacks, must_end_step = None, False

    def __init__(self) -> None:
        self.gave: list[int] = []

    def exchange(self, inner: Connections, lacking: object) -> None:
        self.gave.append(inner.generation)


def test_states_are_exchanged_only_in_the_newest_generation() -> None:
    """Whoever left generation 0 sends nothing there: it was waited for for 300 s."""
    line, peers, made = Line(), Peers(), list[Connections]()

    def connect(generation: int) -> MeshTransport:
        made.append(Connections(generation))
        if generation == 0:  # the order comes before the transport is in its place
            line.generation = 1
            line.on_generation()
        return cast(MeshTransport, made[-1])

    transport = ReplayTransport("d0", (), 1, cast(Control, line), connect)
    transport.peers = cast(PeerStates, peers)
    transport.form()
    assert peers.gave == [1]
    assert [each.is_closed for each in made] == [True, False]
    assert line.said == [("formed", 1)]

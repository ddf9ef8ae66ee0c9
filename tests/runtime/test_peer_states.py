"""Who gives what of a dead device's state, and that parts of a state make the whole again."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from bigbrain_fx.runtime import peer_states
from bigbrain_fx.runtime.peer_states import PeerStates, givers_of
from bigbrain_fx.runtime.state import State, StateError, restore, state_of
from bigbrain_fx.runtime.state_parts import joined_state, part_of_state, state_before_update
from tests.runtime.test_state import OPTIMIZERS, One, device, everything, run
from tests.runtime.test_statistics import MICROS, Norm, Wires, replica

#        d0 a b c | d1 d e            one replica
#        d2 a b   | d3 c d | d4 e     another, cut otherwise
HELD = {"d0": "abc", "d1": "de", "d2": "ab", "d3": "cd", "d4": "e"}


def held(**more: str) -> dict[str, frozenset[str]]:
    return {name: frozenset(letters) for name, letters in {**HELD, **more}.items()}


def found(taker: str, *lacking: str, **more: str) -> dict[str, str] | str:
    givers = givers_of(taker, held(**more), (taker, *lacking))
    if isinstance(givers, str):
        return givers
    return {name: "".join(sorted(names)) for name, names in givers.items()}


def test_a_state_comes_from_those_that_hold_most_of_it() -> None:
    assert found("d2") == {"d0": "ab"}
    assert found("d0") == {"d2": "ab", "d3": "c"}
    assert found("d3") == {"d0": "c", "d1": "d"}
    assert found("d0", d5="abc") == {"d5": "abc"}  # a third replica


def test_a_name_that_only_the_dead_held_is_missed() -> None:
    assert found("d0", "d2") == "a"
    assert found("d0", "d3") == "c"
    assert found("d4", "d1") == "e"
    assert found("d0", "d4") == {"d2": "ab", "d3": "c"}
    assert found("d0", "d1", "d2", "d3", "d4") == "a"


def test_a_device_without_tensors_still_asks_one() -> None:
    assert found("d5", d5="") == {"d0": ""}
    assert found("d5", *HELD, d5="") == "anything"


def test_a_members_parts_come_from_the_same_place_of_another_group(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """All members have the same names, and other parts of what they divide."""
    monkeypatch.setattr(peer_states, "held_names", lambda _: frozenset("ab"))
    groups = (("d0", "d1"), ("d2", "d3"), ("d4", "d5"))
    made = [type(d, (), {"name": d, "members": group}) for group in groups for d in group]
    bundle, control = SimpleNamespace(devices=made), SimpleNamespace(peers=True)
    states = PeerStates(bundle, device(OPTIMIZERS["sgd"]), control, None)  # type: ignore[arg-type]
    assert list(states.like("d3")) == ["d1", "d3", "d5"]
    assert givers_of("d3", states.like("d3"), ("d3", "d1")) == {"d5": frozenset("ab")}
    assert givers_of("d3", states.like("d3"), ("d1", "d3", "d5")) == "a"


def image_of(state: State) -> State:
    room = bytearray(state.nbytes)
    state.copy_into(room)
    return State.from_buffer(room)


@pytest.mark.gate("sgd")
@pytest.mark.parametrize("name", ["adamw", "two groups", "adafactor", "sgd"])
def test_parts_of_a_state_make_the_whole(name: str) -> None:
    first, second = device(OPTIMIZERS[name]), device(OPTIMIZERS[name])
    run(first, 0, 3)
    state = state_of(first)
    names = sorted(n for n in state.tensors if not n.startswith("optimizer:"))
    parts = [image_of(part_of_state(state, names[start::2])) for start in (0, 1)]
    restore(second, joined_state(parts))
    assert everything(second) == everything(first)
    assert run(second, 3, 6) == run(first, 3, 6)


def test_parts_of_two_steps_are_refused() -> None:
    made = device(OPTIMIZERS["adamw"])
    run(made, 0, 1)
    old = image_of(part_of_state(state_of(made), {"parameter:a"}))
    run(made, 1, 2)
    with pytest.raises(StateError, match="step: one peer has 1, another 2"):
        joined_state([old, part_of_state(state_of(made), {"parameter:b"})])


def test_within_a_step_statistics_are_those_that_it_began_with() -> None:
    norm, made = Norm(0.1, torch.float32), device(OPTIMIZERS["sgd"])
    made.statistics = statistics = replica(0, norm, Wires())
    made.modules = {0: norm}  # type: ignore[dict-item]
    before = {name: tensor.clone() for name, tensor in norm.state_dict().items()}
    statistics.begin()
    for micro in MICROS[0]:
        with statistics.noting(0, micro):
            norm(torch.randn(8, 24))
    assert norm.state_dict()["count"] == len(MICROS[0])
    assert same(made, before)
    statistics.end()
    assert not same(made, before)


def same(made: One, before: dict[str, torch.Tensor]) -> bool:
    tensors = state_before_update(made).tensors
    return all(torch.equal(tensors[f"buffer:{name}"], tensor) for name, tensor in before.items())

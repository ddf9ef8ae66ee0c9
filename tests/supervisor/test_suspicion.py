"""A device that computes wrong: a spare finds it out, and all go back to before it."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from bigbrain_fx.bundles.launch import RunOptions, run
from bigbrain_fx.errors import InputError
from bigbrain_fx.plan import Options
from bigbrain_fx.supervisor.policies import END
from bigbrain_fx.supervisor.suspicion import Suspicion
from tests.support.bundles import cluster, split_small
from tests.support.replayed import Fault, supervised

NAMES = ("d0", "d1")
STEPS = 4
SEND = 1  # d0's second instruction


@pytest.fixture(scope="module")
def bundle(tmp_path_factory: pytest.TempPathFactory) -> Path:
    options = Options("naive", schedule="gpipe", micro_batches=2)
    return split_small(
        tmp_path_factory.mktemp("suspicion"), cluster(2), options, extras=("suspicion",)
    )


@pytest.mark.nightly
def test_a_wrong_activation_is_found_and_what_comes_out_is_right(
    bundle: Path, tmp_path: Path
) -> None:
    fine = supervised(bundle, tmp_path / "fine", NAMES, STEPS, spares=1, suspect=1.0)
    assert not fine.of("suspect")
    assert not fine.of("unchecked")
    wrong = [Fault("d0", 2, SEND, "wrong")]
    seen = supervised(bundle, tmp_path / "wrong", NAMES, STEPS, wrong, spares=1, suspect=1.0)
    [found] = seen.of("suspect")
    assert (found["device"], found["step"]) == ("d0", 2)
    assert found["text"].startswith("message 0 of activation")
    assert [event["step"] for event in seen.of("rolled_back")] == [2]
    assert seen.hashes == fine.hashes
    assert seen.losses[-2:] == fine.losses[-2:]


@pytest.mark.nightly
def test_without_a_spare_no_step_can_be_checked(bundle: Path) -> None:
    for options in (RunOptions(2, suspect=0.5), RunOptions(2, suspect=0.5, spares=0)):
        with pytest.raises(InputError, match="--suspect needs a spare"):
            run(bundle, options)


# --------------------------------------------------------------------------- who checks what


@dataclass
class Crew:
    """Two devices and spares that are warm; orders are kept."""

    spare_names: list[str]
    orders: list[tuple[str, str]] = field(default_factory=list)
    events: list[str] = field(default_factory=list)
    now: float = 0.0
    ending: bool = False

    def __post_init__(self) -> None:
        self.job = SimpleNamespace(devices=("d0", "d1"), start_s=10.0)
        self.clock = SimpleNamespace(now=lambda: self.now)
        self.members = {n: member(n) for n in self.spare_names}
        self.fill = lambda: None

    def spares(self, _: str) -> list[Any]:
        return list(self.members.values())

    def order(self, to: Any, do: str, **_: object) -> None:
        self.orders.append((to.name, do))

    def report(self, event: str, **_: object) -> None:
        self.events.append(event)


def member(name: str, device: str | None = None) -> Any:
    killed: list[bool] = []
    return SimpleNamespace(
        name=name, device=device, is_warm=True, killed=killed, kill=lambda: killed.append(True)
    )


def suspicion(*spares: str) -> tuple[Suspicion, Crew, list[str]]:
    crew, differing = Crew(list(spares)), list[str]()
    made: Any = crew
    return Suspicion(made, made, lambda _, text: differing.append(text)), crew, differing


D0, D1 = member("d0", "d0"), member("d1", "d1")


def test_a_checkpoint_waits_for_the_tapes_before_it() -> None:
    here, crew, differing = suspicion("s")
    done: list[int] = []
    for who, step in ((D0, 3), (D1, 5)):
        here.hear_tape(who, step)
        here.hear_taped(who, step, start=4096)
    for step in (3, 4, 6, END):
        here.when_clean(step, lambda step=step: done.append(step))  # type: ignore[misc]
    assert crew.orders == [("d0", "tape"), ("s", "check"), ("d1", "tape")]
    assert done == [3]
    here.hear_checked(crew.members["s"], 1, "")
    assert done == [3, 4]
    assert crew.orders[-1] == ("s", "check")
    here.hear_checked(crew.members["s"], 2, "")
    assert done == [3, 4, 6, END]
    assert not differing
    here.close()


def test_a_device_tapes_again_when_its_last_tape_is_checked() -> None:
    here, crew, differing = suspicion("s")
    here.hear_tape(D0, 0)
    here.hear_taped(D0, 0, start=0)
    here.hear_tape(D0, 1)
    assert crew.orders.count(("d0", "tape")) == 1
    here.hear_checked(crew.members["s"], 1, "")
    assert crew.orders.count(("d0", "tape")) == 2
    here.hear_taped(D0, 1, start=0)
    here.hear_checked(crew.members["s"], 2, "message 0 of gradient 'x'")
    assert differing == ["message 0 of gradient 'x'"]
    here.close()


def test_a_spare_that_ends_or_takes_too_long_leaves_its_tape_to_another() -> None:
    here, crew, _ = suspicion("s", "t")
    here.hear_tape(D0, 0)
    here.hear_taped(D0, 0, start=0)
    crew.now = 11.0
    here.look()
    gone = crew.members.pop("s")
    assert gone.killed
    here.hear_end(gone)
    here.look()
    assert crew.orders[-1] == ("t", "check")
    here.hear_end(crew.members.pop("t"))
    assert crew.events == ["unchecked"]
    assert not here.tapes
    here.close()


def test_without_any_spare_a_step_is_said_to_be_unchecked() -> None:
    here, crew, _ = suspicion()
    here.hear_tape(D0, 0)
    here.hear_taped(D0, 0, start=0)
    assert crew.events == ["unchecked"]
    here.hear_tape(D0, 1)
    here.hear_end(D0)  # as it tapes: the next process may
    here.hear_tape(D0, 1)
    assert crew.orders.count(("d0", "tape")) == 3
    here.close()

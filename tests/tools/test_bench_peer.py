"""torch's side of the comparison: its stages are the model's, and quartiles are of the pairs."""

from __future__ import annotations

import pytest
import torch

from tools import peer_model
from tools.bench_peer import ALL, _quartiles
from tools.peer_side import SCHEDULES, parts_of


@pytest.mark.gate("zb-v-mine1")
@pytest.mark.parametrize(("schedule", "mine"), [("1f1b", ([0], [1])), ("zb-v", ([0, 3], [1, 2]))])
def test_stages_of_theirs_are_the_whole_model(
    schedule: str, mine: tuple[list[int], list[int]]
) -> None:
    torch.manual_seed(0)
    whole = peer_model.GPT()
    tokens = torch.randint(peer_model.VOCABULARY, (1, peer_model.SEQUENCE))
    parts = [parts_of(whole, rank, 2, schedule) for rank in range(2)]
    assert tuple(list(part) for part in parts) == mine
    x, names = tokens, list[str]()
    for _, stage in sorted({**parts[0], **parts[1]}.items()):
        names += [name for name, _ in stage.named_parameters()]
        x = stage(x)
    assert sorted(names) == sorted(name for name, _ in whole.named_parameters())
    assert torch.equal(x, whole(tokens))


def test_every_series_is_against_something_that_there_is() -> None:
    assert {series.against for series in ALL} == {*SCHEDULES, "eager"}


def test_quartiles_are_of_the_pairs() -> None:
    assert _quartiles([1.0, 2.0, 3.0, 4.0, 5.0, 6.0, 7.0]) == (2.0, 6.0)
    assert _quartiles([1.5]) == (1.5, 1.5)

"""Where a random op draws: the same text for the reference's interpreter and for emitted code."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from bigbrain_fx.core import ModuleCall, Op, Ref
from bigbrain_fx.frontend.randomness import draw_places, place_name
from bigbrain_fx.runtime import modules
from bigbrain_fx.runtime.modules import Region
from tests.support.synthetic import graph_of, op


def dropout(name: str, path: str) -> Op:
    made = op(name, "aten.dropout.default", Ref("x"), 0.1, True, random=True)
    return replace(made, modules=(ModuleCall(path, "torch.nn.Dropout"),))


def test_draws_are_counted_per_module() -> None:
    still = op("r", "aten.relu.default", Ref("x"))
    ops = [
        dropout("a", "drop"),
        still,
        dropout("b", "drop"),
        dropout("c", "other"),
        dropout("d", "drop"),
    ]
    assert draw_places(graph_of(ops)) == {
        "a": ("drop", 0),
        "b": ("drop", 1),
        "c": ("other", 0),
        "d": ("drop", 2),
    }


@pytest.mark.parametrize(
    ("path", "name", "call", "index", "of", "expected"),
    [
        ("", "drop", 0, 0, 1, "drop"),
        ("blocks.3", "drop", 0, 0, 1, "blocks.3.drop"),
        ("blocks.3", "drop", 2, 0, 1, "blocks.3.drop#2"),
        ("blocks.3", "drop", 0, 1, 2, "blocks.3.drop#1"),
        ("blocks.3", "drop", 2, 1, 2, "blocks.3.drop#5"),
        ("blocks.3", "", 0, 0, 1, "blocks.3"),
    ],
)
def test_the_runtime_builds_the_same_text(
    monkeypatch: pytest.MonkeyPatch,
    path: str,
    name: str,
    call: int,
    index: int,
    of: int,
    expected: str,
) -> None:
    drawn: list[str] = []
    monkeypatch.setattr(modules, "reseed", lambda key, place, device: drawn.append(place))
    monkeypatch.setattr(modules.active, "key", (0, 0, 0))
    region = Region()
    region.path, region.call = path, call
    with region.seeded(name, index, of):
        pass
    full = ".".join(part for part in (path, name) if part)
    assert drawn == [expected] == [place_name(full, call * of + index)]


def test_with_no_key_the_generator_goes_on() -> None:
    torch.manual_seed(7)
    expected = torch.rand(3)
    torch.manual_seed(7)
    with Region().seeded("drop"):
        assert torch.equal(torch.rand(3), expected)


def test_a_key_gives_the_same_draw_wherever_it_is_used() -> None:
    draws = []
    for before in (1, 2):
        torch.manual_seed(before)
        modules.reseed((0, 3, 1), "blocks.3.drop", torch.device("cpu"))
        draws.append(torch.rand(3))
    assert torch.equal(*draws)
    modules.reseed((0, 3, 2), "blocks.3.drop", torch.device("cpu"))
    assert not torch.equal(torch.rand(3), draws[0])

"""State in plain attributes: refused where the next forward depends on it, and let be elsewhere."""

from __future__ import annotations

import random
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from bigbrain_fx.errors import CaptureError
from bigbrain_fx.frontend import capture
from bigbrain_fx.frontend.tracing import check
from bigbrain_fx.frontend.tracing.attributes import Attributes
from tests.support.captured import assert_same
from tests.support.messages import refused

THIS = Path(__file__).name
STEP = 0
FACTOR = torch.ones(1)
DICE = torch.Generator().manual_seed(3)  # as `batches` may have one: forward does not draw


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(4, 8)
        self.down = nn.Linear(8, 4)

    def middle(self, h: Tensor) -> Tensor:
        return h

    def forward(self, x: Tensor) -> Tensor:
        return self.down(self.middle(torch.tanh(self.up(x)))).square().mean()


class Hidden(Net):
    """Truncated backpropagation through time."""

    state: Tensor | None = None

    def middle(self, h: Tensor) -> Tensor:
        h = h if self.state is None else h + self.state
        self.state = h.detach()  # writes
        return h


class Warm(Net):
    calls = 0

    def middle(self, h: Tensor) -> Tensor:
        self.calls += 1  # writes
        return h * min(1.0, self.calls / 10)


class Late(Net):
    calls = 0

    def middle(self, h: Tensor) -> Tensor:
        self.calls += 1  # writes
        return h * 2 if self.calls > 500 else h


class First(Net):
    """Normalises by what the first batch was."""

    mean: Tensor | None = None

    def middle(self, h: Tensor) -> Tensor:
        if self.mean is None:
            self.mean = h.detach().mean(0)  # writes
        return h - self.mean


class InDict(Net):
    def __init__(self) -> None:
        super().__init__()
        self.held: dict[str, list[Tensor]] = {"h": []}

    def middle(self, h: Tensor) -> Tensor:
        self.held["h"].append(h.detach().mean())  # writes
        return h + torch.stack(self.held["h"]).sum()


class InPlace(Net):
    def __init__(self) -> None:
        super().__init__()
        self.ema = torch.zeros(8)

    def middle(self, h: Tensor) -> Tensor:
        with torch.no_grad():
            self.ema.mul_(0.9).add_(h.mean(0), alpha=0.1)  # writes
        return h - self.ema


class OfClass(Net):
    calls = 0

    def middle(self, h: Tensor) -> Tensor:
        OfClass.calls += 1  # writes
        return h / OfClass.calls


class OfFile(Net):
    def middle(self, h: Tensor) -> Tensor:
        global STEP
        STEP += 1  # writes
        return h / STEP


class TensorOfFile(Net):
    def middle(self, h: Tensor) -> Tensor:
        FACTOR.add_(0.1)  # writes
        return h * FACTOR


class OwnDice(Net):
    def __init__(self) -> None:
        super().__init__()
        self.dice = random.Random(0)

    def middle(self, h: Tensor) -> Tensor:
        return h * self.dice.random()  # writes


class Unset(Net):
    ema: Tensor | None

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("ema", None)

    def middle(self, h: Tensor) -> Tensor:
        h = h if self.ema is None else h - self.ema
        self.ema = h.mean(0).detach()
        return h


class Made(Net):
    def __init__(self) -> None:
        super().__init__()
        self.scale: nn.Parameter | None = None

    def middle(self, h: Tensor) -> Tensor:
        if self.scale is None:
            self.scale = nn.Parameter(torch.ones(h.shape[1]))
        return h * self.scale


REFUSED = {
    Hidden: "state",
    Warm: "calls",
    Late: "calls",
    First: "mean",
    InDict: "held",
    InPlace: "ema",
    OfClass: "OfClass.calls",
    OfFile: f"{__name__}.STEP",
    OwnDice: "dice",
    Unset: "ema",
    Made: "scale",
}


def batch() -> tuple[Tensor]:
    return (torch.randn(8, 4, generator=torch.Generator().manual_seed(0)),)


def test_a_generator_of_the_file_is_no_hindrance_to_a_trace() -> None:
    place = DICE.get_state()
    model = Net()
    found = capture(model, batch())
    assert not any("strict" in warning for warning in found.warnings)
    assert torch.equal(DICE.get_state(), place)
    assert_same(model, found, model)


@pytest.mark.gate("Hidden", "Late", "Made", "OfClass", "OwnDice")
@pytest.mark.parametrize("kind", REFUSED)
def test_state_that_counts_is_refused_by_name(kind: type[Net]) -> None:
    model = nn.Sequential(kind())
    before = said(Attributes.of(model))
    code = "BX0160i" if kind is Late else "BX0160e"
    with refused(code, CaptureError, vary=(r"\d+ calls",)) as caught:
        capture(model, batch())
    name = REFUSED[kind]
    assert f"forward leaves {name if '.' in name else f'0.{name}'} for" in caught.value.what
    file, _, line = (caught.value.at or f"{THIS}:").partition(":")
    assert file == THIS
    if line and kind is not Made:
        assert "# writes" in Path(__file__).read_text().splitlines()[int(line) - 1]
    assert said(Attributes.of(model)) == before  # the user's model is as it was
    assert (STEP, OfClass.calls) == (0, 0)


def said(found: Attributes) -> dict[str, str]:
    return {name: str(found.value(name)) for name in found.marks if name != "0.dice"}


def test_a_tensor_of_the_file_that_backward_wants_is_state_too() -> None:
    """The forward that follows has written into it: the model's backward was said to fail."""
    with refused("BX0160e", CaptureError):
        capture(nn.Sequential(TensorOfFile()), batch())
    FACTOR.fill_(1)


class AtFirstUse(Net):
    """A table made when it is first needed, twice over."""

    tables: dict[int, Tensor]

    def middle(self, h: Tensor) -> Tensor:
        if not hasattr(self, "tables"):
            self.tables = {}
        if h.shape[1] not in self.tables:
            self.tables[h.shape[1]] = torch.arange(float(h.shape[1])).cos()
        return h * self.tables[h.shape[1]]


class Looked(Net):
    """What is kept for a look at it: a counter, the last activation, a loss of its own."""

    calls = 0

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[int] = []

    def middle(self, h: Tensor) -> Tensor:
        self.calls += 1
        self.seen.append(self.calls)
        self.last = h
        self.extra = h.square().mean()
        return h


@pytest.mark.nightly
@pytest.mark.parametrize("kind", [AtFirstUse, Looked])
def test_what_changes_nothing_is_let_be(kind: type[Net]) -> None:
    model = kind()
    names = set(vars(model))
    found = capture(model, batch())
    assert found.graph.static_batch is None
    assert found.warnings == ()
    assert set(vars(model)) == names  # nothing of the trace stays behind
    assert_same(model, found, model)


class Remedied(Net):
    """The remedy that the refusals name."""

    calls: Tensor
    ema: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("calls", torch.zeros(()))
        self.register_buffer("ema", torch.zeros(8))

    def middle(self, h: Tensor) -> Tensor:
        with torch.no_grad():
            self.calls.copy_(self.calls + 1)
            self.ema.copy_(torch.where(self.calls > 1, 0.9 * self.ema + h.mean(0), h.mean(0)))
        return (h - self.ema) * (self.calls / 10).clamp(max=1.0)


def test_the_remedy_works() -> None:
    model = Remedied()
    assert_same(model, capture(model, batch()), model)


class Cached(Net):
    """A table that is made anew where a text is longer."""

    def __init__(self) -> None:
        super().__init__()
        self.table: Tensor
        self.make(2)

    def make(self, longest: int) -> None:
        self.longest = longest
        self.register_buffer("table", torch.ones(longest, 8).cumsum(0), persistent=False)

    def middle(self, h: Tensor) -> Tensor:
        if h.shape[1] > self.longest:
            self.make(h.shape[1])
        return h * self.table[: h.shape[1]]


def test_a_cache_that_a_first_call_makes_longer_wants_that_call_in_model() -> None:
    x = torch.randn(3, 5, 4)
    with refused("BX0160e", CaptureError):
        capture(Cached(), (x,))
    model = Cached()
    model(x)
    assert_same(model, capture(model, (x,)), model)


def test_without_weights_it_is_a_warning() -> None:
    with torch.device("meta"):
        model = Hidden()
    found = capture(model, (torch.randn(8, 4, device="meta"),))
    assert any("forward changes state" in said for said in found.warnings)


class Momentum(nn.Module):
    """A frozen twin that follows in forward, and a queue of its keys."""

    queue: Tensor
    place: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.query, self.key = nn.Linear(4, 8), nn.Linear(4, 8).requires_grad_(False)
        self.register_buffer("queue", torch.randn(8, 32))
        self.register_buffer("place", torch.zeros(1, dtype=torch.long))

    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            for frozen, own in zip(self.key.parameters(), self.query.parameters(), strict=True):
                frozen.mul_(0.9).add_(own, alpha=0.1)
            keys = self.key(x)
        found = (self.query(x) @ self.queue.clone()).square().mean() + (x.sum() * 0)
        places = (self.place + torch.arange(8)) % 32
        self.queue.index_copy_(1, places, keys.T)
        self.place.copy_((self.place + 8) % 32)
        return found


class ByData(Momentum):
    def forward(self, x: Tensor) -> Tensor:
        for frozen, own in zip(self.key.parameters(), self.query.parameters(), strict=True):
            frozen.data = frozen.data * 0.9 + own.data * 0.1
        return (self.query(x) * self.key(x)).mean()


@pytest.mark.nightly
def test_a_momentum_twin_is_traced_where_it_writes_in_place() -> None:
    model = Momentum()
    before = model.key.weight.clone()
    found = capture(model, batch())
    assert torch.equal(model.key.weight, before)
    assert any("key.weight" in op.mutates for op in found.graph.ops) or found.graph.ops
    by_data = ByData()
    before = by_data.key.weight.clone()
    found = capture(by_data, batch())
    assert torch.equal(by_data.key.weight, before)
    assert any("key.weight" in op.mutates for op in found.graph.ops)


class ScaledByData(Momentum):
    """A backward reads what is written later, where autograd does not count it."""

    def forward(self, x: Tensor) -> Tensor:
        h = self.query(x) * self.key.weight[0, 0]
        self.key.weight.data.mul_(0.9)
        return h.mean()


class OneMemory(Momentum):
    def forward(self, x: Tensor) -> Tensor:
        out = (self.query(x) * self.key(x)).mean()
        self.key.weight.data = self.query.weight.data
        return out


class OtherShape(Momentum):
    def forward(self, x: Tensor) -> Tensor:
        h = self.query(x)
        h.data = h.data[:, :1]
        return h.mean()


def test_what_goes_by_data_and_is_not_the_same_in_a_trace_is_refused(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    kinds = {ScaledByData: "BX0201", OneMemory: "BX0181a", OtherShape: "BX0181b"}
    for kind, code in kinds.items():
        model = kind()
        before = model.key.weight.clone()
        with refused(code, CaptureError, vary=(r"\d\.\de[+-]\d+",)) as caught:
            capture(model, batch())
        assert (caught.value.at or "").startswith(f"{THIS}:")
        assert torch.equal(model.key.weight, before)
    monkeypatch.setattr(check, "CHECK_FLOPS", 0)  # a large model: nothing is compared
    with refused("BX0181b", CaptureError):
        capture(ByData(), batch())

"""Graphs in shares against the graph: every model that has an axis, 2 and 3 unlike members."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from bigbrain_fx.core import Graph
from bigbrain_fx.frontend import capture, load_model_file, run_members, taken
from bigbrain_fx.plan import axes, chosen_axes, priced_axes, sharded
from bigbrain_fx.plan.shard import find, layers, local, rewrite
from bigbrain_fx.verification import sharding
from bigbrain_fx.verification.sharding import agree, tried_axes
from models import llama


@pytest.mark.nightly
@pytest.mark.parametrize("name", ["gpt", "llama", "moe", "encdec", "unet", "resnet", "digits"])
def test_the_models_that_ship(name: str) -> None:
    file = load_model_file(f"models/{name}.py", seed=0)
    found = capture(file.model, file.example_batch, file.loss)
    found_axes = priced_axes(found.graph, axes(found.graph))
    for shares in ((2, 1), (3, 2, 1)):
        chosen, dropped = tried_axes(found.graph, chosen_axes(found_axes, len(shares)), shares)
        assert not dropped
        for exact, limit in ((False, 1e-5), (True, 1e-12)):
            result = agree(found, chosen, shares, rows=3, exact=exact)
            print(name, shares, "float64" if exact else "float32", result)
            assert max(result.gradients, result.loss, result.buffers) <= limit
            assert result.compared > len(shares)
            assert result.exchanges["all_reduce"] > 0
            assert sum(result.held) > max(result.held)


def test_convolutions_with_norms_and_their_classes() -> None:
    module = nn.Sequential(
        nn.Conv2d(3, 8, 3, padding=1), nn.BatchNorm2d(8), nn.ReLU(inplace=True),
        nn.Conv2d(8, 8, 3, groups=4), nn.GroupNorm(4, 8), nn.ConvTranspose2d(8, 6, 2, 2),
        nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(6, 5),
    )  # fmt: skip
    batch = {"input": torch.randn(4, 3, 8, 8), "target": torch.tensor([0, 4, 2, -100])}
    found = capture(module, batch, _error)
    there = priced_axes(found.graph, axes(found.graph))
    for kind in ("channels", "vocabulary"):
        chosen = chosen_axes(there, 2, (kind,))
        tried, dropped = tried_axes(found.graph, chosen, (3, 1))
        assert tried
        assert not dropped
        exact = agree(found, tried, (3, 1), exact=True)
        assert max(exact.gradients, exact.loss, exact.buffers) <= 1e-12
        assert agree(found, tried, (3, 1)).gradients <= 1e-5


def _error(output: Tensor, batch: dict[str, Tensor]) -> Tensor:
    return nn.functional.cross_entropy(output, batch["target"])


@pytest.mark.nightly
def test_every_axis_there_is_splits_right() -> None:
    """Sequence, and what nobody would choose: each alone, tried."""
    torch.manual_seed(0)
    model = llama.Llama(blocks=1, dim=48, heads=6, kv_heads=3, hidden=20)
    graph = capture(model, llama.example_batch(), None).graph
    tried, dropped = tried_axes(graph, priced_axes(graph, axes(graph)), (2, 1))
    assert not dropped
    assert any(axis.kind == "sequence" and axis.along for axis in tried)


class Softmaxed(nn.Module):
    """One hidden axis with a softmax over it."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(4, 6), nn.Linear(6, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(self.up(x).softmax(-1)).pow(2).sum()


def test_a_wrong_rule_is_caught_and_not_used(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(find.RULES, "softmax", layers.RULES["relu"])
    found = capture(Softmaxed(), {"x": torch.randn(5, 4)})
    hidden = next(a for a in axes(found.graph) if a.size == 6)
    assert "softmax" in hidden.along
    assert agree(found, [hidden], (2, 1), exact=True).gradients > 1e-3  # what it would have done
    tried, dropped = tried_axes(found.graph, [hidden], (2, 1))
    ((axis, op), why), *others = dropped.items()
    assert not others
    assert (axis, op) == (hidden.name, "softmax")
    assert "differs by" in why
    assert "softmax" in tried[0].whole
    assert agree(found, tried, (2, 1), exact=True).gradients <= 1e-12


def test_a_wrong_form_of_an_op_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    """A bias that every member adds."""
    monkeypatch.setattr(rewrite, "BIAS", {})
    monkeypatch.setattr(local, "LOCAL", {})
    monkeypatch.setattr(rewrite, "LOCAL", {})
    found = capture(Softmaxed(), {"x": torch.randn(5, 4)})
    summed = next(a for a in axes(found.graph) if "linear_1" in a.summed)
    tried, dropped = tried_axes(found.graph, [summed], (2, 1))
    assert [op for _, op in dropped] == ["linear_1"]
    assert agree(found, tried, (2, 1), exact=True).gradients <= 1e-12


class Turned(nn.Module):
    """What is divided is dropped out as it lies in memory: not row by row."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(4, 6), nn.Linear(6, 3)
        self.dropout = nn.Dropout(0.5)

    def forward(self, x: Tensor) -> Tensor:
        turned = self.up(x).transpose(0, 1).contiguous().transpose(0, 1)
        return self.down(self.dropout(turned)).pow(2).sum()


class ChannelsLast(nn.Module):
    """A sum over members lies in memory as the convolution does: channels last."""

    def __init__(self, draw: str) -> None:
        super().__init__()
        self.up, self.down = nn.Conv2d(4, 6, 1), nn.Conv2d(6, 3, 1)
        self.dropout, self.draw = nn.Dropout(0.5), draw

    def forward(self, x: Tensor) -> Tensor:
        y = self.down(self.up(x.permute(0, 3, 1, 2)).relu())
        if self.draw == "noise":
            return (y + torch.randn_like(y)).pow(2).sum()
        if self.draw == "by rows":
            return self.dropout(y.permute(0, 2, 3, 1)).pow(2).sum()
        return self.dropout(y).pow(2).sum()


@pytest.mark.gate("by rows", "dropout")
@pytest.mark.parametrize("draw", ["dropout", "noise", "by rows", "divided"])
def test_draws_follow_the_undivided_memory_order(draw: str) -> None:
    """A sum, or what is drawn for all members, lay row by row: other numbers were dropped out."""
    module = Turned() if draw == "divided" else ChannelsLast(draw)
    shape = (5, 7, 4) if draw == "divided" else (5, 7, 9, 4)
    found = capture(module, {"x": torch.randn(shape)})
    wide = next(a for a in axes(found.graph) if any(p.name == "up.weight" for p in a.params))
    tried, dropped = tried_axes(found.graph, [wide], (2, 1))
    assert tried == (wide,)
    assert not dropped
    for exact, limit in ((False, 1e-5), (True, 1e-12)):
        result = agree(found, tried, (2, 1), exact=exact)
        assert max(result.gradients, result.loss) <= limit


class Ranges(nn.Module):
    """The least and largest number so far, which the numbers are held within."""

    def __init__(self) -> None:
        super().__init__()
        self.low: Tensor
        self.high: Tensor
        self.register_buffer("low", torch.tensor(0.0))
        self.register_buffer("high", torch.tensor(0.0))

    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            self.low.copy_(torch.minimum(self.low, x.min()))
            self.high.copy_(torch.maximum(self.high, x.max()))
        return x.clamp(self.low / 2, self.high / 2)


def test_ops_that_write_and_return_nothing_read_whole_values() -> None:
    """Each member wrote the least and largest of its own part."""
    module = nn.Sequential(nn.Linear(6, 8), Ranges(), nn.Linear(8, 4))
    found = capture(module, {"input": torch.randn(4, 6)}, lambda out, _: out.square().mean())
    there = chosen_axes(priced_axes(found.graph, axes(found.graph)), 2)
    assert any(place.name == "0.weight" for axis in there for place in axis.params)
    for exact, limit in ((False, 1e-5), (True, 1e-12)):
        result = agree(found, there, (1, 1), exact=exact)
        assert max(result.gradients, result.loss, result.buffers) <= limit


def test_values_that_autocast_would_cast_are_cast(monkeypatch: pytest.MonkeyPatch) -> None:
    """A bias beside a product in sixteen bits made a sum of 32: no message has room for that."""
    found = capture(Softmaxed(), {"x": torch.randn(5, 4)}, autocast="bfloat16")
    summed = next(a for a in axes(found.graph) if "linear_1" in a.summed)
    assert tried_axes(found.graph, [summed], (2, 1))[1] == {}
    monkeypatch.setattr(local, "_typed", lambda _local, _suffix, value, *_: value)
    _, dropped = tried_axes(found.graph, [summed], (2, 1))
    assert dropped[summed.name, "linear_1"] == (
        "linear_1 is float32 under autocast, expected bfloat16"
    )


class Attends(nn.Module):
    """torch's own attention, whose heads share a dimension with the batch; a mask of booleans."""

    def __init__(self) -> None:
        super().__init__()
        self.attend = nn.MultiheadAttention(24, 3, batch_first=True)
        self.mask: Tensor
        self.register_buffer("mask", torch.ones(5, 5).triu(1).bool())

    def forward(self, input: Tensor) -> Tensor:
        found: Tensor = self.attend(input, input, input, attn_mask=self.mask)[0]
        return found


def test_heads_beside_the_batch_are_divided_and_masks_compared() -> None:
    torch.manual_seed(0)
    found = capture(Attends(), {"input": torch.randn(4, 5, 24)}, lambda y, _: y.square().mean())
    priced = priced_axes(found.graph, axes(found.graph))
    chosen, dropped = tried_axes(found.graph, chosen_axes(priced, 2), (2, 1))
    assert [(axis.kind, axis.size) for axis in chosen] == [("heads", 3)]
    assert not dropped
    result = agree(found, chosen, (2, 1), exact=True)
    assert max(result.loss, result.gradients, result.buffers) <= 1e-12
    assert result.exchanges == {"all_reduce": 1}  # and no gather around it


class Words(nn.Module):
    """A table of words, read by its rows and scored."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(7, 4)
        self.scores = nn.Linear(4, 7, bias=False)
        self.scores.weight = self.table.weight

    def forward(self, words: Tensor) -> Tensor:
        scores: Tensor = self.scores(self.table(words))
        return scores.flatten(0, 1)


@pytest.mark.gate("7-words")
@pytest.mark.parametrize("entry", ["words", "next"])
@pytest.mark.parametrize("number", [7, -1])
def test_an_index_that_no_member_has_stops_as_in_one_process(entry: str, number: int) -> None:
    """Members gave zeros for it, and training went on: a class that is not there, or -1."""
    words = torch.arange(7).repeat(4, 1)
    batch = {"words": words, "next": words.flip(1)}
    batch["next"][1, 3] = -100
    found = capture(Words(), batch, _next_word)
    there = chosen_axes(priced_axes(found.graph, axes(found.graph)), 2, ("vocabulary",))
    assert [axis.size for axis in there] == [7]
    tried, dropped = tried_axes(found.graph, there, (1, 1))
    assert not dropped
    assert agree(found, tried, (1, 1), exact=True).gradients <= 1e-12
    made = sharded(found.graph, tried, (1, 1))
    own = [{s.param: s for s in made.shards if s.member == m} for m in (0, 1)]
    tensors = [{n: taken(t, mine[n]) for n, t in found.tensors.items()} for mine in own]
    inputs = found.inputs()
    run_members(made.members, tensors, [inputs, inputs])
    inputs[entry][2, 3] = number
    with pytest.raises((IndexError, RuntimeError), match=r"index.* out of"):
        run_members(made.members, tensors, [inputs, inputs])


def _next_word(scores: Tensor, batch: dict[str, Tensor]) -> Tensor:
    return nn.functional.cross_entropy(scores, batch["next"].flatten())


class Kept(nn.Module):
    """A hidden width with a mean of its own that a function keeps, in a buffer of that width."""

    def __init__(self, keep: Callable[[Kept, Tensor], None]) -> None:
        super().__init__()
        self.up, self.down, self.keep = nn.Linear(6, 8), nn.Linear(8, 4), keep
        self.mean: Tensor
        self.register_buffer("mean", torch.zeros(8))

    def forward(self, input: Tensor) -> Tensor:
        h = self.up(input)
        self.keep(self, h)
        out: Tensor = self.down((h - self.mean).relu())
        return out


def _copied(own: Kept, h: Tensor) -> None:
    own.mean.copy_(0.9 * own.mean + 0.1 * h.detach().mean(0))


def _copied_in_region(own: Kept, h: Tensor) -> None:
    with torch.no_grad():
        own.mean.copy_(0.9 * own.mean + 0.1 * h.mean(0))


def _lerped_in_region(own: Kept, h: Tensor) -> None:
    with torch.no_grad():
        own.mean.lerp_(h.mean(0), 0.1)


def _assigned(own: Kept, h: Tensor) -> None:
    own.mean = 0.9 * own.mean + 0.1 * h.detach().mean(0)


def _zeroed(own: Kept, h: Tensor) -> None:
    own.mean.zero_()
    own.mean.sub_(h.detach().amax(0))


def _half_written(own: Kept, h: Tensor) -> None:
    own.mean[:4] = h.detach().mean(0)[:4]


def _added(own: Kept, h: Tensor) -> None:
    own.mean.mul_(0.9).add_(h.detach().mean(0), alpha=0.1)


WRITES = [
    _copied, _copied_in_region, _lerped_in_region, _assigned, _zeroed, _half_written, _added
]  # fmt: skip


@pytest.mark.gate("_assigned", "_half_written", "_lerped_in_region")
@pytest.mark.parametrize("keep", WRITES)
def test_writes_in_place_are_those_of_one_process(
    keep: Callable[[Kept, Tensor], None],
) -> None:
    """An op without a rule wrote into a copy that was gathered for it: the buffer stayed."""
    torch.manual_seed(0)
    found = capture(Kept(keep), {"input": torch.randn(4, 6)}, lambda out, _: out.square().mean())
    every = priced_axes(found.graph, axes(found.graph))
    assert every
    for chosen in ([axis] for axis in every if axis.size > 1):
        tried, _ = tried_axes(found.graph, chosen, (1, 1))
        result = agree(found, tried, (1, 1), exact=True)
        assert max(result.gradients, result.loss, result.buffers) <= 1e-12
    divided = {place.name for axis in every for place in axis.params}
    ruled = (_copied, _assigned, _half_written, _added)  # each member writes its own part
    assert ("mean" in divided) == (keep in ruled)


def test_a_rule_that_fails_for_what_is_written_leaves_the_axis_out(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    found = capture(Kept(_added), {"input": torch.randn(4, 6)}, lambda out, _: out.square().mean())
    hidden = next(a for a in axes(found.graph) if any(p.name == "mean" for p in a.params))
    monkeypatch.setattr(sharding, "try_rule", lambda trial: _fails(trial.whole, "mul_"))
    tried, dropped = tried_axes(found.graph, [hidden], (1, 1))
    assert dropped
    assert not tried


def _fails(graph: Graph, name: str) -> str | None:
    return "it failed" if any(name in op.target for op in graph.ops) else None

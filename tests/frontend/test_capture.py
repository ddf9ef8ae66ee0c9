"""The captured graph computes what the module computes: loss, outputs, gradients, buffers."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from pydantic import TypeAdapter
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from bigbrain_fx.core import Const, Graph, Op
from bigbrain_fx.errors import CaptureError, InputError
from bigbrain_fx.frontend import Captured, capture
from tests.support.captured import assert_same, ops_of, run

T, D, V = 8, 16, 32


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(D)
        self.qkv = nn.Linear(D, 3 * D)
        self.out = nn.Linear(D, D)
        self.drop = nn.Dropout(0.2)

    def forward(self, x: Tensor) -> Tensor:
        rows, length, _ = x.shape
        q, k, v = self.qkv(self.norm(x)).chunk(3, -1)
        q, k, v = (part.view(rows, length, 2, -1).transpose(1, 2) for part in (q, k, v))
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True, dropout_p=0.1)
        return x + self.drop(self.out(mixed.transpose(1, 2).reshape(rows, length, D)))


class TiedGPT(nn.Module):
    def __init__(self, blocks: int = 2) -> None:
        super().__init__()
        self.embed = nn.Embedding(V, D)
        self.blocks = nn.ModuleList(Block() for _ in range(blocks))
        self.head = nn.Linear(D, V, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embed(tokens)
        for block in self.blocks:
            x = block(x)
        return self.head(x)


def cross_entropy(output: Tensor, batch: Any) -> Tensor:
    return F.cross_entropy(output.flatten(0, 1), batch["targets"].flatten())


def tokens(rows: int = 4) -> dict[str, Tensor]:
    torch.manual_seed(3)
    return {"tokens": torch.randint(V, (rows, T)), "targets": torch.randint(V, (rows, T))}


# --------------------------------------------------------------------------- a GPT


@pytest.fixture(scope="module")
def gpt() -> tuple[TiedGPT, Captured]:
    torch.manual_seed(0)
    model = TiedGPT()
    return model, capture(model, tokens(), cross_entropy)


def test_tied_gpt_with_dropout_is_bitwise_the_module(gpt: tuple[TiedGPT, Captured]) -> None:
    model, found = gpt

    def eager(words: Tensor, targets: Tensor) -> Tensor:
        return cross_entropy(model(words), {"targets": targets})

    assert_same(model, found, eager)
    assert_same(model, found, eager, rows=3)
    assert_same(model, found, eager, rows=1)
    assert found.warnings == ()


def test_tied_names_stay_and_are_used_by_their_own_modules(gpt: tuple[TiedGPT, Captured]) -> None:
    _, found = gpt
    canonical = {p.name: p.canonical for p in found.graph.params if p.name != p.canonical}
    assert canonical == {"head.weight": "embed.weight"}
    assert found.tensors["head.weight"] is found.tensors["embed.weight"]
    embedding = ops_of(found.graph, "embedding")[0]
    head = ops_of(found.graph, "linear")[-1]
    assert (embedding.params, head.params) == (("embed.weight",), ("head.weight",))


def test_sizes_are_arithmetic_over_the_batch(gpt: tuple[TiedGPT, Captured]) -> None:
    graph = gpt[1].graph
    flat = ops_of(graph, "flatten")[0]
    assert flat.outputs[0].shape == (f"{T}*B", V)
    assert flat.at(3).outputs[0].shape == (3 * T, V)
    assert graph.static_batch is None
    assert [entry.spec.shape for entry in graph.inputs] == [("B", T), ("B", T)]


def test_modules_and_lines_are_the_users(gpt: tuple[TiedGPT, Captured]) -> None:
    qkv = ops_of(gpt[1].graph, "linear")[0]
    assert [call.path for call in qkv.modules] == ["", "blocks.0", "blocks.0.qkv"]
    assert qkv.source.startswith("test_capture.py:")
    assert qkv.code == "q, k, v = self.qkv(self.norm(x)).chunk(3, -1)"
    assert ops_of(gpt[1].graph, "cross_entropy_loss")[0].code.startswith("return F.cross_entropy")


def test_costs_of_known_ops(gpt: tuple[TiedGPT, Captured]) -> None:
    graph = gpt[1].graph
    qkv = ops_of(graph, "linear")[0]
    assert qkv.flops == f"{2 * T * D * 3 * D}*B"
    assert qkv.at(5).flops == 2 * 5 * T * D * 3 * D
    assert qkv.at(1).reads_bytes == 4 * (T * D + 3 * D * D + 3 * D)
    assert qkv.at(1).writes_bytes == 4 * T * 3 * D
    assert ops_of(graph, "chunk")[0].writes_bytes == 0
    attention = ops_of(graph, "scaled_dot_product_attention")[0].at(1)
    assert attention.flops == 2 * T * T * (2 * 8 + 2 * 8 + 5)


def test_random_ops_are_known(gpt: tuple[TiedGPT, Captured]) -> None:
    dice = [op.target.split(".")[1] for op in gpt[1].graph.ops if op.random]
    assert dice == ["scaled_dot_product_attention", "dropout"] * 2


def test_json_round_trip(gpt: tuple[TiedGPT, Captured]) -> None:
    adapter = TypeAdapter(Graph)
    text = adapter.dump_json(gpt[1].graph)
    again = adapter.validate_json(text)
    assert again == gpt[1].graph
    assert repr(again) == repr(gpt[1].graph)  # 1 and 1.0 and True are equal, not the same


def test_key_leaf_and_order(gpt: tuple[TiedGPT, Captured]) -> None:
    _, found = gpt
    keyed: list[str] = []
    asked: set[tuple[str, str]] = set()

    def key(op: Op) -> Any:
        keyed.append(op.name)
        return torch.no_grad()

    def leaf(name: str, op: str) -> Tensor:
        asked.add((name, op))
        return found.tensors[name]

    order = [op.name for op in found.graph.ops]
    run(found, found.inputs(), key=key, leaf=leaf, order=order)
    assert keyed == [op.name for op in found.graph.ops if op.random]
    assert ("embed.weight", "embedding") in asked


def test_missing_input_is_named(gpt: tuple[TiedGPT, Captured]) -> None:
    with pytest.raises(InputError, match="needs inputs targets, found tokens"):
        run(gpt[1], {"tokens": tokens()["tokens"]})


# --------------------------------------------------------------------------- state and regions


class Normed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(3, 4, 3, padding=1)
        self.norm = nn.BatchNorm2d(4)

    def forward(self, x: Tensor) -> Tensor:
        return F.relu(self.norm(self.conv(x)), inplace=True)


def test_batch_norm_in_training_moves_its_buffers() -> None:
    model = Normed()
    found = capture(
        model, (torch.randn(4, 3, 5, 5), torch.randn(4)), lambda o, b: o.mean() + b[1].sum()
    )
    assert_same(model, found, lambda x, y: model(x).mean() + y.sum())
    norm = ops_of(found.graph, "batch_norm")[0]
    assert norm.mutates == ("norm.running_mean", "norm.running_var")
    counter = next(op for op in found.graph.ops if "norm.num_batches_tracked" in op.mutates)
    assert counter.target == "aten.add_.Tensor"
    assert ops_of(found.graph, "conv2d")[0].at(4).flops == 2 * 4 * 4 * 25 * 27
    assert (
        model.state_dict()["norm.num_batches_tracked"] == 1
    )  # by the run above, not by the capture


def test_eval_capture_has_no_dice_and_no_gradients() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Dropout(0.5))
    found = capture(model, (torch.randn(4, 4),), training=False)
    assert found.graph.loss is None
    assert not any(op.random or op.mutates or op.requires_grad for op in found.graph.ops)
    assert not ops_of(found.graph, "dropout")
    assert model.training  # as it was


class Rotary(nn.Module):
    frequency: Tensor
    seen: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("frequency", torch.arange(4.0), persistent=False)
        self.register_buffer("seen", torch.zeros(8))
        self.linear = nn.Linear(8, 8)

    @torch.no_grad()
    def table(self, x: Tensor) -> tuple[Tensor, Tensor]:
        self.seen.mul_(0.9).add_(x.mean((0, 1)))
        with torch.autocast("cpu", enabled=False):
            angle = torch.outer(torch.arange(x.shape[1]).float(), self.frequency)
        return angle.cos(), angle.sin()

    def forward(self, x: Tensor) -> Tensor:
        cos, sin = self.table(x)
        first, second = self.linear(x).split(4, -1)
        return (
            torch.cat([first * cos - second * sin, first * sin + second * cos], -1).square().sum()
        )


def test_no_grad_region_is_kept_whole() -> None:
    model = Rotary()
    found = capture(model, (torch.randn(4, 6, 8),))
    assert_same(model, found, model)
    region = next(op for op in found.graph.ops if op.body)
    assert region.target == "region.no_grad"
    assert region.mutates == ("seen",)
    assert region.params == ("seen", "frequency")
    assert region.refs == ("x",)
    assert not any(op.body for op in region.body.ops)  # type: ignore[union-attr]  # disabled autocast is gone
    kinds = {p.name: p.kind for p in found.graph.params}
    assert (kinds["frequency"], kinds["seen"]) == ("constant", "buffer")
    taken = [op for op in found.graph.ops if region.name in op.refs]
    assert [op.requires_grad for op in taken] == [False, False]


class Cast(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(8, 8)
        self.second = nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        with torch.autocast("cpu", torch.bfloat16):
            x = self.second(x.view(-1, 8)).relu()
        return x.float().square().mean()


def test_autocast_region() -> None:
    model = Cast()
    found = capture(model, (torch.randn(4, 8),))
    assert_same(model, found, model)
    region = next(op for op in found.graph.ops if op.body)
    assert region.target == "region.autocast"
    assert dict(region.kwargs) == {"dtype": Const("torch.bfloat16"), "enabled": True}


class Still(nn.Module):
    """Has a block of no_grad within its region of autocast, which torch's own trace drops."""

    def __init__(self) -> None:
        super().__init__()
        self.lin, self.target = nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            h = self.lin(x)
            with torch.no_grad():
                aim = self.target(x)
            out = self.lin(h - aim)
        found: Tensor = self.target(out.float())  # in float32: the region cannot be everywhere
        return found


def test_no_grad_within_a_region_of_autocast_stays() -> None:
    found = capture(Still(), (torch.randn(4, 8),), lambda o, b: o.square().mean())
    kinds = [op.target for op in found.graph.ops if op.body]
    assert kinds == ["region.autocast", "region.no_grad", "region.autocast"]
    still = next(op for op in found.graph.ops if op.target == "region.no_grad")
    assert still.body is not None
    assert still.body.ops[0].target == "region.autocast"


def test_autocast_of_the_whole_model_leaves_a_graph_that_can_be_cut() -> None:
    model = nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 8))
    found = capture(model, (torch.randn(4, 8),), lambda o, b: o.float().sum(), autocast="bfloat16")

    def eager(x: Tensor) -> Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            return model(x).float().sum()

    assert_same(model, found, eager)
    assert found.graph.autocast == "bfloat16"
    assert not any(op.body for op in found.graph.ops)
    assert ops_of(found.graph, "linear")[0].outputs[0].dtype == "bfloat16"


class AddsInPlace(nn.Module):
    """Adds and takes a power in place: what a GPU's autocast would cast, written without."""

    def __init__(self) -> None:
        super().__init__()
        self.lin, self.norm = nn.Linear(8, 8), nn.LayerNorm(8)

    def forward(self, x: Tensor) -> Tensor:
        h = F.relu(self.lin(x), inplace=True) * 2
        h += self.norm(x)  # float32 on a GPU, and h stays as it is
        return (h * 2).exp_().float()


@pytest.mark.parametrize("autocast", ["bfloat16", None])
def test_writes_in_place_under_autocast_stay_in_place(autocast: str | None) -> None:
    model = AddsInPlace()
    found = capture(model, (torch.randn(4, 8),), lambda o, b: o.square().mean(), autocast=autocast)
    written = {op.target.split(".")[1] for op in found.graph.ops if op.mutates}
    assert written == ({"add_", "exp_"} if autocast else set())

    def eager(x: Tensor) -> Tensor:
        with torch.autocast("cpu", torch.bfloat16, enabled=autocast is not None):
            return model(x).square().mean()

    assert_same(model, found, eager)


# --------------------------------------------------------------------------- custom functions


class RoundSTE(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, scale: float) -> Tensor:
        return (x * scale).round() / scale

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        return gradient * 1.5, None


class Pair(torch.autograd.Function):
    @staticmethod
    def forward(x: Tensor, y: Tensor) -> tuple[Tensor, None, Tensor]:
        return x * 2, None, y + 1

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        ctx.save_for_backward(inputs[0])

    @staticmethod
    def backward(ctx: Any, a: Tensor, _b: None, c: Tensor) -> tuple[Tensor, Tensor]:
        (x,) = ctx.saved_tensors
        return a * x, c * 3


rounded: Any = RoundSTE.apply  # taken at import time, as people do
pair: Any = Pair.apply


class Quantised(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        x = rounded(self.linear(x), 4.0)
        a, _, b = pair(x, x.sin())
        return (a * b).sum()


def test_custom_functions_keep_their_gradients() -> None:
    model = Quantised()
    found = capture(model, (torch.randn(4, 8),))
    assert_same(model, found, model)
    opaque = [op for op in found.graph.ops if op.target.startswith("opaque.")]
    assert [op.target.rpartition(".")[2] for op in opaque] == ["RoundSTE", "Pair"]
    assert opaque[0].args[1] == 4.0
    assert not any(op.target == "aten.round.default" for op in found.graph.ops)
    assert rounded(torch.tensor(1.3), 4.0) == 1.25  # the patch is gone


class Dirty(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.mark_dirty(x)
        return x.mul_(2)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        return gradient


def test_custom_function_that_writes_is_refused() -> None:
    class Model(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            dirty: Any = Dirty.apply
            return dirty(x.sin()).sum()

    with pytest.raises(CaptureError, match="Dirty writes into its argument") as caught:
        capture(Model(), (torch.randn(4, 8),))
    assert caught.value.at
    assert caught.value.at.startswith("test_capture.py:")


class Checkpointed(nn.Module):
    def __init__(self, reentrant: bool) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)
        self.reentrant = reentrant

    def forward(self, x: Tensor) -> Tensor:

        x = self.linear(x)
        return checkpoint(self.linear, x, use_reentrant=self.reentrant).square().sum()


@pytest.mark.gate("True")
@pytest.mark.parametrize("reentrant", [False, True])
def test_checkpointing_is_plain_code_in_a_trace(reentrant: bool) -> None:
    model = Checkpointed(reentrant)
    found = capture(model, (torch.randn(4, 8),))
    assert_same(model, found, lambda x: model.linear(model.linear(x)).square().sum())
    assert not any(op.body for op in found.graph.ops)


@pytest.mark.parametrize("reentrant", [False, True])
def test_a_reentrant_checkpoint_of_inputs_alone_stops_gradients(reentrant: bool) -> None:
    """None of its arguments needs a gradient, so torch's older checkpoint gives weights none."""

    class First(Checkpointed):
        def forward(self, x: Tensor) -> Tensor:
            return self.linear(checkpoint(self.linear, x, use_reentrant=self.reentrant)).sum()

    found = capture(First(reentrant), (torch.randn(4, 8),))
    assert found.graph.ops[0].outputs[0].requires_grad is not reentrant


@pytest.mark.nightly
def test_meta_gives_the_same_graph_without_numbers() -> None:
    with torch.device("meta"):
        model = TiedGPT()
    model.head.weight = model.embed.weight
    found = capture(model, tokens(), cross_entropy)
    real = capture(TiedGPT(), tokens(), cross_entropy)
    assert found.graph == real.graph
    assert found.tensors["embed.weight"].device.type == "meta"

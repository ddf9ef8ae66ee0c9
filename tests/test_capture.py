"""The captured graph computes what the module computes: loss, outputs, gradients, buffers."""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from pydantic import TypeAdapter
from torch import Tensor, nn

from bigbrain_fx.capture import Captured, capture, run_graph
from bigbrain_fx.core import Const, Graph, Op, ParamRef
from bigbrain_fx.errors import CaptureError, InputError

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


def gradients(loss: Tensor, model: nn.Module) -> dict[str, Tensor | None]:
    names, parameters = zip(*model.named_parameters(), strict=True)
    found = torch.autograd.grad(loss, parameters, allow_unused=True)
    return dict(zip(names, found, strict=True))


def run(found: Captured, inputs: dict[str, Tensor], **options: Any) -> dict[str, Any]:
    torch.manual_seed(7)
    return run_graph(found.graph, found.tensors, inputs, functions=found.functions, **options)


def assert_same(model: nn.Module, found: Captured, eager: Any, rows: int | None = None) -> None:
    """Compare loss, gradients and buffers, bit by bit, under one global seed."""
    inputs = found.inputs(rows)
    state = {name: value.clone() for name, value in model.state_dict().items()}
    torch.manual_seed(7)
    want = eager(*inputs.values())
    want_gradients = gradients(want, model)
    want_state = {name: value.clone() for name, value in model.state_dict().items()}
    model.load_state_dict(state)
    have = run(found, inputs)[found.graph.loss or ""]
    assert torch.equal(have, want)
    for name, gradient in gradients(have, model).items():
        expected = want_gradients[name]
        assert (gradient is None) == (expected is None), name
        assert gradient is None or torch.equal(gradient, expected), name
    for name, value in model.state_dict().items():
        assert torch.equal(value, want_state[name]), name
    assert_flags(found)


def assert_flags(found: Captured) -> None:
    """Every value's shape, strides, type and need of a gradient is what the graph says."""
    inputs = found.inputs(3) if found.graph.static_batch is None else found.inputs()
    graph = found.graph.at(3) if found.graph.static_batch is None else found.graph
    names = [op.name for op in graph.ops]
    state = {name: tensor.detach().clone() for name, tensor in found.tensors.items()}
    values = run(found, inputs, values=names)
    for op in graph.ops:
        value = values[op.name]
        tensors = [t for t in (value if op.is_tuple else [value]) if isinstance(t, Tensor)]
        assert len(tensors) == len(op.outputs), op
        for tensor, spec in zip(tensors, op.outputs, strict=True):
            assert tuple(tensor.shape) == spec.shape, op
            assert tensor.stride() == spec.strides, op
            assert str(tensor.dtype) == f"torch.{spec.dtype}", op
            assert tensor.requires_grad == spec.requires_grad, op
    with torch.no_grad():
        for name, tensor in found.tensors.items():
            tensor.copy_(state[name])


def ops_of(graph: Graph, family: str) -> list[Op]:
    return [op for op in graph.ops if op.target.split(".")[1] == family]


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
    assert int(model.norm.num_batches_tracked) == 1  # by the run above, not by the capture


def test_eval_capture_has_no_dice_and_no_gradients() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Dropout(0.5))
    found = capture(model, (torch.randn(4, 4),), training=False)
    assert found.graph.loss is None
    assert not any(op.random or op.mutates or op.requires_grad for op in found.graph.ops)
    assert not ops_of(found.graph, "dropout")
    assert model.training  # as it was


class Rotary(nn.Module):
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


# --------------------------------------------------------------------------- custom functions


class RoundSTE(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, scale: float) -> Tensor:
        return (x * scale).round() / scale

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:  # type: ignore[override]
        return gradient * 1.5, None


class Pair(torch.autograd.Function):
    @staticmethod
    def forward(x: Tensor, y: Tensor) -> tuple[Tensor, None, Tensor]:
        return x * 2, None, y + 1

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        ctx.save_for_backward(inputs[0])

    @staticmethod
    def backward(ctx: Any, a: Tensor, _b: None, c: Tensor) -> tuple[Tensor, Tensor]:  # type: ignore[override]
        (x,) = ctx.saved_tensors
        return a * x, c * 3


rounded = RoundSTE.apply  # taken at import time, as people do


class Quantised(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        x = rounded(self.linear(x), 4.0)
        a, _, b = Pair.apply(x, x.sin())
        return (a * b).sum()


def test_custom_functions_keep_their_gradients() -> None:
    model = Quantised()
    found = capture(model, (torch.randn(4, 8),))
    assert_same(model, found, model)
    opaque = [op for op in found.graph.ops if op.target.startswith("opaque.")]
    assert [op.target.rpartition(".")[2] for op in opaque] == ["RoundSTE", "Pair"]
    assert opaque[0].args[1] == 4.0
    assert not any(op.target == "aten.round.default" for op in found.graph.ops)
    assert RoundSTE.apply(torch.tensor(1.3), 4.0) == 1.25  # the patch is gone


class Dirty(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.mark_dirty(x)
        return x.mul_(2)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:  # type: ignore[override]
        return gradient


def test_custom_function_that_writes_is_refused() -> None:
    class Model(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return Dirty.apply(x.sin()).sum()

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
        from torch.utils.checkpoint import checkpoint

        x = self.linear(x)
        return checkpoint(self.linear, x, use_reentrant=self.reentrant).square().sum()


@pytest.mark.parametrize("reentrant", [False, True])
def test_checkpointing_is_plain_code_in_a_trace(reentrant: bool) -> None:
    model = Checkpointed(reentrant)
    found = capture(model, (torch.randn(4, 8),))
    assert_same(model, found, model)
    assert not any(op.body for op in found.graph.ops)


# --------------------------------------------------------------------------- writes and views


class InPlace(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        x += 1  # the input itself, unviewed
        h = self.linear(x)
        kept = h
        h.mul_(2).add_(x)
        h = h.relu_()
        table = torch.zeros_like(h)
        table[:, 0] = kept[:, 1]
        count = torch.tensor([1.0, 2.0])
        count.add_(1)
        return (kept + table).sum() * count.sum()


def test_writes_become_plain_ops_where_nothing_shares() -> None:
    model = InPlace()
    found = capture(model, (torch.randn(4, 8),))
    assert_same(model, found, lambda x: model(x.clone()))
    targets = [op.target for op in found.graph.ops]
    assert "aten.relu.default" in targets
    assert "aten.relu_.default" not in targets
    assert "aten.mul_.Tensor" not in targets
    copy = next(op for op in found.graph.ops if op.target == "aten.copy_.default")
    assert copy.mutates == ("zeros_like",)
    inputs = found.inputs()
    before = inputs["x"].clone()
    run(found, inputs)
    assert torch.equal(inputs["x"], before)
    constant = next(p for p in found.graph.params if p.kind == "constant")
    assert found.tensors[constant.name].tolist() == [1.0, 2.0]  # a copy is written into


def test_write_into_a_viewed_input_is_refused() -> None:
    class Model(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            x[:, 0] = 0
            return x.sum()

    with pytest.raises(CaptureError, match="writes into its input 'x'") as caught:
        capture(Model(), (torch.randn(4, 8),))
    assert caught.value.help == "write into a copy: x = x.clone()"


def test_views_know_their_base_and_cost_nothing() -> None:
    class Model(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            a, b = x.sin().split(4, -1)
            return (a.reshape(-1) * b.contiguous().view(-1).to(torch.float32)).sum()

    found = capture(Model(), (torch.randn(4, 8),))
    split = ops_of(found.graph, "split")[0]
    assert split.view_of == "sin"
    assert split.is_tuple
    reshape = ops_of(found.graph, "reshape")[0]
    assert reshape.view_of is None  # not contiguous: a copy
    assert reshape.at(4).writes_bytes == 4 * 16
    assert not ops_of(found.graph, "to")
    assert len(ops_of(found.graph, "contiguous")) == 1


class Shared(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = Normed()
        self.up = nn.Conv2d(4, 3, 1)

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(self.up(self.layer(x))).mean()


def test_a_layer_called_twice_has_two_calls() -> None:
    model = Shared()
    found = capture(model, (torch.randn(4, 3, 5, 5),))
    assert_same(model, found, model)
    calls = [[(c.path, c.call) for c in op.modules] for op in ops_of(found.graph, "batch_norm")]
    assert calls == [
        [("", 0), ("layer", 0), ("layer.norm", 0)],
        [("", 0), ("layer", 1), ("layer.norm", 1)],
    ]


# --------------------------------------------------------------------------- batches


class Keyed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)

    def forward(
        self, x: Tensor, *, mask: Tensor | None = None, flag: bool = False
    ) -> dict[str, Tensor]:
        h = self.linear(x)
        h = h if mask is None else h * mask
        return {"h": h * 2 if flag else h, "loss": h.sum()}


def test_dict_batch_with_none_a_constant_and_a_whole_entry() -> None:
    model = Keyed()
    batch = {"x": torch.randn(4, 8), "mask": None, "flag": True}
    found = capture(model, batch)
    assert_same(model, found, lambda x: model(x, flag=True)["loss"])
    assert len(found.graph.outputs) == 1
    whole = capture(model, {"x": torch.randn(4, 8), "mask": torch.ones(1, 8)})
    assert [entry.batched for entry in whole.graph.inputs] == [True, False]
    assert whole.graph.input["mask"].spec.shape == (1, 8)


def test_entries_that_only_the_loss_reads() -> None:
    model = nn.Linear(8, 8)
    batch = ({"a": torch.randn(4, 8)}["a"], [torch.randn(4, 8), 0.5])
    found = capture(model, batch, lambda o, b: (o - b[1][0]).square().mean() * b[1][1])
    assert [(e.name, e.key) for e in found.graph.inputs] == [("input", (0,)), ("batch_1_0", (1, 0))]


def test_a_model_that_takes_the_whole_dict() -> None:
    class Model(nn.Module):
        def forward(self, batch: dict[str, Tensor]) -> Tensor:
            return (batch["class"] * batch["image size"]).sum()

    found = capture(Model(), {"class": torch.randn(4, 2), "image size": torch.randn(4, 2)})
    assert [e.name for e in found.graph.inputs] == ["class_", "image_size"]
    assert [e.key for e in found.graph.inputs] == [("class",), ("image size",)]


def test_batches_that_do_not_fit() -> None:
    with pytest.raises(InputError, match=r"does not fit Linear.forward\(input\)"):
        capture(nn.Linear(8, 8), {"input": torch.randn(4, 8), "labels": torch.randn(4)})
    with pytest.raises(InputError, match="must hold a tensor"):
        capture(nn.Linear(8, 8), {"input": 3})
    with pytest.raises(InputError, match="the model fails on its example batch") as caught:
        capture(Keyed(), (torch.randn(4, 7),))
    assert caught.value.at
    assert caught.value.at.startswith("test_capture.py:")


def test_names_do_not_collide() -> None:
    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.x = nn.Parameter(torch.ones(8))

        def forward(self, x: Tensor, sum_1: Tensor) -> Tensor:
            return (x * self.x).sum() + sum_1.sum()

    model = Model()
    found = capture(model, (torch.randn(4, 8), torch.randn(4)))
    assert_same(model, found, model)
    names = [op.name for op in found.graph.ops] + [e.name for e in found.graph.inputs]
    assert len({*names, "x"}) == len(names) + 1


# --------------------------------------------------------------------------- what cannot be traced


def test_batch_that_is_not_free_falls_back_to_a_fixed_size() -> None:
    class Model(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return x.sum() if x.shape[0] == 4 else x.mean()

    found = capture(Model(), (torch.randn(4, 8),))
    assert found.graph.static_batch == 4
    assert "4 rows only" in found.warnings[0]
    smaller = capture(Model(), (torch.randn(4, 8),), micro_batch=2)
    assert smaller.graph.static_batch == 2
    assert ops_of(smaller.graph, "mean")
    assert smaller.graph.inputs[0].spec.shape == (2, 8)


def test_a_value_read_in_python_names_the_line() -> None:
    class Model(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            if x.sum() > 0:
                return x.sum()
            return x.mean()

    with pytest.raises(CaptureError, match="reads a tensor's value in Python") as caught:
        capture(Model(), (torch.randn(4, 8),))
    assert caught.value.at
    assert caught.value.at.startswith("test_capture.py:")
    assert "torch.where" in (caught.value.help or "")


def test_shapes_that_depend_on_data_are_refused() -> None:
    class Model(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return x[x > 0].sum()

    with pytest.raises(CaptureError, match="depends on data") as caught:
        capture(Model(), (torch.randn(4, 8),))
    assert caught.value.at
    assert caught.value.at.startswith("test_capture.py:")


def test_item_is_refused() -> None:
    class Model(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return x.sum() * x.mean().item()

    with pytest.raises(CaptureError, match="reads a tensor's value in Python") as caught:
        capture(Model(), (torch.randn(4, 8),))
    assert caught.value.at
    assert caught.value.at.startswith("test_capture.py:")


def test_python_dice_are_warned_of() -> None:
    class Model(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return x.sum() * random.random()

    found = capture(Model(), (torch.randn(4, 8),))
    assert len(found.warnings) == 1
    assert found.warnings[0].startswith("test_capture.py:")
    assert "random numbers" in found.warnings[0]


def test_meta_gives_the_same_graph_without_numbers() -> None:
    with torch.device("meta"):
        model = TiedGPT()
    model.head.weight = model.embed.weight
    found = capture(model, tokens(), cross_entropy)
    real = capture(TiedGPT(), tokens(), cross_entropy)
    assert found.graph == real.graph
    assert found.tensors["embed.weight"].device.type == "meta"


def test_dead_code_is_dropped_and_dice_stay() -> None:
    class Model(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            x.exp().sin()
            F.dropout(x, 0.5)
            return x.sum()

    found = capture(Model(), (torch.randn(4, 8),))
    assert [op.target for op in found.graph.ops] == ["aten.dropout.default", "aten.sum.default"]


def test_returned_parameter_is_a_value() -> None:
    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.scale = nn.Parameter(torch.ones(8))

        def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
            return x * self.scale, self.scale

    found = capture(Model(), (torch.randn(4, 8),), lambda o, b: o[0].sum())
    last = found.graph.op[found.graph.outputs[1]]
    assert last.args == (ParamRef("scale"),)
    assert last.view_of == "scale"

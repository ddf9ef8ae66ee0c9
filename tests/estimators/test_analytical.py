"""`analytical`: the roofline by hand, and what is kept against what autograd really keeps."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import replace
from types import ModuleType

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import models.digits
import models.encdec
import models.gpt
from bigbrain_fx.core import (
    Cluster,
    Costs,
    Device,
    Graph,
    Link,
    Op,
    OpCost,
    Param,
    ParamRef,
    Ref,
    TensorSpec,
)
from bigbrain_fx.frontend import capture
from estimators.analytical import SUM_TOUCHES, Analytical, family, rule_of
from estimators.op_rules import (
    ANY_OTHER,
    CONVOLUTION,
    GELU_TANH,
    OPTIMIZER_LAUNCHES,
    OPTIMIZER_TOUCHES,
    PRODUCT,
    SIMPLE,
)
from tests.support.synthetic import graph_of, op, tensor, weight

CPU = Device("cpu", "h", "cpu", 1 << 30, flops_per_s=1e9, memory_bytes_per_s=1e9, launch_s=1e-6)
GPU = replace(CPU, name="gpu", kind="cuda", flops_per_s=1e12, memory_bytes_per_s=1e12)


def estimate(graph: Graph) -> Costs:
    return Analytical().estimate(graph, Cluster((CPU, GPU), Link(0.0, 1e9)))


def cost(*ops: Op, params: tuple[Param, ...] = (), device: str = "cpu") -> OpCost:
    """Return the cost of the last op of a graph."""
    return estimate(graph_of(ops, params)).op_cost(ops[-1].name, device)


def moving(made: Op, reads: int) -> Op:
    return replace(made, reads_bytes=reads)


# --------------------------------------------------------------------------- time


def linear(flops: int, **more: object) -> Op:
    args = (Ref("a"), ParamRef("w"))
    return op("v", "aten.linear.default", *args, out=tensor(4, 4), flops=flops, **more)


def test_a_product_of_half_width_has_its_own_rate() -> None:
    fast = replace(CPU, half_flops_per_s=4e9)
    ops = (op("a", "aten.neg.default"), linear(10**9))
    half = replace(ops[1], outputs=(replace(ops[1].outputs[0], dtype="bfloat16"),))

    def taken_s(last: Op, device: Device) -> float:
        graph = graph_of((ops[0], last), (weight("w", 4, 4),))
        costs = Analytical().estimate(graph, Cluster((device,), Link(0.0, 1e9)))
        return costs.op_cost("v", "cpu").forward_s

    assert taken_s(half, fast) == pytest.approx(taken_s(ops[1], CPU) / 4, rel=1e-3)
    assert taken_s(ops[1], fast) == taken_s(half, CPU) == taken_s(ops[1], CPU)


def test_a_product_is_bound_by_its_flops_or_by_its_bytes() -> None:
    found = cost(op("a", "aten.neg.default"), linear(10**9), params=(weight("w", 4, 4),))
    product_s = 1.0 / PRODUCT.backward_flops
    assert found.forward_s == pytest.approx(1.0 / PRODUCT.flops, rel=1e-4)
    assert found.backward_input_s == pytest.approx(product_s, rel=1e-4)
    assert found.backward_s == pytest.approx(2 * product_s, rel=1e-4)
    moved = moving(linear(1), 10**9)
    assert cost(op("a", "aten.neg.default"), moved, params=(weight("w", 4, 4),)).forward_s > 1.0


def convolution(rows: int) -> OpCost:
    """Return the cost of a 3 x 3 convolution of 8 to 16 channels, of 4 x 4 pixels."""
    before = op("a", "aten.neg.default", out=tensor(rows, 8, 4, 4))
    flops, moved = rows * 16 * 16 * 2 * 72, 4 * (rows * 128 + 16 * 72)
    made = op(
        "v",
        "aten.conv2d.default",
        Ref("a"),
        ParamRef("w"),
        out=tensor(rows, 16, 4, 4),
        flops=flops,
        reads_bytes=moved,
        writes_bytes=4 * rows * 256,
    )
    return cost(before, made, params=(weight("w", 16, 8, 3, 3),))


def test_a_convolution_adds_up_its_product_its_reorders_and_its_start() -> None:
    blocked = CONVOLUTION.forward
    tensors, weights, flops = 4 * 4 * (128 + 256), 4 * 16 * 72, 4 * 16 * 16 * 2 * 72
    product_s = flops / 1e9 / blocked.flops
    touched = blocked.tensor_touches * tensors + blocked.weight_touches * weights
    expected_s = product_s + touched / 1e9 + blocked.launches * 1e-6
    assert convolution(4).forward_s == pytest.approx(expected_s, rel=1e-9)


def test_convolutions_of_few_rows_cost_more_a_row() -> None:
    one, many = convolution(1), convolution(64)
    for name in ("forward_s", "backward_s", "backward_input_s"):
        assert getattr(one, name) > 1.5 * getattr(many, name) / 64


def test_frozen_weights_and_plain_inputs_save_a_product_each() -> None:
    before = op("a", "aten.neg.default")
    frozen = replace(weight("w", 4, 4), spec=tensor(4, 4, grad=False))
    only_input = cost(before, linear(10**9), params=(frozen,))
    assert only_input.backward_s == only_input.backward_input_s > 1.0
    first = op("v", "aten.linear.default", Ref("x"), ParamRef("w"), out=tensor(4, 4), flops=10**9)
    only_weight = cost(first, params=(weight("w", 4, 4),))
    assert only_weight.backward_input_s == 0.0
    assert only_weight.backward_s > 1.0


def test_elementwise_ops_are_bound_by_bytes() -> None:
    made = moving(op("v", "aten.mul.Tensor", Ref("a"), Ref("b")), 10**9)
    found = cost(op("a", "aten.neg.default"), op("b", "aten.neg.default"), made)
    assert SIMPLE.backward_bytes
    assert found.forward_s == pytest.approx(1.0 / SIMPLE.bytes, rel=1e-4)
    assert found.backward_s == pytest.approx(1.0 / SIMPLE.backward_bytes, rel=1e-4)
    assert found.backward_s == found.backward_input_s


def test_views_cost_next_to_nothing() -> None:
    made = op("v", "aten.view.default", Ref("a"), view_of="a", writes_bytes=0)
    relu = op("v", "aten.relu.default", Ref("a"))
    before = op("a", "aten.neg.default")
    assert cost(before, made).forward_s < cost(before, relu).forward_s
    found = cost(before, made, device="gpu")
    assert (found.forward_s, found.backward_s, found.workspace_bytes) == (0.0, 0.0, 16)
    assert found.host_forward_s < cost(before, relu, device="gpu").host_forward_s


def test_the_backward_of_a_part_writes_the_whole() -> None:
    whole = op("a", "aten.neg.default", out=tensor(10**6))
    part = op("v", "aten.slice.Tensor", Ref("a"), out=tensor(1), view_of="a")
    same = op("v", "aten.view.default", Ref("a"), out=tensor(10**6), view_of="a")
    assert cost(whole, part).backward_s > 100 * cost(whole, same).backward_s


def test_gradients_of_several_readers_are_added() -> None:
    a = op("a", "aten.relu.default", Ref("x"), out=tensor(10**6))
    readers = [op(f"r{i}", "aten.neg.default", Ref("a"), out=tensor(10**6)) for i in range(3)]
    one, three = (
        estimate(graph_of([a, *readers[:n]])).op_cost("a", "cpu").backward_s for n in (1, 3)
    )
    assert three - one == pytest.approx(2 * SUM_TOUCHES * 4e6 / 1e9, rel=1e-3)


def test_an_embedding_writes_its_whole_table_backward() -> None:
    made = op("v", "aten.embedding.default", ParamRef("w"), Ref("x"), out=tensor(4, 8))
    small, large = (cost(made, params=(weight("w", n, 8),)).backward_s for n in (10, 10**6))
    assert large > 1000 * small


def test_sizes_are_free_and_regions_add_up() -> None:
    size = op("v", "aten.sym_size.int", Ref("x"), 0, outputs=())
    assert cost(size) == OpCost(0.0)
    inner = [moving(op(f"i{n}", "aten.mul.Tensor", Ref("x"), 2), 10**9) for n in range(2)]
    region = op("v", "region.autocast", Ref("x"), body=graph_of(inner))
    single = cost(inner[0])
    assert cost(region).forward_s == pytest.approx(2 * single.forward_s)
    silent = replace(region, target="region.no_grad", outputs=(tensor(4, grad=False),))
    assert cost(silent).forward_s == cost(region).forward_s
    assert cost(silent).backward_s == 0.0


def test_the_optimizer_costs_launches_for_each_tensor_and_passes_over_its_bytes() -> None:
    found = estimate(graph_of([op("v", "aten.neg.default", Ref("x"))]))
    launch_s = found.cluster.device["cpu"].launch_s
    assert found.optimizer_s_per_byte["cpu"] == OPTIMIZER_TOUCHES / 1e9
    assert found.optimizer_s_per_tensor["cpu"] == OPTIMIZER_LAUNCHES * launch_s
    assert found.optimizer_s("cpu", 3, 1000) == pytest.approx(
        3 * OPTIMIZER_LAUNCHES * launch_s + OPTIMIZER_TOUCHES * 1000 / 1e9
    )
    assert found.optimizer_state_per_byte == 2.0


def test_families_and_rules() -> None:
    assert family("aten.relu_.default") == "relu"
    assert family("opaque") == "opaque"
    assert (
        rule_of(op("v", "aten.gelu.default", Ref("x"), kwargs=(("approximate", "tanh"),))).speed
        == GELU_TANH
    )
    assert rule_of(op("v", "opaque.mine.Function", Ref("x"))) == ANY_OTHER


# --------------------------------------------------------------------------- what is kept


def really_kept(function: Callable[..., Tensor], inputs: list[Tensor], free: set[int]) -> int:
    """Return the bytes of the storages that autograd saves, those in `free` left out."""
    kept: dict[int, tuple[Tensor, int]] = {}

    def pack(saved: Tensor) -> Tensor:
        storage = saved.untyped_storage()
        kept[storage.data_ptr()] = (saved, storage.nbytes())
        return saved

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda saved: saved):
        result = function(*inputs)
    assert result.requires_grad
    return sum(nbytes for pointer, (_, nbytes) in kept.items() if pointer not in free)


def spec_of(value: Tensor) -> TensorSpec:
    dtype = str(value.dtype).removeprefix("torch.")
    return TensorSpec(tuple(value.shape), dtype, tuple(value.stride()), value.requires_grad)


def floats(*shape: int) -> Tensor:
    return torch.rand(*shape) + 0.5


MASK = torch.ones(4, 32).tril().bool()
ROWS = torch.tensor([0, 2])
KEPT: dict[str, tuple[Callable[..., Tensor], list[Tensor], int]] = {
    # family: the call, its tensors, how many of these (from the end) are parameters
    "linear": (F.linear, [floats(4, 32), floats(8, 32), floats(8)], 2),
    "bmm": (torch.bmm, [floats(2, 4, 8), floats(2, 8, 4)], 0),
    "conv2d": (F.conv2d, [floats(2, 3, 8, 8), floats(4, 3, 3, 3)], 1),
    "add": (torch.add, [floats(4, 32), floats(4, 32)], 0),
    "mul": (torch.mul, [floats(4, 32), floats(4, 32)], 0),
    "relu": (torch.relu, [floats(4, 32)], 0),
    "rsqrt": (torch.rsqrt, [floats(4, 32)], 0),
    "gelu": (F.gelu, [floats(4, 32)], 0),
    "silu": (F.silu, [floats(4, 32)], 0),
    "tanh": (torch.tanh, [floats(4, 32)], 0),
    "pow": (lambda x: x.pow(2), [floats(4, 32)], 0),
    "softmax": (lambda x: x.softmax(-1), [floats(4, 32)], 0),
    "dropout": (lambda x: F.dropout(x, 0.5), [floats(4, 32)], 0),
    "layer_norm": (
        lambda x, w, b: F.layer_norm(x, (32,), w, b),
        [floats(4, 32), floats(32), floats(32)],
        2,
    ),
    "rms_norm": (lambda x, w: F.rms_norm(x, (32,), w), [floats(4, 32), floats(32)], 1),
    "scaled_dot_product_attention": (
        F.scaled_dot_product_attention,
        [floats(1, 2, 16, 8), floats(1, 2, 16, 8), floats(1, 2, 16, 8)],
        0,
    ),
    "masked_fill": (lambda x, m: x.masked_fill(m, 0.0), [floats(4, 32), MASK], 0),
    "index": (lambda x, i: x[i], [floats(4, 32), ROWS], 0),
    "sum": (lambda x: x.sum(), [floats(4, 32)], 0),
    "cat": (lambda x, y: torch.cat([x, y]), [floats(4, 32), floats(4, 32)], 0),
    "max_pool2d": (lambda x: F.max_pool2d(x, 2), [floats(2, 3, 8, 8)], 0),
    "cross_entropy_loss": (F.cross_entropy, [floats(4, 32), torch.tensor([0, 1, 2, 3])], 0),
    "mse_loss": (F.mse_loss, [floats(4, 32), floats(4, 32)], 0),
    "group_norm": (lambda x: F.group_norm(x, 2), [floats(4, 8, 5, 5)], 0),
}


@pytest.mark.parametrize("name", sorted(KEPT))
def test_the_table_knows_what_autograd_keeps(name: str) -> None:
    function, tensors, params = KEPT[name]
    inputs = [t.clone().requires_grad_(t.is_floating_point()) for t in tensors]
    values = inputs[: len(inputs) - params]
    weights = {f"w{i}": t for i, t in enumerate(inputs[len(values) :])}
    free = {t.untyped_storage().data_ptr() for t in weights.values()}
    real = really_kept(function, inputs, free)
    makers = [op(f"a{i}", "aten.neg.default", out=spec_of(t)) for i, t in enumerate(values)]
    args = [Ref(maker.name) for maker in makers] + [ParamRef(key) for key in weights]
    call = op("v", f"aten.{name}.default", *args, out=spec_of(function(*inputs)))
    found = cost(*makers, call, params=tuple(Param(k, spec_of(t), k) for k, t in weights.items()))
    assert found.saved_bytes == pytest.approx(real, abs=64)  # statistics of a few floats


def test_a_storage_counts_once() -> None:
    a = op("a", "aten.gelu.default", Ref("x"), out=tensor(100))
    b = op("b", "aten.gelu.default", Ref("a"), out=tensor(100))
    c = op("c", "aten.silu.default", Ref("a"), out=tensor(100))
    view = op("d", "aten.view.default", Ref("a"), out=tensor(100), view_of="a")
    e = op("e", "aten.silu.default", Ref("d"), out=tensor(100))
    costs = estimate(graph_of([a, b, c, view, e]))
    saved = {name: costs.op_cost(name, "cpu").saved_bytes for name in "abcde"}
    assert saved == {"a": 0, "b": 400, "c": 0, "d": 0, "e": 0}  # "x" is the batch's


def test_attention_with_dropout_keeps_its_scores_on_a_cpu_only() -> None:
    parts = [op(name, "aten.neg.default", out=tensor(1, 2, 16, 8)) for name in "qkv"]
    refs = (Ref("q"), Ref("k"), Ref("v"))
    target = "aten.scaled_dot_product_attention.default"
    plain = op("o", target, *refs, out=tensor(1, 2, 16, 8))
    dropping = replace(plain, random=True)
    scores = 2 * 16 * 16 * 4
    log_sums = 2 * 16 * 4
    assert cost(*parts, plain).saved_bytes == 4 * 1024 + log_sums
    assert cost(*parts, dropping).saved_bytes == 4 * 1024 + 3 * scores
    assert cost(*parts, dropping, device="gpu").saved_bytes == 4 * 1024 + log_sums


@pytest.mark.nightly
@pytest.mark.parametrize("module", [models.gpt, models.encdec, models.digits])
def test_whole_models_keep_what_is_forecast(module: ModuleType) -> None:
    torch.manual_seed(0)
    net, batch = module.model(), module.example_batch()
    named = dict(batch) if isinstance(batch, dict) else dict(enumerate(batch))
    taken = list(inspect.signature(net.forward).parameters)
    ordered = (
        [batch[name] for name in taken] if isinstance(batch, dict) else list(batch)[: len(taken)]
    )
    free = {t.untyped_storage().data_ptr() for t in (*net.parameters(), *net.buffers())}
    free |= {t.untyped_storage().data_ptr() for t in named.values()}
    loss = getattr(module, "loss", None)  # else the model returns it

    def step(*inputs: Tensor) -> Tensor:
        return loss(net(*inputs), batch) if loss else net(*inputs)

    real = really_kept(step, ordered, free)
    graph = capture(net, batch, loss=loss).graph
    costs = estimate(graph.at(graph.batch)).ops["cpu"]
    assert sum(c.saved_bytes for c in costs.values()) == pytest.approx(real, rel=0.08)

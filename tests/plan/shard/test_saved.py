"""What members' ops hold, beside what torch's autograd keeps of such ops."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from bigbrain_fx.core import Op, Ref, TensorSpec, nbytes
from bigbrain_fx.frontend import capture
from bigbrain_fx.plan import Options, Source, axes, make_plan, priced_axes, sharded
from bigbrain_fx.plan.shard.saved import RULES, exchange_saves, rule_saves
from bigbrain_fx.plan.tensor.messages import part_channels, posted_bytes
from tests.plan.shard.test_axes import Calls, attended, found, graph_of, grouped
from tests.support.training import equal

X, Y = (torch.rand(4, 6, requires_grad=True) for _ in "xy")
MASK = torch.rand(4, 6) > 0.5
CALLS: dict[str, tuple[Callable[[], Tensor], int]] = {
    "add": (lambda: X + Y, 2),
    "sub": (lambda: X - Y, 2),
    "mul": (lambda: X * Y, 2),
    "div": (lambda: X / Y, 2),
    "exp": (lambda: X.exp(), 1),
    "log": (lambda: X.log(), 1),
    "softmax": (lambda: X.softmax(-1), 1),
    "matmul": (lambda: X @ Y.T, 2),
    "masked_fill": (lambda: X.masked_fill(MASK, 0.0), 2),
    "to": (lambda: X.to(torch.float64), 1),
    "sum": (lambda: X.sum(1), 1),
}


@pytest.mark.parametrize("family", CALLS)
def test_a_rule_keeps_as_much_as_autograd_does(family: str) -> None:
    call, count = CALLS[family]
    kept: dict[int, int] = {}

    def pack(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        kept[storage.data_ptr()] = storage.nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        made = call()
    spec = TensorSpec(tuple(made.shape), str(made.dtype).removeprefix("torch."), (1,), True)
    refs = tuple(Ref(name) for name in "xy"[:count])
    saves = rule_saves(Op("op", f"aten.{family}.default", refs, outputs=(spec,)), family)
    assert saves is not None
    given = [X.untyped_storage().nbytes(), (MASK if family == "masked_fill" else Y).numel()]
    if family != "masked_fill":
        given[1] = Y.untyped_storage().nbytes()
    sizes = [
        made.untyped_storage().nbytes() if place < 0 else given[place] for place in saves.values
    ]
    assert sum(sizes) == sum(kept.values())


def test_ops_without_a_rule_are_left_to_the_estimator() -> None:
    spec = TensorSpec((4,), "float32", (1,))
    assert (
        rule_saves(Op("op", "aten.cumsum.default", (Ref("x"),), outputs=(spec,)), "cumsum") is None
    )
    assert set(RULES.values()) == {"nothing", "result", "inputs", "view", "second", "last"}


def test_sizes_are_texts_over_the_batch() -> None:
    assert nbytes(TensorSpec((2, 3), "float32", (3, 1))) == 24
    assert nbytes(TensorSpec(("B", 3), "bfloat16", (3, 1))) == "6*B"
    assert (
        exchange_saves("all_reduce", TensorSpec(("B",), "float32", (1,)), 2).at(5).forward_bytes
        == 40
    )


def test_a_part_holds_its_part() -> None:
    model = Calls(attended, qkv=nn.Linear(12, 36), out=nn.Linear(12, 12))
    graph = graph_of(model, torch.randn(3, 5, 12))
    heads = found(graph, "heads")
    members = sharded(graph, priced_axes(graph, [heads]), (2, 1)).members
    name = next(op.name for op in graph.ops if "scaled_dot_product" in op.target)
    held = [g.at(3).op[name].saves for g in (graph, *members)]
    whole, large, small = (int(saves.own_bytes) for saves in held if saves is not None)
    assert large == 2 * small
    assert whole == large + small > 0


def test_narrower_values_keep_the_probabilities() -> None:
    """No fused kernel takes values that are narrower than queries."""
    layers = {name: nn.Linear(12, 12) for name in ("q", "k", "v", "out")}
    graph = graph_of(Calls(grouped, **layers), torch.randn(3, 5, 12))
    attention = next(op.name for op in graph.ops if "scaled_dot_product" in op.target)
    (values,) = (a for a in axes(graph) if {p.name for p in a.values if p.dim == 3} & {attention})
    own = sharded(graph, priced_axes(graph, [values]), (1, 1)).members[0].at(3)
    saves = own.op[attention].saves
    assert saves is not None
    assert int(saves.own_bytes) >= 4 * 3 * 6 * 5 * 5  # rows, heads, and each position's of each


def test_ops_of_a_divided_loss_move_what_they_read_and_write() -> None:
    """Fifteen small ops stand in the place of one: most of them know rows, and no classes."""
    rows, classes = 64, 4096
    net = nn.Sequential(nn.Linear(8, classes, bias=False))

    def loss(output: Tensor, batch: dict[str, Tensor]) -> Tensor:
        return F.cross_entropy(output, batch["y"])

    batch = {"input": torch.randn(rows, 8), "y": torch.zeros(rows, dtype=torch.long)}
    graph = capture(net, batch, loss).graph
    vocabulary = next(axis for axis in axes(graph) if axis.size == classes)
    own = sharded(graph, priced_axes(graph, [vocabulary]), (1, 1)).members[0].at(rows)
    ops = [op for op in own.ops if op.name.startswith("cross_entropy_loss")]
    moved_bytes = {op.name: int(op.reads_bytes) + int(op.writes_bytes) for op in ops}
    part_bytes = rows * classes // 2 * 4
    assert len(ops) > 10
    assert sum(size > part_bytes for size in moved_bytes.values()) <= 6
    assert sum(moved_bytes.values()) <= 12 * part_bytes
    assert sum(int(op.flops) for op in ops) > rows * classes


def test_receives_that_wait_are_counted() -> None:
    net = nn.Sequential(nn.Linear(16, 64), nn.GELU(), nn.Linear(64, 16), nn.LayerNorm(16))

    def loss(output: Tensor, batch: dict[str, Tensor]) -> Tensor:
        return F.mse_loss(output, batch["input"])

    graph = capture(net, {"input": torch.randn(8, 16)}, loss).graph
    about = graph, equal(2), Source("")
    plan = make_plan(*about, Options("naive", micro_batches=2, tensor=2))
    sizes = [c.numel * 4 * min(2, c.per_step) for c in part_channels(plan) if c.receiver == "d0"]
    assert posted_bytes(plan)["d0"] == sum(sizes) > 0
    entry = plan.forecast.of("d0")
    assert entry.messages_bytes >= sum(sizes)

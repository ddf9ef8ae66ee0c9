"""Forms of model code, layers, regions and batches: traced to what the module computes."""

from __future__ import annotations

import random
from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from bigbrain_fx.core import Const, ParamRef
from bigbrain_fx.errors import CaptureError, InputError
from bigbrain_fx.frontend import capture
from tests.support.captured import assert_same, ops_of, run

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


class Turned(nn.Module):
    """Shapes written in place: of views of the input, of a weight, and of one that is read on."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        part, weight = x[:, :4], self.linear.weight.detach()
        part.t_()
        weight.t_()
        h = self.linear(x)
        view = h[:, :4]
        view.t_()
        view.mul_(2.0)
        return (h * weight.sum(0)).sum() + (view * part).sum()


def test_a_view_that_is_turned_writes_nothing() -> None:
    model = Turned()
    found = capture(model, (torch.randn(4, 8),))
    assert_same(model, found, model)
    turned = [op for op in found.graph.ops if op.target == "aten.t.default"]
    assert [op.mutates for op in turned] == [(), (), ()]


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


class Normed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(3, 4, 3, padding=1)
        self.norm = nn.BatchNorm2d(4)

    def forward(self, x: Tensor) -> Tensor:
        return F.relu(self.norm(self.conv(x)), inplace=True)


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
    assert caught.value.at.startswith("test_forms.py:")


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


class Of(nn.Module):
    def __init__(self, compute: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.compute = (compute,)

    def forward(self, x: Tensor) -> Tensor:
        return self.compute[0](x)


REFUSED: dict[str, tuple[str, Callable[[Tensor], Tensor]]] = {
    "a branch on data": ("BX0101b", lambda x: x.sum() if x.sum() > 0 else x.mean()),
    "rows that data select": ("BX0130b", lambda x: x[x > 0].sum()),
    "a number of a tensor": ("BX0130d", lambda x: x.sum() * x.mean().item()),
    "dice of Python": ("BX0120b", lambda x: x.sum() * random.random()),
}


@pytest.mark.parametrize(("code", "compute"), REFUSED.values(), ids=REFUSED)
def test_code_that_no_trace_holds_is_refused_with_its_line(
    code: str, compute: Callable[[Tensor], Tensor]
) -> None:
    with pytest.raises(CaptureError) as caught:
        capture(Of(compute), (torch.randn(4, 8),))
    assert caught.value.code == code
    assert (caught.value.at or "").startswith("test_forms.py:")
    assert caught.value.help


# --------------------------------------------------------------------------- layers


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


class Nested(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            a = self.linear(x)
            with torch.enable_grad():
                b = self.linear(x).sin()
        c = self.linear(x)
        d = F.dropout(c, 0.3)
        d.detach_()
        with torch.no_grad():
            e = F.dropout(c.view(-1, 8), 0.2).view_as(c)
        return (a * b + c * d + e * c).sum()


def test_nested_regions_and_dice_in_a_region() -> None:
    model = Nested()
    found = capture(model, (torch.randn(4, 5, 8),))
    assert_same(model, found, model)
    regions = [op for op in found.graph.ops if op.body]
    assert [(op.target, op.random) for op in regions] == [
        ("region.no_grad", False),
        ("region.no_grad", True),
    ]


class Half(nn.Module):
    """Gives two values, the first of which torch calls as an earlier one was called."""

    def forward(self, x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        return x + y, x * 2


class Halves(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.pair = Half()

    def forward(self, x: Tensor) -> Tensor:
        a = x * 3
        a += 1
        b, c = self.pair(a, x)
        return (b * c).sum()


def test_results_are_noted_in_the_order_of_the_module() -> None:
    graph = capture(Halves(), (torch.randn(4, 3),)).graph
    (call,) = [entry for entry in graph.arguments if entry.path == "pair"]
    b, c = call.results
    assert (graph.op[b].target, graph.op[b].module_path) == ("aten.add.Tensor", "pair")
    assert graph.op[c].target == "aten.mul.Tensor"
    x, y = (value for _, value in call.names)
    assert graph.op[x].target == "aten.add.Tensor"
    assert graph.op[x].module_path == ""
    assert y == "x"


class Clamped(nn.Module):
    """Clamps an activation in place, without gradient."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.two = nn.Linear(6, 8), nn.Linear(8, 4)

    def forward(self, x: Tensor) -> Tensor:
        h = self.one(x)
        with torch.no_grad():
            h.clamp_(-0.1, 0.1)
        found: Tensor = self.two(h).square().mean()
        return found


def test_an_activation_written_without_gradient_has_one_still() -> None:
    model = Clamped()
    found = capture(model, (torch.randn(4, 6),))
    assert_same(model, found, model)
    taken = next(op for op in found.graph.ops if "clamp" in op.name)
    assert taken.outputs[0].requires_grad  # a cut there sends its gradient


def test_complex_numbers_are_arguments() -> None:
    class Turned(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.one = nn.Linear(6, 8)

        def forward(self, x: Tensor) -> Tensor:
            z = torch.view_as_complex(self.one(x).view(-1, 4, 2)) * 1j + (2 - 1j)
            return z.abs().mean()

    model = Turned()
    found = capture(model, (torch.randn(4, 6),))
    assert_same(model, found, model)
    assert Const("1j") in [arg for op in found.graph.ops for arg in op.args]
    assert Const("(2-1j)").number == 2 - 1j

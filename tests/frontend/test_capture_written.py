"""Forwards that write buffers and weights, and parts that were made in eval mode."""

from __future__ import annotations

import functools
from collections.abc import Callable
from pathlib import Path
from typing import Any, cast

import pytest
import torch
from torch import Tensor, nn

import bigbrain_fx as bb
from bigbrain_fx.errors import CaptureError, InputError
from bigbrain_fx.frontend import capture, eval_note, eval_parts_kept, eval_parts_note
from bigbrain_fx.frontend.tracing.lines.advice import COMPILED
from bigbrain_fx.frontend.tracing.state.attributes import Attributes
from tests.support.bundles import cluster
from tests.support.captured import assert_same


class WrittenAfter(nn.Module):
    """Writes into what a layer has read: autograd says so in the backward."""

    def __init__(self, how: str) -> None:
        super().__init__()
        self.a, self.b, self.how = nn.Linear(3, 3), nn.Linear(3, 3), how

    def forward(self, x: Tensor) -> Tensor:
        h = torch.tanh(self.a(x))
        y = cast(Tensor, self.b(h))
        if self.how == "no_grad":
            with torch.no_grad():
                h.mul_(0.5)
        else:
            (h.detach() if self.how == "detach" else h).mul_(0.5)
        return y + h


@pytest.mark.parametrize("how", ["plain", "no_grad", "detach"])
def test_models_that_plain_pytorch_cannot_train_are_refused(how: str) -> None:
    batch = {"x": torch.randn(4, 3)}
    loss = WrittenAfter(how)(**batch).sum()
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()
    with pytest.raises(InputError, match="the model's backward fails on its example") as caught:
        capture(WrittenAfter(how), batch, lambda output, _: output.sum())
    assert "write into a copy" in (caught.value.help or "")


def test_compiled_code_is_captured_as_it_was_written() -> None:
    """No backend is asked: it would compile for each size, and round otherwise than a trace."""
    asked: list[torch.fx.GraphModule] = []

    def backend(module: torch.fx.GraphModule, _inputs: list[Tensor]) -> Any:
        asked.append(module)
        return lambda *values: tuple(found * (1 + 1e-5) for found in module(*values))

    net, batch = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3)), torch.randn(4, 3)
    plain = capture(net, (batch,), lambda output, _: output.sum())
    net[1] = cast(nn.Module, torch.compile(net[1], backend=backend))
    found = capture(net, (batch,), lambda output, _: output.sum())
    assert not asked
    assert [op.target for op in found.graph.ops] == [op.target for op in plain.graph.ops]
    assert found.warnings == (COMPILED,)
    with torch.no_grad():
        net(batch)
    assert asked  # the caller's own calls are compiled, as before


# --------------------------------------------------------------------------- weights


class Turning(nn.Module):
    """Turns a buffer round in place, or what `.contiguous()` gives: the buffer itself."""

    m: Tensor

    def __init__(self, how: str) -> None:
        super().__init__()
        self.lift, self.how = nn.Linear(6, 6), how
        self.register_buffer("m", torch.randn(6, 6))

    def forward(self, x: Tensor) -> Tensor:
        if self.how == "itself":
            self.m.t_()
        if self.how == "contiguous":
            self.m.contiguous().t_()
        if self.how == "written":
            self.m.copy_(self.m.t().clone())
        return (self.lift(x) @ self.m.t()).square().mean()


@pytest.mark.parametrize("how", ["itself", "contiguous"])
def test_a_buffer_that_is_turned_round_in_place_is_refused(how: str) -> None:
    with pytest.raises(CaptureError, match="turns the buffer m of Turning round") as caught:
        capture(Turning(how), {"x": torch.randn(4, 6)})
    assert "self.m.t()" in (caught.value.help or "")


@pytest.mark.parametrize("how", ["view", "written"])
def test_the_remedies_for_it_work(how: str) -> None:
    model = Turning(how)
    assert_same(model, capture(model, {"x": torch.randn(4, 6)}), model)


@functools.lru_cache
def _mask(n: int) -> Tensor:
    return torch.full((n, n), float("-inf")).triu(1)


class Masked(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(6, 6)

    def forward(self, x: Tensor) -> Tensor:
        h = self.linear(x)
        return (h @ h.transpose(1, 2) + _mask(x.shape[1])).softmax(-1).square().mean()


def test_a_cached_function_gives_runs_nothing_of_a_trace() -> None:
    model = Masked()
    found = capture(model, (torch.randn(4, 5, 6),))
    assert_same(model, found, model)
    assert _mask.cache_info().misses >= 1
    assert type(_mask(5)) is Tensor


class PackedPart(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.cells = nn.LSTM(3, 3, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        found: Tensor = self.cells(x)[0]
        return found


class WithPackedPart(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.part = PackedPart()

    def forward(self, x: Tensor) -> Tensor:
        return self.part(x).sum()


def test_a_recurrent_layers_own_list_of_its_weights_is_no_cache() -> None:
    found = capture(WithPackedPart(), (torch.randn(2, 4, 3),), leaves=("PackedPart",))
    assert [op.target for op in found.graph.ops if op.target.startswith("leaf.")] == ["leaf.part"]


class Hooked(nn.Module):
    """Sets a hook at its first call, and notes so."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.hooked = nn.Linear(2, 2), False

    def forward(self, x: Tensor) -> Tensor:
        if not self.hooked:
            self.a.register_forward_hook(lambda part, given, made: made * 2)
            self.hooked = True
        return self.a(x)


def test_a_hook_goes_with_the_flag_that_says_it_is_set() -> None:
    """A flag put back without its hook had the next call set another one."""
    model, x = Hooked(), torch.ones(3, 2)
    before = Attributes.of(model)
    first = model(x)
    for _ in range(2):
        before.put_back()
        assert not model.a._forward_hooks
        assert model(x).equal(first)
    assert "a._forward_hooks" in before.moved(Attributes.of(model))


# --------------------------------------------------------------------------- eval mode


class Frozen(nn.BatchNorm1d):
    def train(self, mode: bool = True) -> Frozen:
        return super().train(False)


def net(norm: type[nn.BatchNorm1d] = nn.BatchNorm1d) -> nn.Sequential:
    return nn.Sequential(nn.Linear(4, 4), nn.Sequential(norm(4), nn.ReLU()), nn.Dropout(0.1))


def with_eval(change: Callable[[nn.Sequential], object]) -> nn.Sequential:
    found = net()
    change(found)
    return found


@pytest.mark.parametrize(
    ("model", "names"),
    [
        (with_eval(lambda n: n[1].eval()), "1"),  # the outermost
        (with_eval(lambda n: (n.get_submodule("1.0").eval(), n[2].eval())), "1.0, 2"),
    ],
)
def test_a_part_that_training_changes_is_named(model: nn.Sequential, names: str) -> None:
    modes = [part.training for part in model.modules()]
    note = eval_parts_note(model)
    assert note is not None
    assert note.partition(":")[0] == names
    assert modes == [part.training for part in model.modules()]


@pytest.mark.parametrize(
    "model",
    [
        net(),
        net(Frozen).train(),  # its class says so: it stays
        net().eval(),  # as from_pretrained returns it
        with_eval(lambda n: n[0].eval()),  # computes the same in both
    ],
)
def test_modules_left_in_training_mode_are_not_named(model: nn.Sequential) -> None:
    assert eval_parts_note(model) is None


MODEL = """import torch
from torch import nn

def model():
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Linear(4, 1))
    net[1].eval()
    return net

def loss(output, batch):
    return output.square().mean()

def example_batch():
    return (torch.ones(4, 4),)
"""


def test_split_says_it(tmp_path: Path) -> None:
    (tmp_path / "net.py").write_text(MODEL)
    made = bb.split(tmp_path / "net.py", cluster(2), tmp_path / "b", bb.Options("naive"))
    assert any(note.startswith("1: made in eval mode") for note in made.warnings)


def test_a_callers_module_trains_in_the_modes_that_it_has() -> None:
    """A plain loop with it would call no train(): its frozen statistics stay."""
    model = net()
    part = model[1].eval()
    with eval_parts_kept(model):
        model.train()
        assert not part.training
        assert model[0].training
    assert not part.training
    model.train()
    assert part.training


def test_a_callers_module_in_eval_mode_is_named() -> None:
    assert eval_note(net().eval())
    assert not eval_note(net())
    assert not eval_note(nn.Sequential(nn.Linear(4, 4)).eval())  # computes the same in both


class Summed(nn.Module):
    """Begins a sum of losses with a buffer that is to have a gradient, as lucidrains' VQ does."""

    zero: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(4, 4)
        self.register_buffer("zero", torch.zeros(()), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        found = self.zero
        if self.training:
            found.requires_grad_()
        return found + self.up(x).square().mean()


def test_a_buffer_that_forward_asks_for_a_gradient_is_not_trained() -> None:
    found = capture(Summed(), (torch.randn(4, 4),))
    wanted = [param.name for param in found.graph.params if param.spec.requires_grad]
    assert wanted == ["up.weight", "up.bias"]
    assert [param.name for param in found.graph.params if param.is_trained] == wanted

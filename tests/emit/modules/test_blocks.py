"""What repeats is one class; what differs in numbers takes them as arguments; names are kept."""

from __future__ import annotations

import ast
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from bigbrain_fx.core import Placement
from bigbrain_fx.emit.files.texts import bundle_texts
from bigbrain_fx.plan import with_placement
from tests.support import samples
from tests.support.samples import Sample

MODELS = samples.cases(["gpt", "unet", "encdec", "resnet", "llama", "moe", "digits"])


def classes(text: str) -> list[str]:
    """Return the block classes of a device file."""
    found = [node for node in ast.parse(text).body if isinstance(node, ast.ClassDef)]
    return [node.name for node in found if ast.unparse(node.bases[0]) in ("Region", "nn.Module")]


def one_device(model: str) -> str:
    return samples.texts(model, "naive", 1, "gpipe", 2)["device_d0.py"]


def emitted(found: Sample, devices: int = 1) -> list[str]:
    plan = samples.planned(found, "naive", devices, None, 2)
    texts = bundle_texts(plan)
    numbers = range(len(plan.stages.devices))
    return [samples.with_blocks(texts, f"device_d{i}.py") for i in numbers]


def captured(module: nn.Module) -> Sample:
    """Capture a module on eight rows of four numbers."""
    return samples.of_module(module, {"x": torch.randn(8, 4)}, lambda y, _: y.square().mean())


def assert_computes(text: str, module: nn.Module) -> None:
    stage, x = samples.loaded(text, "device_d0").Stage0(), torch.randn(8, 4)
    stage.load_state_dict({name: module.state_dict()[name] for name in stage.state_dict()})
    assert torch.equal(stage(x), module(x).square().mean())


@pytest.mark.gate("gpt-expected0")
@pytest.mark.parametrize(
    ("model", "expected"),
    [
        ("gpt", ["Attention", "Block"]),
        ("llama", ["Rotary", "RMSNorm", "Attention", "FeedForward", "Block"]),
        ("unet", ["DoubleConv", "Up"]),
        ("encdec", ["Attention", "FeedForward", "EncoderLayer", "DecoderLayer"]),
    ],
)
def test_modules_are_classes_inner_ones_first(model: str, expected: list[str]) -> None:
    assert classes(one_device(model)) == expected


def test_layers_in_a_row_are_a_loop() -> None:
    text = one_device("gpt")
    assert "self.blocks = nn.ModuleList(Block() for _ in range(4))" in text
    assert "        for block in self.blocks:" in text


@pytest.mark.nightly
def test_blocks_that_differ_in_numbers_take_arguments() -> None:
    """U-Net's levels have other channels; the class is written once."""
    tree = ast.parse(one_device("unet"))
    blocks = {n.name: n for n in tree.body if isinstance(n, ast.ClassDef)}
    init = next(n for n in blocks["DoubleConv"].body if isinstance(n, ast.FunctionDef))
    assert len(init.args.args) > 1
    calls = [n for n in ast.walk(blocks["Stage0"]) if isinstance(n, ast.Call)]
    made = {ast.unparse(c) for c in calls if ast.unparse(c.func) == "DoubleConv"}
    assert len(made) > 1


@pytest.mark.gate("naive-gpt")
@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize("partitioner", ["naive", "scattered"])
def test_tensors_have_the_names_and_shapes_of_the_model(model: str, partitioner: str) -> None:
    """So the user's own checkpoint loads: `load_state_dict(checkpoint, strict=False)`."""
    plan = samples.plan(model, partitioner)
    expected = {p.name: p.spec.shape for p in plan.graph.params}
    held: dict[str, tuple[int, ...]] = {}
    for device in plan.stages.devices:
        program: Any = samples.program(plan, samples.texts(model, partitioner), device)
        for index, stage in program.stages.items():
            state = stage().place().state_dict()
            assert sorted(state) == sorted(plan.stages.stages[index].params)
            held.update({name: tuple(tensor.shape) for name, tensor in state.items()})
    used = {name for stage in plan.stages.stages for name in stage.params}
    assert held == {name: shape for name, shape in expected.items() if name in used}


# --------------------------------------------------------------------------- small modules


class Pair(nn.Module):
    def __init__(self, block: Callable[[], nn.Module], count: int = 2) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(block() for _ in range(count))

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return x


class Mix(nn.Module):
    def __init__(self, slope: float = 0.1) -> None:
        super().__init__()
        self.a = nn.Linear(4, 4)
        self.b = nn.Linear(4, 4)
        self.slope = slope

    def forward(self, x: Tensor) -> Tensor:
        return x + nn.functional.leaky_relu(self.a(x), self.slope) * self.b(x)


def test_literals_become_arguments() -> None:
    slopes = iter((0.1, 0.2))
    (text,) = emitted(captured(Pair(lambda: Mix(next(slopes)))))
    assert classes(text) == ["Mix"]
    assert "Mix(0.1)" in text
    assert "Mix(0.2)" in text
    (once,) = emitted(captured(Pair(Mix, count=1)))
    assert classes(once) == ["Mix"]


def test_numbers_inside_a_region_make_another_class() -> None:
    """A region is written as it is: its numbers are no arguments."""

    class Scaled(Mix):
        def forward(self, x: Tensor) -> Tensor:
            with torch.no_grad():
                scale = torch.sigmoid(x * self.slope) + 1
            return self.a(x) * scale

    torch.manual_seed(0)
    slopes = iter((0.1, 0.2))
    module = Pair(lambda: Scaled(next(slopes)))
    (text,) = emitted(captured(module))
    assert classes(text) == ["Scaled", "Scaled2"]
    assert_computes(text, module)


def test_a_module_that_only_passes_on_needs_no_class() -> None:
    class Wrapper(Mix):
        def forward(self, x: Tensor) -> Tensor:
            y: Tensor = self.a(x)
            return y

    (text,) = emitted(captured(Pair(Wrapper)))
    assert classes(text) == []
    assert "self.blocks[i].a(y)" in text


@pytest.mark.nightly
def test_a_block_that_is_cut_is_written_out_on_both_sides() -> None:
    """The middle one of three is torn: what is left whole is a class, used where it is."""
    plan = samples.planned(captured(Pair(Mix, count=3)), "naive", 2, None, 2)
    middle = [op.name for op in plan.graph.ops if op.module_path.startswith("blocks.1")]
    start = [op.name for op in plan.graph.ops].index(middle[len(middle) // 2])
    homes = {op.name: "d0" if i < start else "d1" for i, op in enumerate(plan.graph.ops)}
    texts = bundle_texts(with_placement(plan, Placement(homes)))
    first, second = texts["device_d0.py"], texts["device_d1.py"]
    for file in ("device_d0.py", "device_d1.py"):
        text = samples.with_blocks(texts, file)
        assert classes(text) == ["Mix"]
        assert "self.blocks[1]." in text
    assert "self.blocks[0](" in first
    assert "self.blocks[2](" in second


class Shared(nn.Module):
    """Calls one block again and again."""

    def __init__(self) -> None:
        super().__init__()
        self.block = Drops()

    def forward(self, x: Tensor) -> Tensor:
        for _ in range(3):
            x = self.block(x)
        return x


class Drops(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a = nn.Linear(4, 4)
        self.drop = nn.Dropout(0.5)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.drop(torch.tanh(self.a(x)))


def test_a_shared_block_says_which_call_it_is() -> None:
    """Its draws differ from call to call."""
    (text,) = emitted(captured(Shared()))
    assert classes(text) == ["Drops"]
    for call in range(3):  # the first too: the block still knows the last call of the step before
        assert f"self.block.nth({call})(" in text


class Holds(nn.Module):
    """Draws only in what it holds."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = Drops()
        self.b = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.b(torch.tanh(self.inner(x)))


class Twice(nn.Module):
    """Calls a block, and a part of that block by itself."""

    def __init__(self) -> None:
        super().__init__()
        self.block = Holds()

    def forward(self, x: Tensor) -> Tensor:
        return self.block(x) * self.block.inner(x)


def test_a_block_that_is_told_which_call_it_is_can_be_told() -> None:
    """It draws in its parts only, one of which is called again: it was no Region."""
    (text,) = emitted(captured(Twice()))
    assert "self.block.nth(0)(" in text
    assert "self.block.inner.nth(1)(" in text
    assert "class Holds(Region):" in text


def test_two_classes_of_one_name_get_two_names() -> None:
    class Inner(Mix):
        def forward(self, x: Tensor) -> Tensor:
            return torch.tanh(self.a(x)) * x

    other = type("Mix", (Inner,), {})
    kinds = iter((Mix, other, Mix, other))
    (text,) = emitted(captured(Pair(lambda: next(kinds)(), count=4)))
    assert sorted(classes(text)) == ["Mix", "Mix2"]


@pytest.mark.gate("DeviceD0")
@pytest.mark.parametrize(
    "name", ["Stage0", "DeviceD0", "Channel", "Tensors", "buffer", "class", "x y"]
)
def test_classes_of_the_users_hide_none_of_ours(name: str) -> None:
    kind = type(name, (Mix,), {})
    (text,) = emitted(captured(Pair(kind)))
    module = samples.loaded(text, "device_d0")
    assert issubclass(module.DeviceD0, module.Device)
    stage = module.DeviceD0.stages[0]().place()
    assert sorted(stage.state_dict())[0] == "blocks.0.a.bias"
    assert len(classes(text)) == 1


class Norm(nn.Module):
    """Is given a weight that its parent holds, as parametrizations are."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(width))

    def forward(self, weight: Tensor) -> Tensor:
        return weight * self.scale / weight.norm()


class Held(nn.Module):
    def __init__(self, wide: int, high: int) -> None:
        super().__init__()
        self.original = nn.Parameter(torch.randn(high, wide))
        self.norm = Norm(wide)

    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(x @ self.norm(self.original).t())


def test_a_tensor_that_an_inner_block_is_given_has_a_shape_of_its_own() -> None:
    parts = iter((Held(4, 6), Held(6, 5)))
    (text,) = emitted(captured(Pair(lambda: next(parts))))
    assert classes(text) == ["Norm", "Held"]
    assert "(6, 4)" in text
    assert "(5, 6)" in text


def test_a_class_named_as_the_file_names_torchs_gets_another_name() -> None:
    torch.manual_seed(0)
    kind = type("Tensor", (Mix,), {})
    module = Pair(lambda: kind(0.1))
    (text,) = emitted(captured(module))
    assert classes(text) == ["Tensor2"]
    assert_computes(text, module)


class Joined(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        return torch.sigmoid(self.a(x)) * self.b(y) - self.a(y)


class Selves(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.third = Joined(), Joined(), Joined()

    def forward(self, x: Tensor) -> Tensor:
        y = self.first(x, x)
        z = self.second(x, y)
        return self.third(z, z) * self.second.a.weight.sum()


def test_a_class_serves_a_call_that_hands_one_value_twice() -> None:
    torch.manual_seed(0)
    module = Selves()
    (text,) = emitted(captured(module))
    assert classes(text) == ["Joined"]
    assert "self.first(x, x)" in text
    assert_computes(text, module)

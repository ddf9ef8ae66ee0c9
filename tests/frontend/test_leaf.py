"""Opaque modules, called as the user wrote them, in the graph and in bundles."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import bigbrain_fx as bb
from bigbrain_fx.emit.files.model_file import without_marks
from bigbrain_fx.errors import CaptureError, InputError
from bigbrain_fx.frontend import capture, load_model_file
from bigbrain_fx.frontend.translation.leaf import leaf_paths
from bigbrain_fx.runtime import part_of
from tests.support.captured import assert_same, gradients, run
from tests.support.messages import refused

MODEL = '''"""Experts that are chosen in Python."""

import torch
import torch.nn.functional as F
from torch import nn

import bigbrain_fx as bb


@bb.leaf
class Experts(nn.Module):
    def __init__(self):
        super().__init__()
        self.experts = nn.ModuleList(nn.Linear(8, 8) for _ in range(3))
        self.gate = nn.Linear(8, 3)
        self.drop = nn.Dropout(0.1)
        self.register_buffer("count", torch.zeros(3))
        self.register_buffer("scale", torch.tensor(0.5), persistent=False)

    def forward(self, x, *, gain=1.0):
        rows = x.reshape(-1, 8)
        weight, choice = self.gate(rows).softmax(-1).max(-1)
        out = torch.zeros_like(rows)
        for number, expert in enumerate(self.experts):
            mine = (choice == number).nonzero().flatten()
            self.count[number] += len(mine)
            if len(mine):
                out = out.index_add(0, mine, expert(rows[mine]) * weight[mine, None])
        return {"y": self.drop(out.view_as(x)) * gain * self.scale, "weight": weight.detach()}


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm = nn.LayerNorm(8)
        self.up = nn.Linear(8, 8)
        self.moe = Experts()

    def forward(self, x):
        found = self.moe(self.up(self.norm(x)).relu(), gain=2.0)
        return x + found["y"] + found["weight"].mean()


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList(Block() for _ in range(3))
        self.head = nn.Linear(8, 4)

    def forward(self, x):
        for block in self.blocks:
            x = block(x)
            if x.isnan().any():
                x = x.nan_to_num()
        return self.head(x)


def model():
    return Net()


def example_batch():
    return {"x": torch.randn(8, 5, 8), "y": torch.randint(4, (8, 5))}


def loss(output, batch):
    return F.cross_entropy(output.flatten(0, 1), batch["y"].flatten())
'''


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "experts_file.py"
    path.write_text(MODEL)
    return path


@pytest.fixture(scope="module")
def loaded(tmp_path_factory: pytest.TempPathFactory) -> SimpleNamespace:
    path = tmp_path_factory.mktemp("leaf") / "experts_file.py"
    path.write_text(MODEL)
    found = load_model_file(path)
    captured = capture(found.model, found.example_batch, found.loss)
    return SimpleNamespace(file=found, captured=captured)


def test_a_marked_class_is_one_op_with_its_own_tensors(loaded: SimpleNamespace) -> None:
    graph = loaded.captured.graph
    assert graph.static_batch is None
    assert leaf_paths(graph) == ("blocks.0.moe", "blocks.1.moe", "blocks.2.moe")
    op = next(op for op in graph.ops if op.target == "leaf.blocks.0.moe")
    assert op.is_tuple
    assert op.random
    assert op.mutates == ("blocks.0.moe.count",)
    assert set(op.params) == {
        f"blocks.0.moe.{name}"
        for name, _ in (
            *loaded.file.model.blocks[0].moe.named_parameters(),
            *loaded.file.model.blocks[0].moe.named_buffers(),
        )
    }
    assert [spec.shape for spec in op.outputs] == [("B", 5, 8), ("5*B",)]
    assert [spec.requires_grad for spec in op.outputs] == [True, False]
    assert not any("blocks.0.moe." in op.module_path for op in graph.ops)


def test_values_gradients_and_buffers_are_the_modules(loaded: SimpleNamespace) -> None:
    def eager(x: Tensor, y: Tensor) -> Tensor:
        return F.cross_entropy(loaded.file.model(x).flatten(0, 1), y.flatten())

    assert_same(loaded.file.model, loaded.captured, eager)
    assert_same(loaded.file.model, loaded.captured, eager, 5)


class Plain(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a = nn.Linear(4, 4)
        self.b = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.b(self.a(x).relu()).square().mean()


@pytest.mark.nightly
def test_leaves_by_path_and_by_class() -> None:
    model = Plain()
    one = capture(model, (torch.randn(4, 4),), leaves=["b"])
    assert leaf_paths(one.graph) == ("b",)
    assert_same(model, one, model)
    both = capture(model, (torch.randn(4, 4),), leaves=["Linear"])
    assert leaf_paths(both.graph) == ("a", "b")
    assert_same(model, both, model)
    with refused("BX0140l"):
        capture(model, (torch.randn(4, 4),), leaves=["Linea"])


def test_an_instance_can_be_marked_and_hooks_run_once() -> None:
    model = Plain()
    bb.leaf(model.b)
    calls: list[int] = []

    def double(_module: nn.Module, _args: object, out: Tensor) -> Tensor:
        calls.append(1)
        return out * 2

    model.b.register_forward_hook(double)
    found = capture(model, (torch.randn(4, 4),))
    assert leaf_paths(found.graph) == ("b",)
    calls.clear()
    run(found, found.inputs())
    assert calls == [1]
    assert_same(model, found, model)


def test_a_leaf_runs_on_shapes_without_weights() -> None:
    with torch.device("meta"):
        model = Plain()
    found = capture(model, (torch.randn(4, 4),), leaves=["b"])
    op = next(op for op in found.graph.ops if op.target == "leaf.b")
    assert op.outputs[0].shape == ("B", 4)


class Halves(nn.Module):
    def forward(self, x: Tensor) -> tuple[Tensor, None, Tensor]:
        return x[::2], None, x.sum(0)


class Picks(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x[x.sum(1) > 0]


class Writes(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        x[0] = 0
        return x


class Counts(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.seen = torch.zeros(1)

    def forward(self, x: Tensor) -> Tensor:
        self.seen = self.seen + 1
        return x * 1


class Drops(nn.Module):
    """Leaves its layer out for some data."""

    def __init__(self) -> None:
        super().__init__()
        self.mix = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.mix(x) if self.drawn() < 0.5 else self.given(x)

    def drawn(self) -> float:
        return float(torch.rand(()))

    def given(self, x: Tensor) -> Tensor:
        return x


class Copies(Drops):
    def given(self, x: Tensor) -> Tensor:
        return x.clone()


class Around(nn.Module):
    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.first = nn.Linear(4, 4)
        self.inner = inner

    def forward(self, x: Tensor) -> Tensor:
        found = self.inner(self.first(x))
        return sum(
            t.sum() for t in (found if isinstance(found, tuple) else [found]) if t is not None
        )


def test_sizes_that_do_not_grow_evenly_fix_the_batch() -> None:
    model = Around(Halves())
    found = capture(model, (torch.randn(4, 4),), leaves=["inner"])
    assert found.graph.static_batch == 4
    assert_same(model, found, model)


@pytest.mark.parametrize(
    ("kind", "code"),
    [(Picks, "BX0140g"), (Writes, "BX0140j"), (Counts, "BX0140e")],
)
def test_leaves_that_cannot_be_kept(kind: type[nn.Module], code: str) -> None:
    torch.manual_seed(1)
    with refused(code, CaptureError):
        capture(Around(kind()), (torch.randn(6, 4),), leaves=["inner"])


@pytest.mark.parametrize(("kind", "is_view"), [(Drops, True), (Copies, False)])
def test_a_leaf_may_drop_its_layer(kind: type[nn.Module], is_view: bool) -> None:
    torch.manual_seed(1)
    found = capture(Around(kind()), (torch.randn(6, 4),), leaves=["inner"])
    (op,) = (op for op in found.graph.ops if op.target == "leaf.inner")
    assert (op.view_of is not None) is is_view  # where it gives back what it was given


def test_a_leaf_that_holds_tied_weights_and_is_called_twice() -> None:
    class Tied(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.part = nn.Linear(4, 4)
            self.other = nn.Linear(4, 4)
            self.other.weight = self.part.weight

        def forward(self, x: Tensor) -> Tensor:
            return self.other(self.part(self.part(x))).sum()

    model = Tied()
    found = capture(model, (torch.randn(4, 4),), leaves=["part"])
    assert sum(op.target == "leaf.part" for op in found.graph.ops) == 2
    have = gradients(run(found, found.inputs())[found.graph.loss or ""], model)
    want = gradients(model(found.inputs()["x"]), model)
    assert all(torch.equal(have[name], want[name]) for name in want)  # type: ignore[arg-type]


class Chooses(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        def one(v: Tensor) -> Tensor:
            return torch.tanh(self.a(v))

        chosen: Tensor = torch.cond(x.sum() > 0, one, self.b, (x,))
        return chosen


class HasChooser(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.i, self.part = nn.Linear(4, 4), Chooses()

    def forward(self, x: Tensor) -> Tensor:
        chosen: Tensor = self.part(self.i(x)).square().mean()
        return chosen


@pytest.mark.gate("leaves1")
@pytest.mark.parametrize("leaves", [[], ["Chooses"]])
def test_control_flow_of_torch_names_what_may_stand_in_its_place(leaves: list[str]) -> None:
    """Kept whole it cannot be either: torch compiles it where it is called."""
    with pytest.raises((CaptureError, InputError)) as caught:
        capture(HasChooser(), (torch.randn(4, 4),), leaves=leaves)
    assert caught.value.help is not None
    assert "torch.where(flag, one, two); or write if and while of Python" in caught.value.help


def test_marks_need_no_bigbrain_in_a_bundle() -> None:
    imports = "import bigbrain_fx as bb\nfrom bigbrain_fx import leaf as keep\n"
    text = f"{imports}\n@bb.leaf\nclass A: pass\nB = keep(A)\n"
    names: dict[str, object] = {}
    exec(compile(without_marks(text), "marks", "exec"), names)
    assert names["A"] is names["B"]


def run_once() -> nn.Module:
    """A model that reads a value as it is made, as data-dependent initialization does."""
    made = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 2))
    assert made(torch.ones(1, 4)).sum().item() is not None
    return made


def test_a_part_of_a_model_that_reads_values_is_made_among_stages_without_numbers() -> None:
    with torch.device("meta"):
        part = part_of(run_once, "1")
    assert {p.device.type for p in part.parameters()} == {"cpu"}

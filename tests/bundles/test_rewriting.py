"""--rewrite: bundles of rewritten graphs train as plain PyTorch does, to rounding."""

from __future__ import annotations

import copy
import tempfile
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from bigbrain_fx.bundles.found_model import FoundModel
from bigbrain_fx.bundles.rewriting import with_rewrites
from bigbrain_fx.core import Cluster, Device, Link, RewriteProof
from bigbrain_fx.emit import write_bundle
from bigbrain_fx.errors import InputError
from bigbrain_fx.frontend import capture, load_model_file
from bigbrain_fx.measure.comparison import compare
from bigbrain_fx.plan import Options, Plan, Source, explain, make_plan
from bigbrain_fx.verification.imported_bundle import run_bundle
from bigbrain_fx.verification.links import same_rewritten, same_training
from tools.matrix import Bench, imported, other_bytes

STEPS = 3
MODEL = """
import torch
import torch.nn.functional as F
from torch import nn

BLOCKS = 3

class Attention(nn.Module):
    def __init__(self):
        super().__init__()
        self.q, self.k, self.v = nn.Linear(16, 16), nn.Linear(16, 8), nn.Linear(16, 8)
        self.out = nn.Linear(16, 16)

    def forward(self, x):
        rows, length, _ = x.shape
        q = self.q(x).view(rows, length, 4, 4).transpose(1, 2)
        k = self.k(x).view(rows, length, 2, 4).transpose(1, 2).repeat_interleave(2, 1)
        v = self.v(x).view(rows, length, 2, 4).transpose(1, 2).repeat_interleave(2, 1)
        scores = q @ k.transpose(-1, -2) / 2.0
        return self.out((scores.softmax(-1) @ v).transpose(1, 2).flatten(2))

class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm, self.attention = nn.LayerNorm(16), Attention()
        self.gate = nn.Linear(16, 24, bias=False)
        self.up = nn.Linear(16, 24, bias=False)
        self.down = nn.Linear(24, 16, bias=False)

    def forward(self, x):
        x = x + self.attention(self.norm(x))
        return x + self.down(F.silu(self.gate(x)) * self.up(x))

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(10, 16)
        self.blocks = nn.ModuleList(Block() for _ in range(BLOCKS))
        self.head = nn.Linear(16, 10)

    def forward(self, letters):
        x = self.embed(letters)
        for block in self.blocks:
            x = block(x)
        return self.head(x)

def model():
    return Net()

def loss(output, batch):
    return F.cross_entropy(output.flatten(0, 1), batch["letters"].flatten())

def optimizer(named_params):
    return torch.optim.SGD([parameter for _, parameter in named_params], lr=0.5)

def example_batch():
    return next(batches(0))

def batches(seed):
    dice = torch.Generator().manual_seed(seed)
    while True:
        yield {"letters": torch.randint(10, (8, 12), generator=dice)}
"""

pytestmark = pytest.mark.usefixtures("alone")


@pytest.fixture
def alone() -> Iterator[None]:
    """Sums have another order with another number of threads."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="module")
def bench(tmp_path_factory: pytest.TempPathFactory) -> Bench:
    return bench_of(tmp_path_factory.mktemp("model") / "net.py", MODEL)


def bench_of(path: Path, text: str) -> Bench:
    path.write_text(text)
    file = load_model_file(path)
    captured = capture(file.model, file.example_batch, file.loss, name="net")
    return Bench(file, captured, STEPS)


def cluster(devices: int) -> Cluster:
    made = (Device(f"d{i}", "h", "cpu", 2**33, 60e9, 12e9, 1e-6) for i in range(devices))
    return Cluster(tuple(made), Link(50e-6, 1e9))


def planned(
    bench: Bench, *rewrite: str, devices: int = 2, **choices: object
) -> tuple[Plan, tuple[str, ...]]:
    source = Source(str(bench.file.path), True, True, True)
    given = {"partitioner": "naive", "micro_batches": 4, "rewrite": rewrite, **choices}
    options = Options(**given)  # type: ignore[arg-type]  # fields of Options
    found = FoundModel(bench.captured.graph, source, bench, (), 0)

    def make(each: FoundModel, given: Options) -> tuple[Plan, tuple[str, ...]]:
        return make_plan(each.graph, cluster(devices), each.source, given), ()

    return with_rewrites(found, options, make)


def plain_loop(bench: Bench) -> tuple[list[float], dict[str, Tensor]]:
    """Train in plain PyTorch; by SGD, since Adam makes whole steps of what is rounding alone."""
    torch.manual_seed(0)
    model: nn.Module = copy.deepcopy(bench.file.model)
    model.load_state_dict({n: t.detach() for n, t in bench.captured.tensors.items()})
    model.train()
    optimizer, losses = torch.optim.SGD(model.parameters(), lr=0.5), []
    batches: Any = bench.file.batches(0)  # type: ignore[misc]  # it has some
    for _ in range(STEPS):
        optimizer.zero_grad()
        parts = next(batches)["letters"].chunk(4)
        each = [bench.file.loss(model(part), {"letters": part}) / 4 for part in parts]  # type: ignore[misc]
        for loss in each:
            loss.backward()
        optimizer.step()
        losses.append(float(sum(loss.detach() for loss in each)))
    return losses, dict(model.named_parameters())


@pytest.mark.nightly
@pytest.mark.parametrize(
    ("devices", "choices"),
    [
        (2, {}),
        (4, {"replicas": 2, "zero_stage": 1}),
        (2, {"schedule": "zb-h1"}),
        (2, {"recompute": "all"}),
    ],
)
def test_a_bundle_has_its_references_bits_and_is_plain_pytorch_to_rounding(
    bench: Bench, devices: int, choices: dict[str, object]
) -> None:
    plan, said = planned(bench, "linears", "scales", devices=devices, **choices)
    assert len(plan.source.rewritten) == 9
    assert not said
    with tempfile.TemporaryDirectory() as scratch:
        folder = write_bundle(plan, bench, Path(scratch, "bundle"))
        with imported(folder, force_adamw=False) as bundle:
            expected = bench.reference(plan, folder, bundle)
            actual = run_bundle(bundle, plan, STEPS, plan.seed)
    assert all(check["passed"] for check in same_training(plan, expected, actual))
    assert other_bytes(expected, actual) == ""
    losses, want = plain_loop(bench)
    assert [float(loss) for loss in actual.losses] == pytest.approx(losses, rel=1e-6)
    for name, parameter in want.items():
        want_now = parameter.detach()
        apart = float((actual.tensors[name] - want_now).abs().max())
        assert apart <= 1e-5 * float(want_now.abs().max()), name


def test_the_rewritten_graph_is_held_against_the_captured_one(bench: Bench) -> None:
    plan, _ = planned(bench, "linears", "scales")
    (check,) = same_rewritten(bench.captured, plan)
    assert check["passed"]
    assert check["rounded"]
    wrong = tuple(
        replace(op, args=(op.args[0], 2.001)) if op.target == "aten.div.Tensor" else op
        for op in plan.graph.ops
    )
    (check,) = same_rewritten(bench.captured, replace(plan, graph=replace(plan.graph, ops=wrong)))
    assert not check["passed"]
    assert not same_rewritten(bench.captured, planned(bench)[0])


@pytest.mark.nightly
def test_auto_is_never_worse_by_forecast_and_says_what_it_compared(bench: Bench) -> None:
    plain, _ = planned(bench)
    plan, _ = planned(bench, "auto")
    assert plan.forecast.step_s <= plain.forecast.step_s
    said = "\n".join(f"{each.what}: {each.why}" for each in plan.compared)
    for what in ("q, k, v of blocks.0.attention and 2 alike", "gate, up of blocks.0", "scales"):
        assert what in said
    chosen = {each.rewrite for each in plan.source.rewritten}
    assert ("taken" in said) is bool(chosen)
    if chosen:
        assert "run both ways" in explain(plan).rewritten
        assert plan.compared[-1].step_s == plain.forecast.step_s


def test_a_class_that_fails_its_proof_is_left_as_it_is(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = FoundModel.prove

    def no_scales(self: FoundModel, trials: list[object]) -> list[RewriteProof]:
        found = real(self, trials)  # type: ignore[arg-type]
        return [
            RewriteProof(1.0, False, "it differs") if "div" in str(trial) else proof
            for trial, proof in zip(trials, found, strict=True)
        ]

    monkeypatch.setattr(FoundModel, "prove", no_scales)
    plan, said = planned(bench, "linears", "scales")
    assert {each.rewrite for each in plan.source.rewritten} == {"linears"}
    assert "stays as it is: it differs" in said[0]
    auto, _ = planned(bench, "auto")
    assert "scales" not in {each.rewrite for each in auto.source.rewritten}


def test_what_is_nowhere_is_refused_with_what_it_would_be(tmp_path: Path) -> None:
    plain = bench_of(tmp_path / "net.py", MODEL.replace(" / 2.0", ""))
    with pytest.raises(InputError, match="nothing in the model can be rewritten by scales") as told:
        planned(plain, "scales")
    assert "an operand is smaller" in str(told.value.help)


def written(bench: Bench, folder: Path) -> str:
    plan, _ = planned(bench, "linears", "scales", devices=1)
    return (write_bundle(plan, bench, folder) / "device_d0.py").read_text()


def test_the_text_is_the_users_class_with_one_line_for_all(bench: Bench, tmp_path: Path) -> None:
    text = written(bench, tmp_path / "bundle")
    assert "for block in self.blocks:" in text
    assert "torch.cat([self.q.weight, self.k.weight, self.v.weight])" in text
    assert "q, k, v = " in text
    assert "gate, up = " in text


@pytest.mark.nightly
def test_the_text_does_not_grow_with_depth(bench: Bench, tmp_path: Path) -> None:
    longer = bench_of(tmp_path / "net.py", MODEL.replace("BLOCKS = 3", "BLOCKS = 6"))
    short, long = (written(each, tmp_path / name) for each, name in ((bench, "a"), (longer, "b")))
    assert len(long.splitlines()) <= 1.15 * len(short.splitlines())


def test_compare_rewrites_each_contenders_plan(bench: Bench) -> None:
    options = Options(rewrite=("scales",), micro_batches=4)
    found = compare(bench.file.path, cluster(2), ("naive",), options)
    (contender,) = found.contenders
    assert contender.plan is not None
    assert {each.rewrite for each in contender.plan.source.rewritten} == {"scales"}

"""ZeRO owns parameters whole: optimizers that look across a parameter's rows train as one process.

Held against a loop in plain PyTorch (`tools.conformance.pairs.loops`), which knows nothing of
replicas.
"""

from __future__ import annotations

from dataclasses import replace
from itertools import product
from pathlib import Path

import pytest
import torch

from bigbrain_fx.bundles import split
from bigbrain_fx.errors import InputError
from bigbrain_fx.plan import Options
from tests.support.training import (
    STEPS,
    bench_of,
    cluster,
    planned,
    trained,
    with_own_optimizer,
)
from tools.conformance.matrix import Bench
from tools.conformance.pairs import loops

pytestmark = pytest.mark.usefixtures("one_thread", "small_buckets")
MICROS = 8
PAIRS = Path(loops.__file__).with_name("model.txt")
BY_TENSOR = """
class Own(torch.optim.Optimizer):
    def __init__(self, named, lr=0.01):
        super().__init__([p for _, p in named], {"lr": lr})

    @torch.no_grad()
    def step(self):
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    p.sub_(group["lr"] * self.direction(p, p.grad, self.state[p]))

    def direction(self, p, g, s):
        if p.dim() < 2:
            return g
        {lines}


def optimizer(named_params):
    return Own(named_params)
"""
FACTORED = """s.setdefault("rows", torch.zeros(len(g))).mul_(0.9).add_(g.square().mean(1))
        s.setdefault("columns", torch.zeros(len(g[0]))).mul_(0.9).add_(g.square().mean(0))
        v = s["rows"][:, None] * s["columns"] / s["rows"].mean()
        u = g / (v.sqrt() + 1e-6)
        return u / max(1.0, float(u.norm()) / u.numel() ** 0.5)"""
LAMB = """m = s.setdefault("m", torch.zeros_like(p)).mul_(0.9).add_(g, alpha=0.1)
        v = s.setdefault("v", torch.zeros_like(p)).mul_(0.99).add_(g * g, alpha=0.01)
        u = m / (v.sqrt() + 1e-6) + 0.01 * p
        return u * p.norm() / u.norm()"""
LARS = """m = s.setdefault("m", torch.zeros_like(p)).mul_(0.9).add_(g + 1e-4 * p)
        return m * p.norm() / (g.norm() + 1e-9)"""
MUON = """x = s.setdefault("m", torch.zeros_like(p)).mul_(0.9).add_(g)
        x = x / (x.norm() + 1e-7)
        for _ in range(3):
            x = 1.5 * x - 0.5 * (x @ x.T) @ x
        return x"""
SHAMPOO = """left = s.setdefault("left", 1e-2 * torch.eye(len(g))).add_(g @ g.T)
        right = s.setdefault("right", 1e-2 * torch.eye(len(g[0]))).add_(g.T @ g)
        (a, u), (b, v) = torch.linalg.eigh(left), torch.linalg.eigh(right)
        a, b = (each.clamp(min=1e-6) ** -0.25 for each in (a, b))
        return (u * a) @ u.T @ g @ (v * b) @ v.T"""
CLIPPED = "return g / max(1.0, float(g.norm()) / 0.05)"
OPTIMIZERS = {
    "Adafactor": "def optimizer(named_params):\n"
    "    return torch.optim.Adafactor([p for _, p in named_params], lr=0.05)\n",
    **{
        name: BY_TENSOR.replace("{lines}", lines)
        for name, lines in (
            ("factored", FACTORED),
            ("LAMB", LAMB),
            ("LARS", LARS),
            ("Muon", MUON),
            ("Shampoo", SHAMPOO),
            ("clipped by tensor", CLIPPED),
        )
    },
}
NORM_OF_ALL = """class Own(torch.optim.SGD):
    def step(self):
        of_all = [p for group in self.param_groups for p in group["params"] if p.grad is not None]
        norm = torch.stack([p.grad.norm() for p in of_all]).norm()
        for p in of_all:
            p.grad /= norm
        super().step()


def optimizer(named_params):
    return Own([p for _, p in named_params], lr=0.1)
"""


def written(folder: Path, optimizer: str) -> Path:
    """Write the model file of docs/reference/pairs.md with another optimizer."""
    head, found, _ = PAIRS.read_text().partition("def optimizer(")
    assert found
    path = folder / "net.py"
    path.write_text(head + optimizer)
    return path


def require_loops_bits(bench: Bench, path: Path, **choices: object) -> None:
    """Train a bundle with the file's optimizer; its bits are the reference's and the loop's."""
    losses, tensors = loops.plain(loops.read(path), MICROS, STEPS)
    about = {"replicas": 2, "micro_batches": MICROS, "sum_order": "micro", **choices}
    plan = with_own_optimizer(planned(bench, cluster(1, 1), **about))
    found, fault = trained(bench, plan)
    assert fault == ""
    assert [float(loss) for loss in found.losses] == losses
    assert all(torch.equal(tensor, tensors[n]) for n, tensor in found.tensors.items())


@pytest.mark.nightly
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_one_that_looks_across_rows_has_whole_parameters(name: str, tmp_path: Path) -> None:
    path = written(tmp_path, OPTIMIZERS[name])
    bench = bench_of(path.read_text())
    for zero, shares in product((1, 2, 3), ((), (3, 1))):
        require_loops_bits(bench, path, zero_stage=zero, replica_shares=shares)


@pytest.mark.nightly
def test_one_that_looks_across_parameters_is_refused_and_the_remedy_holds(tmp_path: Path) -> None:
    """Each replica's optimizer has some of them; without ZeRO it has all."""
    path = written(tmp_path, NORM_OF_ALL)
    asked = Options("naive", micro_batches=MICROS, replicas=2, sum_order="micro")
    for zero in (1, 2, 3):
        with pytest.raises(InputError, match="looks at more than one parameter") as caught:
            split(path, cluster(1, 1), tmp_path / "bundle", replace(asked, zero_stage=zero))
        assert "leave --zero out" in str(caught.value.help)
        assert not (tmp_path / "bundle").exists()
    require_loops_bits(bench_of(path.read_text()), path)

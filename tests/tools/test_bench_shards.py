"""The row of tensor groups beside DTensor: their side's heads, and our gradients put together."""

from __future__ import annotations

import copy
import sys
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from bigbrain_fx import Options, split
from bigbrain_fx.plan import read_plan
from bigbrain_fx.runtime import part_of_whole
from tests.support.bundles import MODEL, cluster
from tools import peer_model, peer_side
from tools.bench_peer import TOLERANCE
from tools.bench_shards import ALL, whole_gradients
from tools.peer_supervised import supervised


@pytest.mark.parametrize("world", [2, 4])
def test_a_rank_of_theirs_computes_its_own_heads(world: int) -> None:
    """What the ranks' heads give, over rows and columns that are theirs, adds up to the whole."""
    torch.manual_seed(0)
    whole, x = peer_model.Attention(), torch.randn(2, 5, peer_model.DIM)
    order, heads = peer_side._by_rank(world), peer_model.HEADS // world
    total: Tensor = torch.zeros_like(x) + whole.out.bias
    for rank in range(world):
        own = copy.deepcopy(whole)
        rows = order.chunk(world)[rank]
        own.qkv.weight = nn.Parameter(whole.qkv.weight[rows])
        own.qkv.bias = nn.Parameter(whole.qkv.bias[rows])
        own.out.weight = nn.Parameter(whole.out.weight.chunk(world, dim=1)[rank])
        own.out.bias = nn.Parameter(torch.zeros_like(whole.out.bias))
        total = total + peer_side.LocalAttention(own, heads)(x)
    assert torch.allclose(total, whole(x), atol=1e-6)


@pytest.mark.nightly
def test_gradients_of_members_are_put_together(tmp_path: Path) -> None:
    (tmp_path / "letters.py").write_text(MODEL)
    options = Options("naive", micro_batches=1, tensor=2, tensor_shares=(3, 1))
    bundle = split(tmp_path / "letters.py", cluster(2), tmp_path / "b", options).bundle
    plan = read_plan(bundle)
    sizes = {p.name: [int(n) for n in p.spec.shape] for p in plan.graph.params}
    made = {name: torch.randn(size) for name, size in sizes.items()}
    parts, divided = {}, set()
    for shard in plan.sharded.shards:
        own = [s for s in plan.sharded.shards if s.param == shard.param]
        lengths = [s.stop - s.start for s in own]
        how = shard.dim, shard.inner, lengths, shard.member
        parts[f"{shard.param}[{shard.member}]"] = part_of_whole(made[shard.param], *how)
        divided.add(shard.param)
    found = whole_gradients(bundle, parts | {n: t for n, t in made.items() if n not in divided})
    assert divided
    assert found.keys() == made.keys()
    assert all(torch.equal(found[name], made[name]) for name in made)


def test_sums_over_members_are_compared_to_rounding() -> None:
    tolerance = {series.against: series.tolerance for series in ALL}
    assert tolerance == {
        "DDP": TOLERANCE,
        "ZeroRedundancyOptimizer": TOLERANCE,
        "FSDP2": TOLERANCE,
        "DTensor": 1e-5,
    }


@pytest.mark.nightly
@pytest.mark.skipif(sys.platform != "linux", reason="processor time is read from /proc")
def test_a_supervised_run_takes_steps_when_told_and_ends_with_the_block(tmp_path: Path) -> None:
    (tmp_path / "letters.py").write_text(MODEL)
    made = split(tmp_path / "letters.py", cluster(2), tmp_path / "bundle", Options("naive"))
    with supervised(made.bundle) as run:
        for count in (1, 3):
            answers = run.ask({"do": "steps", "count": count}, 60)
            assert [len(answer["step_s"]) for answer in answers] == [count, count]
            assert all(answer["cpu_s"] > 0 < answer["max_rss_bytes"] for answer in answers)
        assert run.gradients(made.bundle)
        pids = run.pids
    assert len(pids) == 3
    assert not any(_runs(pid) for pid in pids)


def _runs(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False

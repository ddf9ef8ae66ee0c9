"""Rules of large ops are tried at smaller sizes, where these compute what the large ones do."""

from __future__ import annotations

from dataclasses import replace
from functools import lru_cache

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from bigbrain_fx.core import Graph, RuleTrial
from bigbrain_fx.frontend import capture, try_rule
from bigbrain_fx.frontend.tracing.executor import shard_rule_trial
from bigbrain_fx.plan import axes, chosen_axes, priced_axes
from bigbrain_fx.plan.shard.trials import trials

LENGTH, DIM, HEADS, WORDS = 1024, 128, 8, 8000
LARGE = 1 << 22


class Decoder(nn.Module):
    """One block between an embedding and a head of many words; the loss is inside."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(WORDS, DIM)
        self.qkv, self.out = nn.Linear(DIM, 3 * DIM), nn.Linear(DIM, DIM)
        self.norm, self.head = nn.LayerNorm(DIM), nn.Linear(DIM, WORDS, bias=False)
        self.up, self.down = nn.Linear(DIM, 4 * DIM), nn.Linear(4 * DIM, DIM)

    def forward(self, words: Tensor) -> Tensor:
        x = self.embed(words)
        q, k, v = self.qkv(x).unflatten(-1, (3, HEADS, DIM // HEADS)).unbind(2)
        q, k, v = (part.transpose(1, 2) for part in (q, k, v))
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(mixed.transpose(1, 2).flatten(2))
        x = self.norm(x + self.down(F.gelu(self.up(x))))
        return F.cross_entropy(self.head(x).flatten(0, 1), words.flatten())


@lru_cache
def graph() -> Graph:
    torch.manual_seed(0)
    return capture(Decoder(), {"words": torch.zeros(2, LENGTH, dtype=torch.int64)}).graph


@lru_cache
def tried() -> tuple[RuleTrial, ...]:
    return trials(graph(), chosen_axes(priced_axes(graph(), axes(graph())), 2), (1.0, 1.0))


def of_head() -> RuleTrial:
    """The trial of the product that makes words."""
    linear = "aten.linear.default"
    return next(t for t in tried() if t.reduced and t.whole.ops[-1].target == linear)


def numbers(each: Graph) -> int:
    concrete = each.at(each.batch)
    specs = [e.spec for e in concrete.inputs] + [p.spec for p in concrete.params]
    return sum(spec.numel for spec in (*specs, *(s for op in concrete.ops for s in op.outputs)))


def test_no_large_trial_is_run_at_its_own_size() -> None:
    large = [trial for trial in tried() if numbers(trial.whole) > LARGE]
    assert large
    for trial in large:
        assert trial.reduced is not None
        ran = shard_rule_trial._at_small_sizes(trial)
        assert numbers(ran.whole) <= LARGE, trial.ops
        assert try_rule(trial) is None


def test_small_trials_are_run_as_they_are() -> None:
    small = [trial for trial in tried() if numbers(trial.whole) <= LARGE]
    assert small
    assert all(trial.reduced is None for trial in small)


def test_the_axis_has_its_own_size() -> None:
    trial = of_head()
    assert trial.reduced is not None
    (words,) = (e for e in trial.reduced[0].params if WORDS in e.spec.shape)
    assert words.spec.shape == (WORDS, 8)


def test_a_wrong_rule_is_caught_at_small_sizes() -> None:
    trial = of_head()
    assert trial.reduced is not None
    whole, sharded = trial.reduced
    ops = [replace(op, args=(*op.args[:-1], op.args[0])) for op in sharded.members[0].ops]
    members = (replace(sharded.members[0], ops=tuple(ops)), *sharded.members[1:])
    assert try_rule(replace(trial, reduced=(whole, replace(sharded, members=members))))


@pytest.mark.parametrize("size", [17, 4096])
def test_sizes_at_which_an_op_does_not_compute_are_not_used(size: int) -> None:
    trial = of_head()
    assert trial.reduced is not None
    whole, sharded = trial.reduced
    wrong = tuple(replace(p, spec=replace(p.spec, shape=(size, 3))) for p in whole.params)
    broken = replace(trial, reduced=(replace(whole, params=wrong), sharded))
    assert shard_rule_trial._at_small_sizes(broken) is broken

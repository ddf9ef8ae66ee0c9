"""`split --mode eval --cache`: a bundle that generates one position a step."""

from __future__ import annotations

import importlib
import sys
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import bigbrain_fx
from bigbrain_fx.errors import InputError
from bigbrain_fx.frontend import with_cache
from bigbrain_fx.plan import Options, read_plan
from tests.support.command_line import write_cluster

LENGTH, ROWS, WORDS, DIM, PLACES = 12, 4, 256, 8, 6


class Attention(nn.Module):
    """Causal, in one head."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv = nn.Linear(DIM, 3 * DIM)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (part.unsqueeze(1) for part in self.qkv(x).chunk(3, -1))
        return F.scaled_dot_product_attention(q, k, v, is_causal=True).squeeze(1)


class Small(nn.Module):
    """Scores of the next token."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embed = nn.Embedding(WORDS, DIM)
        self.layers = nn.ModuleList(Attention() for _ in range(2))
        self.head = nn.Linear(DIM, WORDS)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embed(tokens)
        for layer in self.layers:
            x = x + layer(x)
        return self.head(x)


EXAMPLE = {"tokens": torch.arange(ROWS * LENGTH).view(ROWS, LENGTH)}


@pytest.fixture(scope="module")
def bundle(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("caching")
    options = Options("naive", mode="eval", micro_batches=2, cache=PLACES)
    devices = write_cluster(folder)
    bigbrain_fx.split(Small(), devices, folder / "caching", options, example_batch=EXAMPLE)
    return folder / "caching"


def test_a_bundle_has_the_bits_of_one_process(
    bundle: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rows at unlike positions, a prompt of several positions in one batch, a row used again."""
    monkeypatch.setattr(sys, "path", [str(bundle.parent), *sys.path])
    infer = importlib.import_module("caching.infer").infer
    one, _ = with_cache(Small(), EXAMPLE, PLACES)
    batches = [
        ([5, 6, 7, 8], [0, 0, 0, 1], [0, 1, 2, 0]),
        ([9, 9, 1, 2], [0, 1, 5, 5], [3, 1, 0, 1]),
        ([3, 4, 5, 6], [0, 1, 5, 5], [0, 2, 2, 3]),
    ]
    for tokens, rows, positions in batches:
        given = torch.tensor(tokens)[:, None], torch.tensor(rows), torch.tensor(positions)
        found = infer(dict(zip(("tokens", "row", "position"), given, strict=True)))["output"]
        with torch.no_grad():
            halves = [one(*(part[m : m + 2] for part in given)) for m in (0, 2)]
        assert torch.equal(found, torch.cat(halves))


def test_caches_stand_in_the_plan_and_in_the_text(bundle: Path) -> None:
    """One row more than asked for, on the device that makes them; counted as its memory."""
    plan = read_plan(bundle)
    names = [f"layers.{n}.qkv.{kind}" for n in (0, 1) for kind in ("weight", "bias")]
    caches = [f"layers.{n}.{kind}" for n in (0, 1) for kind in ("keys", "values")]
    assert set(names + caches) <= set(plan.graph.param)
    assert plan.graph.param["layers.0.keys"].spec.shape == (PLACES + 1, LENGTH, DIM)
    assert plan.source.cache == PLACES
    text = "".join(path.read_text() for path in bundle.glob("device_*.py"))
    assert "self.keys.index_put_((row, position), " in text
    for device in plan.stages.devices:
        names = [name for stage in plan.stages.of(device) for name in stage.params]
        held = sum(plan.graph.param[name].spec.nbytes for name in names)
        assert plan.forecast.of(device).peak_bytes >= held


@pytest.mark.parametrize(
    ("options", "says"),
    [
        (Options(mode="train", cache=2), "this bundle trains"),
        (Options(mode="eval", cache=2, tensor=2), "not go with --tensor"),
        (Options(mode="eval", cache=2, replicas=2), "not go with --replicas"),
    ],
)
def test_what_does_not_go_with_a_cache(tmp_path: Path, options: Options, says: str) -> None:
    with pytest.raises(InputError, match=says):
        bigbrain_fx.split(
            Small(), write_cluster(tmp_path), tmp_path / "out", options, example_batch=EXAMPLE
        )
    assert not (tmp_path / "out").exists()

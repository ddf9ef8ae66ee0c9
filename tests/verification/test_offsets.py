"""Offsets of packed documents go with the rows of their micro-batch, as in a whole batch."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

import bigbrain_fx as bb
from bigbrain_fx.runtime import Splitting, Stream
from bigbrain_fx.runtime.stream import BatchError
from tests.support.bundles import cluster

MODEL = '''
import torch
from torch import nn


class Packed(nn.Module):
    """Each position adds up the earlier ones of its document."""

    def __init__(self):
        super().__init__()
        self.table, self.up = nn.Embedding(20, 8), nn.Linear(8, 20)

    def forward(self, x, offsets):
        place = torch.arange(x.numel())
        doc = torch.searchsorted(offsets, place, right=True).view(x.shape)
        same = (doc[:, :, None] == doc[:, None, :]).float().tril()
        return self.up(same @ self.table(x))


def model():
    torch.manual_seed(1)
    return Packed()


def batches(seed):
    dice = torch.Generator().manual_seed(seed)
    while True:
        inner = torch.randint(1, 40, (6,), generator=dice).sort().values
        ends = torch.tensor([0]), inner, torch.tensor([40])
        yield {"x": torch.randint(20, (8, 5), generator=dice), "offsets": torch.cat(ends)}


def example_batch():
    return next(batches(0))


def loss(output, batch):
    return nn.functional.cross_entropy(output.flatten(0, 1), batch["x"].flatten())


def optimizer(named):
    return torch.optim.SGD([p for _, p in named], lr=0.5)
'''


def plain_losses(steps: int) -> list[float]:
    """Train on whole batches, as the file's user would."""
    file: dict[str, object] = {}
    exec(compile(MODEL, "packed.py", "exec"), file)
    net, found = file["model"](), []  # type: ignore[operator]
    optimizer = file["optimizer"](list(net.named_parameters()))  # type: ignore[operator]
    data: Iterator[dict[str, torch.Tensor]] = file["batches"](0)  # type: ignore[operator]
    for _, batch in zip(range(steps), data, strict=False):
        value = file["loss"](net(**batch), batch)  # type: ignore[operator]
        optimizer.zero_grad()
        value.backward()
        optimizer.step()
        found.append(float(value.detach()))
    return found


@pytest.mark.nightly
def test_micro_batches_of_packed_documents_train_what_the_whole_batch_trains(
    tmp_path: Path,
) -> None:
    (tmp_path / "packed.py").write_text(MODEL)
    options = bb.Options("naive", micro_batches=4)
    made = bb.split(tmp_path / "packed.py", cluster(), tmp_path / "bundle", options)
    assert made.warnings == ()
    assert made.plan.source.offsets == {"offsets": 5}
    done = bb.run(made.bundle, bb.RunOptions(steps=4))
    assert [line.loss for line in done.steps] == pytest.approx(plain_losses(4), rel=1e-5)
    assert bb.verify(made.bundle, steps=3).passed


def _stream(offsets: list[int]) -> Stream:
    batch = {"x": torch.zeros(4, 3), "offsets": torch.tensor(offsets)}
    stream = Splitting(offsets={"offsets": 3}).stream(
        Stream,
        lambda seed: iter([batch]),
        0,
        {"x": ("x",), "offsets": ("offsets",)},
        ("offsets",),
        2,
        torch.device("cpu"),
        {"x": ("float32", (4, 3)), "offsets": ("int64", (4,))},
    )
    stream.advance(0)
    return stream


def test_offsets_are_counted_from_the_first_row_of_a_micro_batch() -> None:
    stream = _stream([0, 4, 7, 12])
    assert [stream.get("offsets", m).tolist() for m in range(2)] == [[0, 4, 6, 6], [0, 0, 1, 6]]


def test_offsets_that_do_not_end_at_the_last_position_end_the_run() -> None:
    with pytest.raises(BatchError) as caught:
        _stream([0, 4, 7, 11])
    assert "step 0" in str(caught.value)
    assert "12" in str(caught.value)

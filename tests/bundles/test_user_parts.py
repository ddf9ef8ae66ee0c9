"""`micro(batch, parts)` of a model file cuts its batches: graphs with edges."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import bigbrain_fx as bb
from bigbrain_fx.bundles import verify
from bigbrain_fx.errors import InputError
from bigbrain_fx.frontend import capture_file
from bigbrain_fx.plan import Options
from bigbrain_fx.runtime.data import Stream
from bigbrain_fx.runtime.loss_weight import LossWeight
from bigbrain_fx.runtime.splitting import Splitting
from bigbrain_fx.runtime.stream import BatchError
from tests.support.bundles import cluster
from tests.support.command_line import write_cluster
from tests.support.messages import refused

MODEL = """
import torch
from torch import nn
from torch.nn import functional as F


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.a, self.b = nn.Linear(5, 16), nn.Linear(16, 3)

    def forward(self, x, edges):
        h = torch.tanh(self.a(x))
        return self.b(h.index_add(0, edges[1], h[edges[0]]))


def model():
    return Net()


def batches(seed):
    generator = torch.Generator().manual_seed(seed)
    while True:
        edges = [torch.randint(0, 4, (2, 7), generator=generator) + 4 * i for i in range(6)]
        y = torch.randint(-1, 3, (24,), generator=generator)
        yield {"x": torch.randn(24, 5, generator=generator), "edges": torch.cat(edges, 1), "y": y}


def example_batch():
    return next(batches(0))


def loss(output, batch):
    return F.cross_entropy(output, batch["y"], ignore_index=-1)


def micro(batch, parts):
    each, found = 24 // parts, []
    for first in range(0, 24, each):
        own = (batch["edges"][0] >= first) & (batch["edges"][0] < first + each)
        part = {name: batch[name][first : first + each] for name in ("x", "y")}
        found.append(part | {"edges": batch["edges"][:, own] - first})
    return found
"""
WEIGHT = """

def loss_weight(batch):
    return (batch["y"] != -1).sum()
"""


def write(folder: Path, *more: str) -> Path:
    path = folder / "model.py"
    path.write_text(MODEL + "".join(more))
    return path


def test_a_bundle_cuts_graphs_as_the_file_does_and_trains_the_whole_batch(tmp_path: Path) -> None:
    made = bb.split(
        write(tmp_path, WEIGHT), cluster(), tmp_path / "bundle", Options(micro_batches=3)
    )
    assert (made.plan.micro_batches, made.plan.source.has_micro) == (3, True)
    found = {check.name: check.word for check in verify(made.bundle, steps=3).checks}
    assert found.pop("whole batch = micro-batches") == "to rounding"
    assert set(found.values()) == {"equal"}


def test_parts_are_compared_with_the_same_dropout(tmp_path: Path) -> None:
    path = write(tmp_path, WEIGHT)
    path.write_text(path.read_text().replace("h = torch.tanh", "h = F.dropout"))
    assert not bb.split(path, cluster(), tmp_path / "bundle", Options(micro_batches=3)).warnings


def test_without_a_number_of_micro_batches_the_batch_is_whole(tmp_path: Path) -> None:
    with capture_file(write(tmp_path)) as session:
        assert (session.graph.static_batch, session.graph.batch) == (24, 24)


NUMBERS = """

def loss(output, batch):
    own = F.cross_entropy(output, batch["y"], ignore_index=-1, reduction="sum")
    return own / batch["n"]


def with_count(batch):
    return batch | {"n": int((batch["y"] >= 0).sum())}


whole, rows = batches, micro


def batches(seed):
    return map(with_count, whole(seed))


def micro(batch, parts):
    return [*map(with_count, rows(batch, parts))]


def loss_weight(batch):
    return batch["n"]
"""


@pytest.mark.nightly
def test_each_part_may_have_numbers_of_its_own(tmp_path: Path) -> None:
    with capture_file(write(tmp_path, NUMBERS), parts=3) as session:
        assert session.micro_batch_effect(3).is_equal
        found = {e.name: (e.spec.dtype, e.spec.shape) for e in session.graph.inputs}
    assert found["n"] == ("float32", ())


def test_parts_that_weigh_wrongly_are_named(tmp_path: Path) -> None:
    with capture_file(write(tmp_path), parts=3) as session:
        effect = session.micro_batch_effect(3)
        assert (session.graph.static_batch, session.graph.batch) == (8, 24)
    assert effect.differs
    assert "loss_weight" in effect.remedy


@pytest.mark.parametrize(
    ("lines", "code"),
    [
        ("return [batch] * (parts - 1)", "BX2199"),
        ("return batch", "BX2199"),
        ("return [{'x': batch['x'][:n]} for n in (8, 8, 9)]", "BX2199"),
        ("return [batch, batch, {'x': batch['x']}]", "BX2199"),
        ("return batch['no such entry']", "BX2199"),
    ],
)
def test_parts_that_are_not_alike_are_refused(tmp_path: Path, lines: str, code: str) -> None:
    path = write(tmp_path, f"\n\ndef micro(batch, parts):\n    {lines}\n")
    with refused(code, InputError, words=False) as caught, capture_file(path, parts=3):
        pass
    assert (caught.value.of_code, caught.value.at) == (False, "model.py:46")


def test_a_file_without_data_to_cut_is_refused(tmp_path: Path) -> None:
    path = write(tmp_path)
    text = path.read_text().replace("def batches", "def data").replace("next(batches", "next(data")
    path.write_text(text)
    with refused("BX2200", InputError, words=False), capture_file(path, parts=3):
        pass


def parts_stream(parts: Any, weigh: LossWeight | None = None) -> Stream:
    """Read one batch in two parts."""

    def batches(seed: int) -> Iterator[Any]:
        yield {"x": torch.arange(4.0)}

    how = Splitting(micro=lambda batch, count: parts, weigh=weigh)
    specs = {"x": ("float32", (2,))}
    return how.stream(Stream, batches, 0, {"x": ("x",)}, (), 2, torch.device("cpu"), specs)


def test_a_stream_takes_parts_and_weighs_them() -> None:
    parts = [{"x": torch.zeros(2)}, {"x": torch.ones(2)}]
    stream = parts_stream(parts, LossWeight(lambda batch: float(batch["x"].sum())))
    stream.advance(0)
    assert stream.weights == (0.0, 2.0)
    assert stream.get("x", 0).tolist() == [1.0, 1.0]  # of the one that weighs


@pytest.mark.parametrize(
    ("parts", "code"),
    [
        ([{"x": torch.zeros(2)}], "BX5197"),
        ([{"x": torch.zeros(2)}, {"x": torch.zeros(3)}], "BX5198"),
        ([{"x": torch.zeros(3)}] * 2, "BX5029"),
        ([{"y": torch.zeros(2)}] * 2, "BX5043"),
    ],
)
def test_parts_unlike_the_trace_end_a_run(parts: Any, code: str) -> None:
    with refused(code, BatchError, words=False):
        parts_stream(parts).advance(0)


class Graphs(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = torch.nn.Linear(5, 16), torch.nn.Linear(16, 3)

    def forward(self, x: torch.Tensor, edges: torch.Tensor) -> torch.Tensor:
        h = torch.tanh(self.a(x))
        return self.b(h.index_add(0, edges[1], h[edges[0]]))


def graph_loss(output: torch.Tensor, batch: dict[str, torch.Tensor]) -> torch.Tensor:
    return torch.nn.functional.cross_entropy(output, batch["y"], ignore_index=-1)


def graph_count(batch: dict[str, torch.Tensor]) -> torch.Tensor:
    return (batch["y"] != -1).sum()


@pytest.mark.nightly
def test_a_caller_cuts_its_batches_itself(tmp_path: Path) -> None:
    names: dict[str, Any] = {}
    exec(MODEL, names)
    torch.manual_seed(0)
    net, data = Graphs(), [batch for _, batch in zip(range(3), names["batches"](0), strict=False)]
    how: Any = {
        "loss": graph_loss,
        "optimizer": functools.partial(torch.optim.SGD, lr=0.1),
        "micro": names["micro"],
        "loss_weight": graph_count,
    }
    machine, options = bb.machine(write_cluster(tmp_path)), Options("naive", micro_batches=3)
    with machine(net, example_batch=data[0], options=options, **how) as session:
        assert (session.plan.micro_batches, session.plan.source.has_micro) == (3, True)
        losses = [session.step(batch) for batch in data]
        with refused("BX3153", InputError):
            session.step({name: tensor[..., :12] for name, tensor in data[0].items()})
    torch.manual_seed(0)
    plain = Graphs()
    optimizer = torch.optim.SGD(plain.parameters(), lr=0.1)
    for batch, found in zip(data, losses, strict=True):
        optimizer.zero_grad()
        value = graph_loss(plain(batch["x"], batch["edges"]), batch)
        value.backward()
        optimizer.step()
        assert found == pytest.approx(value.item(), rel=1e-5)
    for name, tensor in plain.state_dict().items():
        torch.testing.assert_close(net.state_dict()[name], tensor, rtol=1e-4, atol=1e-5)

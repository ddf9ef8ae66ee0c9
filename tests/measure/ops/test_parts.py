"""Members' parts of a model: each op runs alone at the sizes that it has in a group."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor

from bigbrain_fx.cluster import read_cluster
from bigbrain_fx.core import Op
from bigbrain_fx.costs import ProfileStore
from bigbrain_fx.errors import InputError
from bigbrain_fx.frontend import Captured, capture, capture_file, load_model_file
from bigbrain_fx.measure.ops import ProfileOptions, profile
from bigbrain_fx.measure.ops.parts import parts
from bigbrain_fx.measure.ops.subject import Subject
from bigbrain_fx.plan import Options, alone, sharded, wanted_axes
from bigbrain_fx.planning import estimator
from tests.support.command_line import call, write_cluster, write_model

MODELS = Path(__file__).resolve().parents[3] / "models"
CPU = torch.device("cpu")


def captured_of(name: str) -> Captured:
    file = load_model_file(str(MODELS / f"{name}.py"))
    return capture(file.model, file.example_batch, file.loss, autocast=file.autocast)


@pytest.mark.nightly
@pytest.mark.parametrize("name", ["gpt", "llama", "moe", "resnet"])
def test_a_part_runs_at_the_sizes_that_it_has_in_a_group(name: str) -> None:
    captured = captured_of(name)
    whole, *members = parts(captured, (2, 1), ())
    assert [whole.name, *(part.name for part in members)] == ["", "part 1 of 2:1", "part 2 of 2:1"]
    rows = captured.graph.static_batch or captured.graph.batch
    for part in members:
        seen: list[str] = []

        def ran(op: Op, value: object, seen: list[str] = seen) -> None:
            if isinstance(value, Tensor):
                assert tuple(value.shape) == tuple(op.outputs[0].shape), op.name
                assert value.requires_grad == op.outputs[0].requires_grad, op.name
            seen.append(op.name)

        about = captured.inputs(rows), captured.functions, CPU
        subject = Subject(part.at(rows), part.tensors, *about)
        loss = subject.forward(ran)
        assert loss is not None
        subject.backward(loss, subject.trained)
        assert {op.name for op in part.graph.ops} <= set(seen)
        assert not any(op.target.startswith("shard.") for op in subject.graph.ops)
        subject.forget()


@pytest.mark.nightly
def test_alike_members_are_measured_once() -> None:
    captured = captured_of("gpt")
    assert [part.name for part in parts(captured, (1, 1), ())] == ["", "part 1 of 1:1"]
    assert [part.name for part in parts(captured, (), ())] == [""]
    with pytest.raises(InputError, match="has no axis 'haeds'"):
        list(parts(captured, (1, 1), ("haeds",)))


@pytest.mark.nightly
def test_a_tied_weight_is_one_part() -> None:
    captured = captured_of("gpt")
    tied = [p for p in captured.graph.params if p.name != p.canonical]
    assert tied
    _, part = parts(captured, (1, 1), ())
    for param in tied:
        assert part.tensors[param.name] is part.tensors[param.canonical]


MODEL = """
import torch
from torch import nn

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Linear(16, 48), nn.Linear(48, 16)

    def forward(self, x, y):
        return nn.functional.mse_loss(self.down(torch.relu(self.up(x))), y)

def model():
    return Net()

def example_batch():
    return {"x": torch.randn(8, 16), "y": torch.randn(8, 16)}
"""


@pytest.mark.nightly
def test_group_forecasts_use_measured_parts(tmp_path: Path) -> None:
    model, store = write_model(tmp_path, MODEL), tmp_path / "p.sqlite"
    options = ProfileOptions((4,), rounds=2, device="cpu", tensor_shares=(2, 1))
    found = profile(model, store, options)
    assert [entry.part for entry in found.measured] == ["", "part 1 of 2:1", "part 2 of 2:1"]
    assert str(found.measured[1]).startswith("part 1 of 2:1, 4 rows: ")
    cluster = read_cluster(write_cluster(tmp_path, 2))
    with capture_file(model) as session:
        axes = wanted_axes(session.graph, Options(tensor=2))
        for member in sharded(session.graph, axes, (2, 1)).members:
            graph = member.at(4)
            costs = estimator("measured", profiles=str(store)).estimate(graph, cluster)
            own = {op.name for op in graph.ops if not op.target.startswith("shard.")}
            assert own <= set(costs.measured["d0"])
            assert {op.target for op in alone(graph).ops} <= {
                entry.signature.target for _, entry in ProfileStore(store).rows()
            }
    again = profile(model, store, options)
    assert [entry.lacking for entry in again.measured] == [0, 0, 0]


def test_shares_are_as_many_as_members(tmp_path: Path) -> None:
    about = "profile", write_model(tmp_path, MODEL), "--db", tmp_path / "p.sqlite"
    ran = call(*about, "--tensor-parallel", "3", "--tp-ratio", "2:1")
    assert ran.code == 2
    assert "2 shares for 3 devices that compute together" in ran.err
    many = call(*about, "--tp-ratio", "1:" * 99 + "1", "--rounds", "1")
    assert many.code == 2
    assert "no axis can be split over 100 TP ranks: the longest has 48" in many.err
    assert not (tmp_path / "p.sqlite").exists() or not ProfileStore(tmp_path / "p.sqlite").rows()

"""Plans for inference: no backward, no loss, nothing but weights and live values in memory."""

from __future__ import annotations

import time
from dataclasses import replace
from functools import lru_cache
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from bigbrain_fx.core import Backward, OptimizerStep, Placement, Recv, Send
from bigbrain_fx.emit.files.channels import collected
from bigbrain_fx.emit.files.texts import bundle_texts
from bigbrain_fx.errors import InputError
from bigbrain_fx.frontend import Captured, capture, load_model_file
from bigbrain_fx.plan import Options, Plan, Source, cut as cut_room, make_plan, plan_placed
from bigbrain_fx.plan.explanation import explain
from bigbrain_fx.plan.plan_report import report
from bigbrain_fx.plan.replanning import place_like
from bigbrain_fx.runtime import infer
from tests.support import samples

MODELS = ("gpt", "resnet", "unet", "llama", "moe")


@lru_cache(maxsize=8)
def captured(name: str) -> Captured:
    file = load_model_file(samples.ROOT / "models" / f"{name}.py")
    return capture(file.model, file.example_batch, file.loss, training=False)


def plan_of(found: Captured, partitioner: str = "naive", devices: int = 3, micro: int = 4) -> Plan:
    options = Options(partitioner, micro_batches=micro, mode="eval")
    return make_plan(found.graph, samples.cluster(devices), Source(""), options)


def eval_of(module: nn.Module, batch: object, loss: Any = None) -> Captured:
    return capture(module, batch, loss, training=False)


@pytest.mark.gate("gpt-naive", "gpt-scattered")
@pytest.mark.parametrize("partitioner", ["naive", "chain-dp", "scattered"])
@pytest.mark.parametrize("name", MODELS)
def test_a_plan_has_only_forwards(name: str, partitioner: str) -> None:
    plan = plan_of(captured(name), partitioner)
    done = [i for program in plan.programs for i in program.instructions]
    assert plan.mode == "eval"
    assert not [i for i in done if isinstance(i, Backward | OptimizerStep)]
    assert {i.edge.kind for i in done if isinstance(i, Send | Recv)} <= {"activation"}
    assert plan.schedule == ("forward" if plan.stages.is_chain else "list")
    assert {e.kind for e in plan.stages.edges} <= {"activation"}


@pytest.mark.gate("gpt")
@pytest.mark.parametrize("name", ["gpt", "resnet"])
def test_memory_is_weights_and_live_values(name: str) -> None:
    plan, trains = plan_of(captured(name)), samples.plan(name, "naive", 3, None, 4)
    for entry in plan.forecast.devices:
        assert (entry.gradients_bytes, entry.optimizer_bytes) == (0, 0)
        parts = entry.weights_bytes + entry.activations_bytes + entry.messages_bytes
        assert entry.peak_bytes == parts + entry.data_bytes
        assert entry.activations_bytes > 0
    assert plan.forecast.step_s < trains.forecast.step_s / 2
    most, then = (max(e.activations_bytes for e in p.forecast.devices) for p in (plan, trains))
    assert 2 * most < then


def test_live_values_are_those_with_a_reader_to_come() -> None:
    """x -> a -> b -> c, each of 4 x 8 floats: two of them are there at any time, three never."""

    class Chain(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            a = torch.exp(x)
            b = torch.exp(a)
            return torch.exp(b)

    plan = plan_of(eval_of(Chain(), {"x": torch.zeros(4, 8)}), devices=1, micro=1)
    assert plan.forecast.devices[0].activations_bytes == 2 * 4 * 8 * 4


@pytest.mark.nightly
def test_the_page_and_the_explanation_speak_of_forwards() -> None:
    plan = plan_of(captured("gpt"))
    assert explain(plan).cuts[0].back_nbytes == 0
    assert "gradients back" not in str(explain(plan))
    assert "gradients" not in report(plan)
    assert "gradients" in report(samples.plan("gpt"))


@pytest.mark.nightly
def test_device_files_have_no_word_of_training() -> None:
    texts = bundle_texts(plan_of(captured("gpt")))
    assert not {"train.py", "training.py"} & set(texts)
    for name, text in texts.items():
        for word in ("backward", "optimizer", "tied", "clip", "requires_grad"):
            assert word not in text, f"{word} in {name}"
    assert "dropout" not in texts["device_d0.py"]


# --------------------------------------------------------------------------- outputs and the loss


class Labelled(nn.Module):
    """As Hugging Face models do: a loss of its own beside the logits, from labels in the batch."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Linear(8, 8)
        self.head = nn.Linear(8, 3)

    def forward(self, x: Tensor, labels: Tensor) -> dict[str, Tensor]:
        hidden = torch.tanh(self.body(x))
        logits = self.head(hidden)
        loss = nn.functional.cross_entropy(logits, labels)
        return {"loss": loss, "logits": logits, "hidden": hidden}


LABELLED = {"x": torch.randn(8, 8), "labels": torch.arange(8) % 3}


def test_a_models_own_loss_and_its_labels_are_left_out() -> None:
    plan = plan_of(eval_of(Labelled(), LABELLED), devices=2)
    assert [name for name, _ in plan.graph.output_names] == ["logits", "hidden"]
    assert plan.graph.loss is None
    assert {name for stage in plan.stages.stages for name in stage.inputs} == {"x"}
    assert not [op for op in plan.graph.ops if "cross_entropy" in op.target]


def test_a_loss_that_is_all_there_is_stays() -> None:
    class Only(Labelled):
        def forward(self, x: Tensor, labels: Tensor) -> Tensor:  # type: ignore[override]
            return super().forward(x, labels)["loss"]

    graph = eval_of(Only(), LABELLED).graph
    assert [name for name, _ in graph.output_names] == ["output"]
    assert graph.output_dims == {"output": None}  # one value a micro-batch


def test_a_loss_function_only_says_what_forward_does_not_read() -> None:
    def loss(output: Tensor, batch: object) -> Tensor:
        raise AssertionError("inference needs no loss")

    batch = (torch.randn(4, 8), torch.randn(4, 8))
    graph = eval_of(nn.Linear(8, 8), batch, loss).graph
    assert [name for name, _ in graph.output_names] == ["output"]


def test_outputs_are_called_by_the_keys_that_lead_to_them() -> None:
    class Several(nn.Module):
        def forward(self, x: Tensor) -> dict[str, Any]:
            return {"states": (x + 1, [x + 2]), "x": x, "sum": x.sum(), "flat": x.flatten()}

    graph = eval_of(Several(), {"x": torch.randn(4, 8)}).graph
    dims = {"states.0": 0, "states.1.0": 0, "x": 0, "sum": None, "flat": 0}
    assert graph.output_dims == dims


def test_the_last_device_collects_every_output_once() -> None:
    found = eval_of(Labelled(), LABELLED)
    for partitioner in ("naive", "scattered"):
        plan = plan_of(found, partitioner, devices=2)
        kept = [
            (name, stage.device)
            for stage in plan.stages.stages
            for name, _ in collected(plan.graph, plan.stages, stage)
        ]
        last = plan.stages.stages[-1].device
        assert sorted(kept) == [("hidden", last), ("logits", last)]


def test_an_output_that_only_the_first_device_has_is_sent() -> None:
    class Early(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b = nn.Linear(8, 8), nn.Linear(8, 8)

        def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
            return self.a(x), self.b(x)

    found = eval_of(Early(), {"x": torch.randn(4, 8)})
    first, second = (op.name for op in found.graph.ops)
    placement = Placement({first: "d0", second: "d1"})
    options = Options("naive", micro_batches=2, mode="eval")
    plan = plan_placed(found.graph, samples.cluster(2), Source(""), options, placement)
    (edge,) = plan.stages.edges
    assert (edge.value, edge.source, edge.target) == (first, 0, 1)
    assert cut_room.gathered(plan.graph, plan.stages.stages) == {first}
    text = bundle_texts(plan)["device_d1.py"]
    assert 'self.output("0", m, ' in text
    assert 'self.output("1", m, ' in text


def test_training_graphs_are_cut_as_before() -> None:
    plan = samples.plan("gpt")
    assert cut_room.gathered(plan.graph, plan.stages.stages) == frozenset()


# --------------------------------------------------------------------------- under one plan


@pytest.mark.gate("gpt-naive")
@pytest.mark.parametrize("partitioner", ["naive", "chain-dp"])
@pytest.mark.parametrize("name", MODELS)
def test_the_weights_of_a_device_stay_on_it(name: str, partitioner: str) -> None:
    trained = samples.plan(name, partitioner, 3, None, 4)
    found = captured(name)
    placement = place_like(found.graph, trained)
    options = Options(partitioner, micro_batches=4, mode="eval")
    plan = plan_placed(found.graph, trained.cluster, Source(""), options, placement)
    assert plan.stages.is_chain
    assert plan.stages.devices == trained.stages.devices
    for device in plan.stages.devices:
        here, there = (_weights(p, device) for p in (plan, trained))
        assert here <= there, f"{device} would need {sorted(here - there)}"


def _weights(plan: Plan, device: str) -> set[str]:
    return {name for stage in plan.stages.of(device) for name in stage.params}


def test_a_plan_of_another_model_is_refused() -> None:
    other = eval_of(nn.Linear(4, 4), {"input": torch.zeros(4, 4)})
    with pytest.raises(InputError, match="of another model"):
        place_like(captured("gpt").graph, plan_of(other, devices=1, micro=1))


def test_a_cluster_without_the_devices_is_refused() -> None:
    placement = place_like(captured("gpt").graph, samples.plan("gpt"))
    options = Options("naive", micro_batches=4, mode="eval")
    with pytest.raises(InputError, match="no device d2"):
        plan_placed(captured("gpt").graph, samples.cluster(2), Source(""), options, placement)


def test_the_same_graph_is_placed_as_it_was() -> None:
    plan = samples.plan("gpt", "scattered")
    graph = samples.sample("gpt").graph
    again = cut_room.cut(graph, place_like(graph, plan), plan.rows)
    assert again.stages == replace(plan.stages, moved=()).stages


def test_the_clock_is_read_when_a_gpu_has_made_the_outputs(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    events: list[str] = []
    stream = SimpleNamespace(synchronize=lambda: events.append("settled"))
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: stream)
    monkeypatch.setattr(time, "perf_counter", lambda: float(len(events)))

    def taken_s(kind: str, outputs: dict[str, Tensor]) -> list[float]:
        events.clear()
        found: list[float] = []
        device: Any = SimpleNamespace(
            device=torch.device(kind), rows=SimpleNamespace(rows=4), run_batch=lambda _: outputs
        )
        infer.run_batches(device, 2, lambda *batch: found.append(batch[3]))
        return found

    assert taken_s("cuda", {"y": torch.ones(1)}) == [1.0, 1.0]
    assert taken_s("cpu", {"y": torch.ones(1)}) == [0.0, 0.0]
    assert (taken_s("cuda", {}), events) == ([], [])  # who has no outputs goes on


def test_no_mode_but_two(tmp_path: Path) -> None:
    import bigbrain_fx as bb

    with pytest.raises(InputError, match=r"mode='test'.*'train' or 'eval'"):
        bb.estimate("model.py", samples.cluster(2), Options(mode="test"))  # type: ignore[arg-type]

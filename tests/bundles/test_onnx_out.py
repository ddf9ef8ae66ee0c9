"""Stages as ONNX files: checked by onnx, run by ONNX Runtime, one after another as the bundle's."""

from __future__ import annotations

import json
from pathlib import Path

import onnx
import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

import bigbrain_fx as bb
from bigbrain_fx.bundles.onnx_export import TOLERANCE, export_onnx
from bigbrain_fx.bundles.onnx_export.compare import OnnxSession, largest_difference
from bigbrain_fx.errors import CaptureError, InputError
from bigbrain_fx.plan import Options, Source, make_plan, read_plan, to_json
from tests.support import samples
from tests.support.command_line import call

TINY = """
import torch
from torch import nn


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.a = nn.Linear(4, 4)
        self.b = nn.Linear(4, 4)

    def forward(self, index):
        add = self.a(index)
        return {"add": self.b(torch.tanh(add)), "odd": CALL}


def model():
    return Net()


def example_batch():
    return {"index": torch.linspace(-1, 1, 32).view(8, 4)}
"""


def tiny(folder: Path, call: str = "add + 1") -> Path:
    (folder / "tiny.py").write_text(TINY.replace("CALL", call))
    options = Options("naive", micro_batches=2, mode="eval")
    made = bb.split(folder / "tiny.py", samples.cluster(2), folder / "bundle", options)
    return made.bundle


def through(folder: Path, values: dict[str, Tensor]) -> dict[str, Tensor]:
    """Run the files one after another, as `stages.json` says; return the model's outputs."""
    stages = json.loads((folder / "stages.json").read_text())
    for stage in stages["stages"]:
        values.update(OnnxSession.of(folder / stage["file"]).run(values))
    return {name: values[value] for name, value in stages["outputs"].items()}


@pytest.mark.nightly
@pytest.mark.parametrize("name", ["gpt", "resnet", "encdec"])
def test_models_as_files(name: str, tmp_path: Path) -> None:
    options = Options("naive", micro_batches=4, mode="eval")
    path = samples.ROOT / "models" / f"{name}.py"
    made = bb.split(path, samples.cluster(2), tmp_path / "bundle", options)
    found = export_onnx(made.bundle, tmp_path / "onnx")
    found.require_passed()
    for stage in found.stages:
        assert stage.difference is not None
        assert stage.difference <= TOLERANCE
        assert stage.other_rows, str(stage)
        onnx.checker.check_model(str(tmp_path / "onnx" / f"stage_{stage.stage}.onnx"))


BERT = """
import torch
from transformers import BertConfig, BertForSequenceClassification


def model():
    return BertForSequenceClassification(
        BertConfig(vocab_size=100, hidden_size=32, num_hidden_layers=2, num_attention_heads=4,
                   intermediate_size=64, num_labels=3)
    )


def example_batch():
    dice = torch.Generator().manual_seed(0)
    tokens = torch.randint(100, (8, 12), generator=dice)
    mask = torch.ones(8, 12).long()
    return {"input_ids": tokens, "attention_mask": mask, "labels": torch.arange(8) % 3}
"""


@pytest.mark.nightly
def test_a_hugging_face_model_with_labels_it_does_not_need(tmp_path: Path) -> None:
    (tmp_path / "bert.py").write_text(BERT)
    options = Options("naive", micro_batches=2, mode="eval")
    made = bb.split(tmp_path / "bert.py", samples.cluster(2), tmp_path / "bundle", options)
    assert [name for name, _ in made.plan.graph.output_names] == ["logits"]
    assert bb.verify(made.bundle, steps=1).passed
    found = export_onnx(made.bundle, tmp_path / "onnx")
    found.require_passed()
    assert all(stage.other_rows for stage in found.stages)
    rows = {"input_ids": torch.randint(100, (5, 12)), "attention_mask": torch.ones(5, 12).long()}
    assert through(tmp_path / "onnx", dict(rows))["logits"].shape == (5, 3)


@pytest.mark.nightly
@pytest.mark.usefixtures("cold")
def test_files_run_one_after_another_and_names_do_not_clash(tmp_path: Path) -> None:
    """Inputs and outputs are called like ops on purpose: "index", "add"."""
    bundle = tiny(tmp_path)
    done = call("export", bundle, "--onnx", tmp_path / "onnx", "--json")
    assert done.code == 0, done.err
    assert [line["other_rows"] for line in done.objects] == [True, True]
    rows = torch.linspace(-2, 2, 20).view(5, 4)
    found = through(tmp_path / "onnx", {"index": rows})
    weights = {
        n: t for f in (bundle / "weights").glob("*.safetensors") for n, t in load_file(f).items()
    }
    add = torch.nn.functional.linear(rows, weights["a.weight"], weights["a.bias"])
    b = torch.nn.functional.linear(torch.tanh(add), weights["b.weight"], weights["b.bias"])
    assert largest_difference({"add": b, "odd": add + 1}, found) <= TOLERANCE


@pytest.mark.nightly
def test_an_op_that_onnx_lacks_is_named_and_other_stages_are_written(tmp_path: Path) -> None:
    bundle = tiny(tmp_path, "torch.special.bessel_j1(add)")
    found = export_onnx(bundle, tmp_path / "onnx")
    failed = [stage for stage in found.stages if stage.problem]
    assert len(failed) == 1
    assert failed[0].problem.startswith("ONNX has no aten.special_bessel_j1")
    assert "tiny.py:14" in failed[0].problem
    assert sum(stage.file is not None for stage in found.stages) == 1
    with pytest.raises(CaptureError, match="1 of 2 stages cannot be exported to ONNX"):
        found.require_passed()


def test_a_bundle_that_trains_is_refused(tmp_path: Path) -> None:
    plan = samples.plan("gpt")
    (tmp_path / "plan.json").write_bytes(to_json(plan))
    assert read_plan(tmp_path).mode == "train"
    with pytest.raises(InputError, match="this bundle trains") as caught:
        export_onnx(tmp_path, tmp_path / "onnx")
    assert "--mode eval --like" in str(caught.value)


def test_a_bundle_of_groups_is_refused_with_a_way_that_there_is(tmp_path: Path) -> None:
    """It was told to split with --like, which groups do not go with."""
    found = samples.sample("gpt").graph
    options = Options(partitioner="naive", tensor=2, micro_batches=2)
    plan = make_plan(found, samples.cluster(2), Source("gpt.py"), options)
    (tmp_path / "plan.json").write_bytes(to_json(plan))
    with pytest.raises(InputError, match="does not go with --tensor-parallel") as caught:
        export_onnx(tmp_path, tmp_path / "onnx")
    assert "--mode eval and --tensor-parallel 1" in str(caught.value)


def test_a_folder_with_files_is_left_alone(tmp_path: Path) -> None:
    done = call("export", tmp_path)
    assert done.code == 2
    assert "expected one of --to, --onnx and --dcp" in done.err


def test_differences_are_shares_of_the_larger_of_one_and_the_value() -> None:
    want = {"y": torch.tensor([1000.0, 0.5, float("inf"), float("nan")])}
    near = {"y": torch.tensor([1000.01, 0.5, float("inf"), float("nan")])}
    assert largest_difference(want, want) == 0.0
    assert largest_difference(want, near) == pytest.approx(1e-5, rel=0.1)
    assert largest_difference(want, {"y": torch.zeros(3)}) == float("inf")
    assert largest_difference(want, {}) == float("inf")

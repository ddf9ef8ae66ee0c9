"""Hugging Face models from a configuration alone: the class, the batch, the graph, the refusals."""

from __future__ import annotations

import json
import resource
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch

from bigbrain_fx.errors import InputError
from bigbrain_fx.frontend import (
    Training,
    capture,
    capture_file,
    load_model_file,
    micro_batch_effect,
    session,
)
from bigbrain_fx.frontend.hf.weights import converted
from bigbrain_fx.frontend.location import resolved
from bigbrain_fx.weights import read_checkpoint
from tests.support.command_line import call, write_cluster, write_model
from tests.support.hf_models import LLAMA, TEXT, VISION, same, write_checkpoint, write_config
from tools.conformance.apart import child_here

pytest.importorskip("transformers")

T5 = {"d_model": 16, "d_kv": 8, "d_ff": 32, "num_layers": 1, "num_heads": 2, "vocab_size": 40}
T5 |= {"decoder_start_token_id": 0, "pad_token_id": 0}
BART = {
    **TEXT,
    "d_model": 16,
    "encoder_layers": 1,
    "decoder_layers": 1,
    "encoder_attention_heads": 2,
    "decoder_attention_heads": 2,
    "encoder_ffn_dim": 32,
    "decoder_ffn_dim": 32,
    "decoder_start_token_id": 2,
}
AUDIO = {**BART, "num_mel_bins": 8, "max_source_positions": 10, "max_target_positions": 16}
WAVES = {
    "conv_dim": [8, 8],
    "conv_stride": [5, 2],
    "conv_kernel": [10, 3],
    "num_feat_extract_layers": 2,
}
CLIP = {"text_config": TEXT, "vision_config": VISION, "projection_dim": 16}
ROWS = {"input_ids": [2, 8], "labels": [2, 8]}


@pytest.mark.parametrize(
    ("kind", "architecture", "fields", "batch"),
    [
        ("llama", "LlamaForCausalLM", TEXT, ROWS),
        ("bert", "BertForMaskedLM", TEXT, ROWS),
        ("bert", "BertForSequenceClassification", TEXT, {**ROWS, "labels": [2]}),
        ("bert", "BertForTokenClassification", TEXT, ROWS),
        (
            "bert",
            "BertForQuestionAnswering",
            TEXT,
            {"input_ids": [2, 8], "start_positions": [2], "end_positions": [2]},
        ),
        ("bert", "BertForMultipleChoice", TEXT, {"input_ids": [2, 2, 8], "labels": [2]}),
        ("llama", "LlamaForSequenceClassification", TEXT, {**ROWS, "labels": [2]}),
        ("t5", "T5ForConditionalGeneration", T5, ROWS),
        ("bart", "BartForSequenceClassification", BART, {**ROWS, "labels": [2]}),
        (
            "vit",
            "ViTForImageClassification",
            VISION,
            {"pixel_values": [2, 3, 16, 16], "labels": [2]},
        ),
        (
            "clip",
            "CLIPModel",
            CLIP,
            {"input_ids": [2, 8], "pixel_values": [2, 3, 16, 16], "return_loss": True},
        ),
        (
            "whisper",
            "WhisperForConditionalGeneration",
            AUDIO,
            {"input_features": [2, 8, 20], "labels": [2, 8]},
        ),
        (
            "wav2vec2",
            "Wav2Vec2ForSequenceClassification",
            {
                **TEXT,
                **WAVES,
                "num_conv_pos_embeddings": 4,
                "num_conv_pos_embedding_groups": 2,
                "mask_time_length": 4,
            },
            {"input_values": [2, 90], "labels": [2]},
        ),
    ],
)
def test_a_configuration_makes_a_model_and_a_batch_with_a_loss(
    tmp_path: Path,
    kind: str,
    architecture: str,
    fields: Mapping[str, Any],
    batch: Mapping[str, object],
) -> None:
    write_config(tmp_path, {"model_type": kind, "architectures": [architecture], **fields})
    file = load_model_file(f"hf:{tmp_path}?batch=2&seq=8")
    made: Any = file.example_batch
    assert type(file.model).__name__ == architecture
    assert {
        k: list(v.shape) if isinstance(v, torch.Tensor) else v for k, v in made.items()
    } == batch
    assert torch.isfinite(file.model(**made).loss)


def test_a_bare_model_gets_its_inputs_and_no_labels(tmp_path: Path) -> None:
    write_config(tmp_path, {"model_type": "t5", "architectures": ["T5Model"], **T5})
    batch: Any = load_model_file(f"hf:{tmp_path}").example_batch
    assert sorted(batch) == ["decoder_input_ids", "input_ids"]
    assert batch["input_ids"].shape == (8, 128)  # T5 has no limit of positions


def test_without_architectures_a_class_that_trains_is_taken(tmp_path: Path) -> None:
    write_config(tmp_path, {"model_type": "llama", **TEXT})
    file = load_model_file(f"hf:{tmp_path / 'config.json'}")
    assert type(file.model).__name__ == "LlamaForCausalLM"
    batch: Any = file.example_batch
    assert batch["input_ids"].shape == (8, 16)
    assert batch["input_ids"].min() > 2  # no special tokens


@pytest.mark.parametrize(
    ("fields", "said", "help"),
    [
        ({"model_type": "lama"}, "found 'lama'", "did you mean 'llama'?"),
        ({"hidden_size": 3}, "found None", "write a model.py"),
        ({**LLAMA, "architectures": ["MyNet"]}, "has no class 'MyNet'", "model.py"),
        ({**LLAMA, "quantization_config": {"bits": 4}}, "quantized", "it was made from"),
        ({**LLAMA, "hidden_size": 15}, "cannot", "configuration"),
    ],
)
def test_configurations_that_cannot_be_built_are_refused(
    tmp_path: Path, fields: Mapping[str, Any], said: str, help: str
) -> None:
    write_config(tmp_path, fields)
    with pytest.raises(InputError, match=said) as refused:
        load_model_file(f"hf:{tmp_path}")
    assert help in str(refused.value)


def test_a_batch_that_cannot_be_made_up_shows_a_model_file(tmp_path: Path) -> None:
    fields = {"model_type": "time_series_transformer", "prediction_length": 4}
    write_config(tmp_path, {**fields, "architectures": ["TimeSeriesTransformerModel"]})
    with pytest.raises(InputError, match="forward needs past_values") as refused:
        load_model_file(f"hf:{tmp_path}")
    assert "def example_batch()" in str(refused.value)


def test_without_transformers_it_says_what_to_install(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_config(tmp_path, LLAMA)
    monkeypatch.setitem(sys.modules, "transformers", None)
    with pytest.raises(InputError, match="need transformers") as refused:
        load_model_file(f"hf:{tmp_path}")
    assert "pip install transformers" in str(refused.value)


def test_locations(tmp_path: Path) -> None:
    config = write_config(tmp_path, LLAMA) / "config.json"
    assert resolved(f"hf:{tmp_path}", batch=4, dtype="float16") == (
        config,
        f"hf:{config}?batch=4&dtype=float16",
    )
    assert resolved(f"hf:{config}?seq=8&batch=2", seq=9)[1] == f"hf:{config}?batch=2&seq=9"
    for location, said in (
        (f"hf:{tmp_path}/gone", "found nothing"),
        (f"hf:{tmp_path}?rows=3", "'rows' is none of"),
        (f"hf:{tmp_path}?batch=0", "above 0"),
        (f"hf:{tmp_path}?dtype=int8", "float32"),
    ):
        with pytest.raises(InputError, match=said):
            resolved(location)
    with pytest.raises(InputError, match="--seq is for hf"):
        resolved(write_model(tmp_path), seq=8)


def test_the_weights_have_the_configurations_type_unless_chosen(tmp_path: Path) -> None:
    write_config(tmp_path, {**LLAMA, "torch_dtype": "bfloat16"})
    assert {p.dtype for p in load_model_file(f"hf:{tmp_path}").model.parameters()} == {
        torch.bfloat16
    }
    chosen = load_model_file(f"hf:{tmp_path}?dtype=float32").model
    assert {p.dtype for p in chosen.parameters()} == {torch.float32}


@pytest.mark.nightly
def test_a_model_without_weights_gives_the_graph_of_one_with(tmp_path: Path) -> None:
    write_config(tmp_path, {**LLAMA, "tie_word_embeddings": True})
    graphs = []
    for blank, meta in ((False, False), (True, False), (False, True)):
        file = load_model_file(f"hf:{tmp_path}", blank=blank, meta=meta)
        graphs.append(capture(file.model, file.example_batch).graph)
    assert graphs[0] == graphs[1] == graphs[2]
    assert any(param.name != param.canonical for param in graphs[0].params)


@pytest.mark.nightly
def test_micro_batches_of_a_model_without_weights_weigh_by_their_labels(tmp_path: Path) -> None:
    write_config(tmp_path, LLAMA)
    file = load_model_file(f"hf:{tmp_path}", blank=True)
    found = capture(file.model.train(), file.example_batch)
    effect = micro_batch_effect(Training(file.model, None, None), found, 2)
    assert effect.loss_count is not None
    assert not effect.differs
    assert effect.unknown


@pytest.mark.nightly
def test_estimating_70_billion_numbers_holds_none_of_them(tmp_path: Path) -> None:
    write_config(
        tmp_path,
        {**LLAMA, "hidden_size": 8192, "intermediate_size": 28672, "num_attention_heads": 64}
        | {"vocab_size": 32000, "num_hidden_layers": 4, "num_key_value_heads": 8},
    )
    before = resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss
    with capture_file(f"hf:{tmp_path}?batch=2&seq=16", meta=True) as session:
        parameters = session.facts.parameters
    after = resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss  # kilobytes
    assert parameters > 3_800_000_000
    assert after <= max(before, 1_500_000)


def test_experts_stored_one_by_one_are_joined_as_transformers_joins_them(tmp_path: Path) -> None:
    fields = {**TEXT, "model_type": "mixtral", "num_local_experts": 3, "num_key_value_heads": 1}
    expected = write_checkpoint(tmp_path, {**fields, "architectures": ["MixtralForCausalLM"]})
    checkpoint = read_checkpoint(tmp_path)
    assert any("experts.2.w1" in name for name in checkpoint.tensors)
    model = load_model_file(f"hf:{tmp_path}", blank=True).model
    (tmp_path / "joined").mkdir()
    found = converted(model, checkpoint, tmp_path / "joined")
    assert found.keys() == expected.keys()
    assert {name: stored.shape for name, stored in found.items()} == {
        name: tuple(tensor.shape) for name, tensor in expected.items()
    }
    read = {}
    for name, stored in found.items():
        data = stored.file.read_bytes()[stored.start : stored.start + stored.size]
        read[name] = torch.frombuffer(bytearray(data), dtype=torch.float32).view(stored.shape)
    assert same(read, expected)


def command(folder: Path, verb: str, *more: str | Path) -> None:
    write_config(folder, LLAMA)
    about = ("--devices", write_cluster(folder), "--batch", "4", "--seq", "8", "--json")
    done = call(verb, f"hf:{folder}", *about, *more)
    assert done.code == 0, done.err


@pytest.mark.nightly
def test_estimate_takes_hf_on_the_command_line(tmp_path: Path) -> None:
    command(tmp_path, "estimate")


def test_split_takes_hf_on_the_command_line(tmp_path: Path) -> None:
    """The capture's child is this process, which has imported transformers."""
    with mock.patch.object(session, "Child", child_here):
        command(tmp_path, "split", "--out", tmp_path / "b", "--partitioner", "naive")
    plan = json.loads((tmp_path / "b" / "plan.json").read_text())
    assert plan["source"]["path"] == f"hf:{tmp_path / 'config.json'}?batch=4&seq=8"
    assert (tmp_path / "b" / "example.safetensors").is_file()

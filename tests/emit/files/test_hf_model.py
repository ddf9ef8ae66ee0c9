"""A bundle of a Hugging Face configuration builds modules that stay whole by transformers."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from bigbrain_fx.emit.files.hf_model import hf_model_text
from bigbrain_fx.frontend import load_model_file
from tests.support.command_line import call, write_cluster
from tests.support.hf_models import LLAMA, TEXT, write_config

pytest.importorskip("transformers")

CLASSIFIER = {**LLAMA, "architectures": ["LlamaForSequenceClassification"], "pad_token_id": None}
JETMOE = {
    **TEXT,
    "model_type": "jetmoe",
    "architectures": ["JetMoeForCausalLM"],
    "num_key_value_heads": 2,
    "kv_channels": 8,
    "num_local_experts": 2,
    "num_experts_per_tok": 1,
}


def built(location: str, name: str, folder: Path) -> nn.Module:
    """Build a model by the text of a bundle."""
    plan: Any = SimpleNamespace(
        source=SimpleNamespace(path=location), graph=SimpleNamespace(name=name)
    )
    path = folder / "functions.py"
    path.write_text(hf_model_text(plan))
    spec = importlib.util.spec_from_file_location("functions", path)
    assert spec is not None
    assert spec.loader is not None
    module: Any = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    model: nn.Module = module.model()
    return model


@pytest.mark.parametrize("dtype", ["", "?dtype=bfloat16"])
@pytest.mark.parametrize("fields", [LLAMA, CLASSIFIER], ids=["trains", "classifies"])
def test_the_text_builds_the_model_that_was_split(
    fields: dict[str, Any], dtype: str, tmp_path: Path
) -> None:
    location = f"hf:{write_config(tmp_path, fields)}{dtype}"
    expected = load_model_file(location).model
    model: Any = built(location, type(expected).__name__, tmp_path)
    shapes = {name: (t.shape, t.dtype) for name, t in expected.state_dict().items()}
    assert {name: (t.shape, t.dtype) for name, t in model.state_dict().items()} == shapes
    assert model.config.use_cache is False
    assert model.config.pad_token_id == 0
    model.load_state_dict(expected.state_dict())
    tokens = torch.ones(2, 4, dtype=torch.long)
    assert torch.equal(model.eval()(tokens).logits, expected.eval()(tokens).logits)


@pytest.mark.nightly
@pytest.mark.usefixtures("rehearsals")
def test_a_kind_with_lines_that_no_trace_holds_trains_as_its_loop(tmp_path: Path) -> None:
    write_config(tmp_path, JETMOE)
    where = ("--devices", write_cluster(tmp_path), "--out", tmp_path / "b")
    done = call("split", f"hf:{tmp_path}?batch=4&seq=8", *where, "--micro-batches", "2")
    assert done.code == 0, done.err
    assert "beside your own loop in 2 micro-batches" in done.out
    assert "user_model = model" in (tmp_path / "b" / "functions.py").read_text()

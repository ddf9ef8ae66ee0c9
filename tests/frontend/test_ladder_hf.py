"""The ladder on the Hugging Face models that need it: tiny, with random weights."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import bigbrain_fx as bb
from bigbrain_fx.errors import CaptureError
from bigbrain_fx.frontend import Captured, capture
from bigbrain_fx.plan import Options
from tests.support.bundles import cluster
from tests.support.captured import gradients, run
from tests.support.messages import refused

pytestmark = pytest.mark.nightly


transformers = pytest.importorskip("transformers")


Case = tuple[nn.Module, dict[str, torch.Tensor]]


def tokens() -> torch.Tensor:
    return torch.randint(3, 50, (4, 16))


def opt(layerdrop: float) -> Case:
    config = transformers.OPTConfig(
        vocab_size=50,
        hidden_size=16,
        ffn_dim=32,
        num_hidden_layers=2,
        num_attention_heads=2,
        max_position_embeddings=64,
        word_embed_proj_dim=16,
        layerdrop=layerdrop,
    )
    words = tokens()
    return transformers.OPTForCausalLM(config), {"input_ids": words, "labels": words}


def longformer() -> Case:
    config = transformers.LongformerConfig(
        vocab_size=50,
        hidden_size=16,
        intermediate_size=32,
        num_hidden_layers=2,
        num_attention_heads=2,
        attention_window=4,
        max_position_embeddings=70,
    )
    words = tokens()
    model = transformers.LongformerForMaskedLM(config)
    return model, {"input_ids": words, "attention_mask": torch.ones_like(words), "labels": words}


def prophetnet() -> Case:
    config = transformers.ProphetNetConfig(
        vocab_size=50,
        hidden_size=16,
        encoder_ffn_dim=32,
        decoder_ffn_dim=32,
        num_encoder_layers=1,
        num_decoder_layers=1,
        num_encoder_attention_heads=2,
        num_decoder_attention_heads=2,
        max_position_embeddings=64,
    )
    words = tokens()
    model = transformers.ProphetNetForConditionalGeneration(config)
    return model, {"input_ids": words, "labels": words}


@pytest.mark.parametrize(
    ("make", "said"),
    [
        (longformer, "assumed False at modeling_longformer.py:"),
        (prophetnet, "assumed True at modeling_prophetnet.py:"),
    ],
)
def test_checks_of_masks_are_assumptions(make: Callable[[], Case], said: str) -> None:
    torch.manual_seed(0)
    model, batch = make()
    found = capture(model, batch)
    assert any(warning.startswith(said) for warning in found.warnings)
    assert found.graph.static_batch is None
    assert_same_loss(model, found)


def assert_same_loss(model: nn.Module, found: Captured) -> None:
    inputs = found.inputs()
    torch.manual_seed(7)
    want: Any = model(**inputs).loss
    have = run(found, inputs)[found.graph.loss or ""]
    assert torch.equal(have, want)
    expected = gradients(want, model)
    for name, gradient in gradients(have, model).items():
        other = expected[name]
        assert (gradient is None) == (other is None), name
        if gradient is not None and other is not None:
            assert (gradient - other).abs().max() <= 1e-6 * other.abs().max(), name


def test_layerdrop() -> None:
    torch.manual_seed(0)
    with refused("BX0120a", CaptureError) as caught:
        capture(*opt(0.3))
    assert (caught.value.at or "").startswith("modeling_opt.py:")
    assert "layerdrop=0" in (caught.value.help or "")
    model, batch = opt(0.0)
    assert_same_loss(model, capture(model, batch))


DETR = '''"""A tiny DETR body; the check for infinities is an assumption."""

import torch
from transformers import DetrConfig, DetrModel, ResNetConfig


def model():
    sizes = [8, 8, 8, 16]
    backbone = ResNetConfig(
        embedding_size=8, hidden_sizes=sizes, depths=[1, 1, 1, 1], out_features=["stage4"]
    )
    return DetrModel(
        DetrConfig(
            use_timm_backbone=False,
            use_pretrained_backbone=False,
            backbone=None,
            backbone_config=backbone,
            d_model=16,
            encoder_layers=1,
            decoder_layers=1,
            encoder_attention_heads=2,
            decoder_attention_heads=2,
            encoder_ffn_dim=16,
            decoder_ffn_dim=16,
            num_queries=5,
        )
    )


def example_batch():
    return {"pixel_values": torch.randn(4, 3, 64, 64), "wanted": torch.randn(4, 5, 16)}


def loss(output, batch):
    return (output.last_hidden_state - batch["wanted"]).square().mean()
'''


def test_a_detr_body_is_split_with_its_check(tmp_path: Path) -> None:
    path = tmp_path / "detr_body.py"
    path.write_text(DETR)
    made = bb.split(path, cluster(2), tmp_path / "bundle", Options("naive", micro_batches=2))
    assert any("assumed False at modeling_detr.py:" in warning for warning in made.warnings)
    texts = [(made.bundle / f"device_d{i}.py").read_text() for i in range(2)]
    assert any('assume(torch.isfinite(hidden_states).all(), "modeling_detr.py' in t for t in texts)
    bb.verify(made.bundle, steps=2).require_passed()

"""Models that join images and text."""

from __future__ import annotations

import torch
from torch import nn

from tools.conformance.zoo.case import Batch, Case
from tools.conformance.zoo.hugging_face import LENGTH, ROWS, SMALL, VOCABULARY, of, padding, tokens
from tools.conformance.zoo.vision import images

_IMAGE = 7  # the token that stands for a patch of the image
_PATCHES = 4
_EYES = {
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_attention_heads": 4,
    "image_size": 32,
    "patch_size": 16,
}
_WORDS = {**SMALL, "max_position_embeddings": 32}


def _pairs() -> Batch:
    mask = padding()
    ids = tokens(low=8).masked_fill(mask == 0, 2)
    return {"input_ids": ids, "pixel_values": images(), "attention_mask": mask, "return_loss": True}


def _clip(depth: int) -> nn.Module:
    config = of("CLIPConfig")(
        text_config={**_WORDS, "num_hidden_layers": depth},
        vision_config={**_EYES, "num_hidden_layers": depth},
        projection_dim=16,
    )
    made: nn.Module = of("CLIPModel")(config)
    return made


def _siglip(depth: int) -> nn.Module:
    config = of("SiglipConfig")(
        text_config={**_WORDS, "num_hidden_layers": depth},
        vision_config={**_EYES, "num_hidden_layers": depth},
    )
    made: nn.Module = of("SiglipModel")(config)
    return made


def _blip(depth: int) -> nn.Module:
    words = {**_WORDS, "encoder_hidden_size": 32, "num_hidden_layers": depth}
    config = of("BlipConfig")(
        text_config={**words, "sep_token_id": 1, "projection_dim": 16},
        vision_config={**_EYES, "num_hidden_layers": depth, "projection_dim": 16},
        projection_dim=16,
        image_text_hidden_size=16,
    )
    made: nn.Module = of("BlipForConditionalGeneration")(config)
    return made


def _captions() -> Batch:
    ids = tokens(low=8)
    return {"pixel_values": images(), "input_ids": ids, "labels": ids.clone()}


def _llava(depth: int) -> nn.Module:
    config = of("LlavaConfig")(
        text_config=of("LlamaConfig")(**SMALL, num_hidden_layers=depth),
        vision_config=of("CLIPVisionConfig")(**_EYES, num_hidden_layers=2),
        image_token_index=_IMAGE,
        image_seq_length=_PATCHES,
    )
    made: nn.Module = of("LlavaForConditionalGeneration")(config)
    return made


def _talk() -> Batch:
    ids = tokens(low=8)
    ids[:, 1 : 1 + _PATCHES] = _IMAGE
    return {
        "input_ids": ids,
        "pixel_values": images(),
        "attention_mask": torch.ones_like(ids),
        "labels": ids.masked_fill(ids == _IMAGE, -100),
    }


def _git(depth: int) -> nn.Module:
    config = of("GitConfig")(
        **_WORDS,
        num_hidden_layers=depth,
        vision_config={**_EYES, "num_hidden_layers": 2},
    )
    made: nn.Module = of("GitForCausalLM")(config)
    return made


def _git_batch() -> Batch:
    ids = torch.randint(8, VOCABULARY, (ROWS, LENGTH))
    return {"input_ids": ids, "pixel_values": images(), "labels": ids.clone()}


CASES = (
    Case("clip", _clip, _pairs),
    Case("siglip", _siglip, _pairs),
    Case("blip", _blip, _captions),
    Case("llava", _llava, _talk),
    Case("git", _git, _git_batch),
)

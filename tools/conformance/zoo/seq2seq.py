"""Encoders and decoders of text."""

from __future__ import annotations

from functools import partial
from typing import Any

from tools.conformance.zoo.hugging_face import text_case, translations

_case = partial(text_case, batch=translations, decoder_start_token_id=2)
_T5: dict[str, Any] = {
    "layers": "num_layers num_decoder_layers",
    "d_model": 32,
    "d_ff": 64,
    "num_heads": 4,
    "d_kv": 8,
}
_BART: dict[str, Any] = {
    "layers": "encoder_layers decoder_layers",
    "d_model": 32,
    "encoder_attention_heads": 4,
    "decoder_attention_heads": 4,
    "encoder_ffn_dim": 64,
    "decoder_ffn_dim": 64,
}
_switch = partial(
    _case,
    config="SwitchTransformersConfig",
    model="SwitchTransformersForConditionalGeneration",
    **_T5,
    num_experts=4,
    num_sparse_encoder_layers=2,
    num_sparse_decoder_layers=2,
)

CASES = (
    _case("t5", "T5Config", "T5ForConditionalGeneration", **_T5),
    _case(
        "t5-gated",
        "T5Config",
        "T5ForConditionalGeneration",
        **_T5,
        feed_forward_proj="gated-gelu",
        tie_word_embeddings=False,
    ),
    _case("umt5", "UMT5Config", "UMT5ForConditionalGeneration", **_T5),
    _case("long-t5", "LongT5Config", "LongT5ForConditionalGeneration", **_T5, local_radius=4),
    _case("bart", "BartConfig", "BartForConditionalGeneration", **_BART),
    _case("mbart", "MBartConfig", "MBartForConditionalGeneration", **_BART),
    _case("pegasus", "PegasusConfig", "PegasusForConditionalGeneration", **_BART),
    _case("marian", "MarianConfig", "MarianMTModel", **_BART),
    _case(
        "m2m100",
        "M2M100Config",
        "M2M100ForConditionalGeneration",
        **_BART,
        encoder_layerdrop=0.0,
        decoder_layerdrop=0.0,
    ),
    _case("blenderbot", "BlenderbotConfig", "BlenderbotForConditionalGeneration", **_BART),
    _case(
        "led",
        "LEDConfig",
        "LEDForConditionalGeneration",
        **_BART,
        attention_window=8,
        max_encoder_position_embeddings=64,
        max_decoder_position_embeddings=64,
    ),
    _case(
        "prophetnet",
        "ProphetNetConfig",
        "ProphetNetForConditionalGeneration",
        layers="num_encoder_layers num_decoder_layers",
        num_encoder_attention_heads=4,
        num_decoder_attention_heads=4,
        encoder_ffn_dim=64,
        decoder_ffn_dim=64,
    ),
    # Its experts are called for the tokens that go there: how many is data.
    _switch("switch"),
    _switch("switch-remedied", leaves=("SwitchTransformersExperts",)),
)

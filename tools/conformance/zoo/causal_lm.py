"""Language models that predict the next token."""

from __future__ import annotations

from functools import partial
from typing import Any

from torch import nn

from tools.conformance.zoo.case import Case
from tools.conformance.zoo.hugging_face import (
    VOCABULARY,
    built,
    next_token,
    padded_next_token,
    text_case,
)

_case = partial(text_case, batch=next_token)
_GROUPED: dict[str, Any] = {"num_key_value_heads": 2}
_EXPERTS: dict[str, Any] = {"moe_intermediate_size": 32, "num_experts_per_tok": 2}


def _with_checkpointing(model: nn.Module) -> None:
    model.gradient_checkpointing_enable()  # type: ignore[operator]  # a method of transformers


def _llama(name: str, **options: Any) -> Case:
    return _case(name, "LlamaConfig", "LlamaForCausalLM", **{**_GROUPED, **options})


def _gpt_neo(depth: int) -> nn.Module:
    options: dict[str, Any] = {
        "vocab_size": VOCABULARY,
        "hidden_size": 32,
        "num_heads": 4,
        "num_layers": depth,
        "attention_types": [[["global", "local"], depth // 2]],
        "window_size": 8,
    }
    return built("GPTNeoConfig", "GPTNeoForCausalLM", **options)


CASES = (
    _case("gpt2", "GPT2Config", "GPT2LMHeadModel"),
    _case("gpt2-padded", "GPT2Config", "GPT2LMHeadModel", batch=padded_next_token),
    _case("gpt-neox", "GPTNeoXConfig", "GPTNeoXForCausalLM", hidden_dropout=0.1),
    _case("opt", "OPTConfig", "OPTForCausalLM", ffn_dim=64, word_embed_proj_dim=32),
    _case("bloom", "BloomConfig", "BloomForCausalLM", hidden_dropout=0.1, attention_dropout=0.1),
    _llama("llama"),
    _llama("llama-dropout", attention_dropout=0.1),
    _llama("llama-padded", batch=padded_next_token),
    _llama("llama-tied", tie_word_embeddings=True),
    _llama("llama-checkpointed", change=_with_checkpointing, attention_dropout=0.1),
    _llama("llama-eager-attention", attn_implementation="eager"),
    _case("mistral", "MistralConfig", "MistralForCausalLM", **_GROUPED, sliding_window=8),
    _case("qwen2", "Qwen2Config", "Qwen2ForCausalLM", **_GROUPED),
    _case("qwen3", "Qwen3Config", "Qwen3ForCausalLM", **_GROUPED, head_dim=8),
    _case("gemma2", "Gemma2Config", "Gemma2ForCausalLM", **_GROUPED, head_dim=8, sliding_window=8),
    _case("gemma3", "Gemma3TextConfig", "Gemma3ForCausalLM", **_GROUPED, head_dim=8),
    _case("phi", "PhiConfig", "PhiForCausalLM"),
    _case("phi3", "Phi3Config", "Phi3ForCausalLM", **_GROUPED, resid_pdrop=0.1),
    _case("falcon", "FalconConfig", "FalconForCausalLM", hidden_dropout=0.1),
    _case("falcon-alibi", "FalconConfig", "FalconForCausalLM", alibi=True),
    _case("mixtral", "MixtralConfig", "MixtralForCausalLM", **_GROUPED, num_local_experts=4),
    _case(
        "mixtral-router-loss",
        "MixtralConfig",
        "MixtralForCausalLM",
        **_GROUPED,
        num_local_experts=4,
        output_router_logits=True,
    ),
    _case(
        "qwen3-moe",
        "Qwen3MoeConfig",
        "Qwen3MoeForCausalLM",
        **_GROUPED,
        **_EXPERTS,
        num_experts=4,
        head_dim=8,
    ),
    _case(
        "deepseek-v3",
        "DeepseekV3Config",
        "DeepseekV3ForCausalLM",
        **_EXPERTS,
        num_key_value_heads=4,
        n_routed_experts=4,
        n_group=2,
        topk_group=1,
        n_shared_experts=1,
        first_k_dense_replace=1,
        kv_lora_rank=16,
        q_lora_rank=16,
        qk_rope_head_dim=8,
        qk_nope_head_dim=8,
        v_head_dim=8,
    ),
    _case(
        "gpt-oss", "GptOssConfig", "GptOssForCausalLM", **_GROUPED, num_local_experts=4, head_dim=8
    ),
    _case("mamba", "MambaConfig", "MambaForCausalLM", state_size=4),
    _case(
        "mamba2",
        "Mamba2Config",
        "Mamba2ForCausalLM",
        num_heads=8,
        head_dim=8,
        state_size=8,
        n_groups=2,
        chunk_size=8,
    ),
    _case("rwkv", "RwkvConfig", "RwkvForCausalLM", context_length=64),
    Case("gpt-neo", _gpt_neo, next_token),
    _case("gptj", "GPTJConfig", "GPTJForCausalLM", rotary_dim=4),
    _case("codegen", "CodeGenConfig", "CodeGenForCausalLM", rotary_dim=4),
    _case("olmo2", "Olmo2Config", "Olmo2ForCausalLM", **_GROUPED),
    _case("starcoder2", "Starcoder2Config", "Starcoder2ForCausalLM", **_GROUPED),
    _case("stablelm", "StableLmConfig", "StableLmForCausalLM", **_GROUPED),
    _case("cohere", "CohereConfig", "CohereForCausalLM", **_GROUPED),
    _case(
        "granite-moe", "GraniteMoeConfig", "GraniteMoeForCausalLM", **_GROUPED, num_local_experts=4
    ),
    _case(
        "xglm",
        "XGLMConfig",
        "XGLMForCausalLM",
        layers="num_layers",
        d_model=32,
        attention_heads=4,
        ffn_dim=64,
        layerdrop=0.0,
    ),
    _case(
        "recurrent-gemma",
        "RecurrentGemmaConfig",
        "RecurrentGemmaForCausalLM",
        num_key_value_heads=2,
        lru_width=32,
        attention_window_size=8,
    ),
    _case(
        "opt-layerdrop",
        "OPTConfig",
        "OPTForCausalLM",
        ffn_dim=64,
        word_embed_proj_dim=32,
        layerdrop=0.5,
        remedy="opt",
        refused=True,
    ),
)

"""Tiny configs of many architectures: what each needs besides the fields that most share."""

from __future__ import annotations

from typing import Any

WINDOW = 8
"""Ids that a sliding window or an attention chunk holds, where an architecture has one."""

SHARED: dict[str, Any] = {
    "vocab_size": 300,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "rms_norm_eps": 1e-5,
    "rope_theta": 10000.0,
    "max_position_embeddings": 512,
    "tie_word_embeddings": False,
    "attention_bias": False,
    "mlp_bias": False,
}
GPT: dict[str, Any] = {"n_embd": 32, "n_head": 4, "n_layer": 2, "n_positions": 512}
MOE: dict[str, Any] = {
    "num_experts": 4,
    "num_local_experts": 4,
    "n_routed_experts": 4,
    "moe_num_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 16,
    "norm_topk_prob": True,
    "routed_scaling_factor": 1.0,
    "n_shared_experts": 1,
    "num_shared_experts": 1,
    "shared_expert_intermediate_size": 16,
    "first_k_dense_replace": 1,
}
MLA: dict[str, Any] = {
    "kv_lora_rank": 8,
    "q_lora_rank": 8,
    "qk_rope_head_dim": 8,
    "qk_nope_head_dim": 8,
    "v_head_dim": 8,
}
DELTA: dict[str, Any] = {
    "linear_num_value_heads": 4,
    "linear_num_key_heads": 2,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 8,
    "linear_conv_kernel_dim": 4,
    "partial_rotary_factor": 0.5,
}
YARN: dict[str, Any] = {
    "rope_scaling": {
        "type": "yarn",
        "factor": 4,
        "original_max_position_embeddings": 64,
        "beta_fast": 32,
        "beta_slow": 1,
        "mscale": 1.0,
        "mscale_all_dim": 1.0,
    }
}
GRANITE: dict[str, Any] = {
    "logits_scaling": 1.0,
    "attention_multiplier": 0.35,
    "embedding_multiplier": 1.0,
    "residual_multiplier": 1.0,
}
MAMBA: dict[str, Any] = {
    "state_size": 8,
    "conv_kernel": 4,
    "use_bias": False,
    "use_conv_bias": True,
    "time_step_rank": 4,
}
SLIDING = ["sliding_attention", "full_attention"]

MROPE: dict[str, Any] = {
    "rope_scaling": {"type": "mrope", "rope_type": "mrope", "mrope_section": [2, 1, 1]}
}
PATCHES: dict[str, Any] = {
    "depth": 1,
    "embed_dim": 32,
    "hidden_size": 32,
    "intermediate_size": 48,
    "out_hidden_size": 32,
    "num_heads": 4,
    "patch_size": 4,
    "image_size": 16,
}

ARCHITECTURES: dict[str, dict[str, Any]] = {
    # Dense.
    "llama": {},
    "mistral": {},
    "ministral3": {
        "layer_types": SLIDING,
        "sliding_window": WINDOW,
        "rope_parameters": {
            "rope_theta": 10000.0,
            "llama_4_scaling_beta": 0.1,
            "original_max_position_embeddings": 16,
        },
    },
    "qwen2": {},
    "qwen3": {},
    "gemma": {"tie_word_embeddings": True},
    "gemma2": {"query_pre_attn_scalar": 8, "tie_word_embeddings": True},
    "phi": {"num_key_value_heads": 4, "partial_rotary_factor": 0.5},
    "phi3": {},
    "olmo2": {},
    "cohere": {"use_qk_norm": False, "logit_scale": 1.0},
    "glm": {},
    "glm4": {"partial_rotary_factor": 0.5},
    "granite": GRANITE,
    "starcoder2": {},
    "stablelm": {"partial_rotary_factor": 0.5, "use_qkv_bias": True, "layer_norm_eps": 1e-5},
    "internlm2": {},
    "internlm3": {},
    "gpt2": GPT | {"n_ctx": 512, "layer_norm_epsilon": 1e-5},
    "gpt_bigcode": GPT | {"n_inner": 48, "layer_norm_epsilon": 1e-5},
    "gpt_neox": {"layer_norm_eps": 1e-5, "rotary_emb_base": 10000, "rotary_pct": 0.5},
    "gptj": GPT | {"rotary_dim": 4},
    "exaone": {"num_layers": 2, "layer_norm_epsilon": 1e-5},
    "minicpm": {"dim_model_base": 32, "scale_depth": 1.0, "scale_emb": 1.0},
    "smollm3": {"no_rope_layer_interval": 2},
    "ernie4_5": {"use_bias": False},
    "hunyuan_v1_dense": {"rope_scaling": {"alpha": 1000.0, "factor": 1.0, "type": "dynamic"}},
    "nemotron": {"hidden_act": "relu2", "norm_eps": 1e-5},
    "helium": {},
    "apertus": {"post_norm": True, "qk_norm": True},
    "seed_oss": {},
    "mimo": {},
    "nanochat": {},
    "afm7": {
        "hidden_dim": 32,
        "num_layers": 4,
        "num_kv_reuse_layers": 2,
        "num_heads": 4,
        "num_kv_heads": 2,
    },
    # Sliding windows.
    "gemma3_text": {
        "sliding_window": WINDOW,
        "sliding_window_pattern": 2,
        "query_pre_attn_scalar": 8,
        "rope_theta": 1e6,
        "tie_word_embeddings": True,
    },
    "gemma3n": {
        "text_config": SHARED
        | {
            "model_type": "gemma3n_text",
            "num_hidden_layers": 4,
            "intermediate_size": [48] * 4,
            "num_kv_shared_layers": 2,
            "vocab_size_per_layer_input": 300,
            "sliding_window": WINDOW,
            "rope_local_base_freq": 10000.0,
            "final_logit_softcapping": 30.0,
            "layer_types": SLIDING * 2,
            "activation_sparsity_pattern": [0.5, 0.5, 0.0, 0.0],
            "hidden_size_per_layer_input": 8,
            "altup_num_inputs": 2,
            "altup_coef_clip": 120.0,
            "altup_correct_scale": True,
            "altup_active_idx": 0,
            "laurel_rank": 4,
        },
    },
    "gemma4_text": {
        "num_hidden_layers": 4,
        "num_kv_shared_layers": 2,
        "global_head_dim": 16,
        "hidden_size_per_layer_input": 8,
        "vocab_size_per_layer_input": 300,
        "sliding_window": WINDOW,
        "layer_types": SLIDING * 2,
        "rope_parameters": {
            "full_attention": {"partial_rotary_factor": 0.25, "rope_theta": 1e6},
            "sliding_attention": {"rope_theta": 1e4},
        },
        "tie_word_embeddings": True,
    },
    "cohere2": {"sliding_window": WINDOW, "sliding_window_pattern": 2, "logit_scale": 1.0},
    "olmo3": {"sliding_window": WINDOW, "layer_types": SLIDING},
    "exaone4": {"sliding_window": WINDOW, "sliding_window_pattern": "LG", "rope_scaling": None},
    "gpt_oss": MOE | {"sliding_window": WINDOW, "layer_types": SLIDING},
    "mimo_v2_flash": MOE
    | {"hybrid_layer_pattern": [0, 1], "moe_layer_freq": [0, 1], "sliding_window_size": WINDOW}
    | {"add_swa_attention_sink_bias": True, "add_full_attention_sink_bias": False}
    | {"scoring_func": "sigmoid", "topk_method": "noaux_tc", "n_group": 1, "topk_group": 1}
    | {"swa_num_attention_heads": 4, "swa_num_key_value_heads": 2, "swa_head_dim": 8}
    | {"v_head_dim": 8, "swa_v_head_dim": 8, "swa_rope_theta": 10000.0}
    | {"layernorm_epsilon": 1e-5, "partial_rotary_factor": 0.5},
    "llama4": {
        "text_config": SHARED
        | {
            "model_type": "llama4_text",
            "num_hidden_layers": 4,
            "attention_chunk_size": WINDOW,
            "interleave_moe_layer_step": 2,
            "intermediate_size_mlp": 48,
            "num_local_experts": 2,
            "num_experts_per_tok": 1,
            "rope_scaling": None,
            "use_qk_norm": True,
        },
    },
    "llama4_text": {
        "intermediate_size_mlp": 48,
        "no_rope_layers": [1, 0],
        "use_qk_norm": True,
        "tie_word_embeddings": True,
    },
    # Mixtures of experts.
    "mixtral": MOE,
    "qwen2_moe": MOE,
    "qwen3_moe": MOE | {"decoder_sparse_step": 1, "mlp_only_layers": []},
    "olmoe": MOE,
    "phimoe": MOE
    | {
        "rope_scaling": {
            "type": "longrope",
            "long_factor": [1.0] * 4,
            "short_factor": [1.0] * 4,
            "long_mscale": 1.2,
            "short_mscale": 1.2,
            "original_max_position_embeddings": 4096,
        }
    },
    "granitemoe": GRANITE | MOE,
    "bailing_moe": MOE,
    "dots1": MOE,
    "ernie4_5_moe": MOE | {"use_bias": False, "moe_k": 2},
    "glm4_moe": MOE
    | {"n_group": 1, "topk_group": 1, "rope_scaling": None, "use_qk_norm": True}
    | {"partial_rotary_factor": 0.5},
    "hunyuan": MOE
    | {"moe_topk": 2, "num_shared_expert": 1, "use_mixed_mlp_moe": True, "use_qk_norm": True}
    | {"use_cla": True, "cla_share_factor": 2}
    | {"rope_scaling": {"alpha": 1000.0, "factor": 1.0, "type": "dynamic"}},
    "dbrx": {
        "d_model": 32,
        "ffn_config": {"ffn_hidden_size": 16, "moe_num_experts": 4, "moe_top_k": 2},
        "attn_config": {"kv_n_heads": 2, "clip_qkv": 8.0, "rope_theta": 10000},
        "n_layers": 2,
        "n_heads": 4,
    },
    "minimax": MOE | {"shared_intermediate_size": 16, "rotary_dim": 4},
    "afmoe": MOE | {"layer_types": SLIDING, "sliding_window": WINDOW, "num_dense_layers": 1},
    # Latent attention.
    "minicpm3": MLA
    | {"dim_model_base": 32, "scale_depth": 1.0, "scale_emb": 1.0}
    | {
        "rope_scaling": {"type": "longrope", "long_factor": [1.0] * 4, "short_factor": [1.0] * 4}
        | {"original_max_position_embeddings": 512}
    },
    "deepseek": MOE,
    "deepseek_v2": MOE | MLA | YARN | {"n_group": 1, "topk_group": 1, "topk_method": "greedy"},
    "deepseek_v3": MOE | MLA | {"n_group": 1, "topk_group": 1},
    "glm4_moe_lite": MOE
    | MLA
    | {"num_key_value_heads": 4, "n_group": 1, "topk_group": 1, "scoring_func": "sigmoid"}
    | {"topk_method": "noaux_tc", "moe_layer_freq": 1, "partial_rotary_factor": 1.0}
    | {"rope_scaling": None, "num_nextn_predict_layers": 0},
    "deepseek_v32": MOE
    | MLA
    | YARN
    | {"n_group": 1, "topk_group": 1, "index_n_heads": 2, "index_head_dim": 16, "index_topk": 12},
    "longcat_flash": MLA
    | {"attention_method": "MLA", "zero_expert_type": "identity", "ffn_hidden_size": 48}
    | {"moe_topk": 2, "expert_ffn_hidden_size": 16, "n_routed_experts": 4, "zero_expert_num": 1}
    | {"num_layers": 2, "routed_scaling_factor": 1.0}
    | {"mla_scale_q_lora": True, "mla_scale_kv_lora": True},
    "longcat_flash_ngram": MLA
    | {"ffn_hidden_size": 48, "ngram_vocab_size_ratio": 2, "emb_neighbor_num": 2}
    | {"moe_topk": 2, "expert_ffn_hidden_size": 16, "n_routed_experts": 4, "zero_expert_num": 1}
    | {"emb_split_num": 2, "num_layers": 2, "routed_scaling_factor": 1.0}
    | {"mla_scale_q_lora": True, "mla_scale_kv_lora": True},
    # Recurrent, and hybrids of recurrence and attention.
    "mamba": MAMBA,
    "mamba2": MAMBA
    | {"num_heads": 4, "head_dim": 16, "n_groups": 2, "intermediate_size": 64}
    | {"layer_norm_epsilon": 1e-5, "time_step_limit": [0.001, 10.0]},
    "jamba": MOE
    | {"num_hidden_layers": 4, "attn_layer_offset": 1, "attn_layer_period": 2}
    | {"expert_layer_offset": 1, "expert_layer_period": 2}
    | {"mamba_d_conv": 4, "mamba_d_state": 8, "mamba_expand": 2},
    "nemotron_h": {
        "num_hidden_layers": 4,
        "hybrid_override_pattern": "M*M-",
        "mamba_num_heads": 4,
        "mamba_head_dim": 16,
        "mamba_proj_bias": False,
        "ssm_state_size": 8,
        "conv_kernel": 4,
        "n_groups": 2,
        "layer_norm_epsilon": 1e-5,
        "use_bias": False,
        "use_conv_bias": True,
        "time_step_limit": [0.001, 10.0],
    },
    "falcon_h1": {
        "mamba_d_conv": 4,
        "mamba_d_head": 16,
        "mamba_d_ssm": 64,
        "mamba_d_state": 8,
        "mamba_n_heads": 4,
        "mamba_n_groups": 1,
        "mlp_multipliers": [1.0, 1.0],
        "ssm_multipliers": [1.0, 1.0, 1.0, 1.0, 1.0],
        "lm_head_multiplier": 1.0,
        "embedding_multiplier": 1.0,
    },
    "granitemoehybrid": GRANITE
    | {"layer_types": ["mamba", "attention"], "shared_intermediate_size": 48}
    | {"mamba_n_heads": 4, "mamba_d_head": 16, "mamba_d_state": 8, "mamba_d_conv": 4}
    | {"mamba_n_groups": 1, "mamba_proj_bias": False, "mamba_conv_bias": True}
    | {"num_local_experts": 4, "num_experts_per_tok": 2},
    "lfm2": {
        "norm_eps": 1e-5,
        "conv_bias": False,
        "conv_L_cache": 3,
        "block_dim": 32,
        "block_ff_dim": 48,
        "block_multiple_of": 4,
        "block_ffn_dim_multiplier": 1.0,
        "block_auto_adjust_ff_dim": False,
        "layer_types": ["conv", "full_attention"],
        "tie_word_embeddings": True,
    },
    "lfm2_moe": MOE
    | {
        "tie_word_embeddings": True,
        "norm_eps": 1e-5,
        "conv_bias": False,
        "conv_L_cache": 3,
        "num_dense_layers": 1,
    }
    | {"use_expert_bias": True, "layer_types": ["conv", "full_attention"]},
    "recurrent_gemma": {
        "num_hidden_layers": 3,
        "conv1d_width": 4,
        "logits_soft_cap": 30.0,
        "attention_window_size": WINDOW,
        "block_types": ["recurrent", "recurrent", "attention"],
    },
    "qwen3_next": MOE
    | DELTA
    | {"decoder_sparse_step": 1, "mlp_only_layers": [], "full_attention_interval": 2},
    "qwen3_5": {
        "text_config": SHARED
        | DELTA
        | {
            "model_type": "qwen3_5_text",
            "full_attention_interval": 2,
            "rope_parameters": {
                "type": "default",
                "mrope_section": [2, 1, 1],
                "rope_theta": 10000.0,
                "partial_rotary_factor": 0.5,
            },
        },
    },
    "olmo_hybrid": DELTA
    | {"linear_allow_neg_eigval": True, "num_hidden_layers": 2}
    | {"layer_types": ["linear_attention", "full_attention"]},
    "kimi_linear": MOE
    | MLA
    | {"linear_attn_config": {"num_heads": 4, "head_dim": 8, "kda_layers": [1]}}
    | {"model_max_length": 512},
    "bailing_moe_linear": MOE | {"layer_group_size": 2, "group_norm_size": 1},
    "baichuan_m1": {"sliding_window": WINDOW, "sliding_window_layers": [0], "conv_window": 2},
    "plamo2": {
        "hidden_size_per_head": 8,
        "attention_window_size": WINDOW,
        "full_attention_idx": [],
        "mamba_d_state": 8,
        "mamba_d_conv": 4,
        "mamba_num_heads": 4,
        "mamba_step": 2,
    },
    "rwkv7": {
        "norm_eps": 1e-5,
        "a_low_rank_dim": 8,
        "v_low_rank_dim": 8,
        "gate_low_rank_dim": 8,
        "decay_low_rank_dim": 8,
    },
}

MULTIMODAL: dict[str, dict[str, Any]] = {
    "qwen2_vl": MROPE | {"vision_config": PATCHES | {"model_type": "qwen2_vl"}},
    "qwen2_5_vl": MROPE | {"vision_config": PATCHES | {"model_type": "qwen2_5_vl"}},
    "qwen3_vl": {
        "text_config": SHARED | MROPE | {"model_type": "qwen3_vl_text"},
        "vision_config": PATCHES | {"model_type": "qwen3_vl", "num_position_embeddings": 16},
    },
    "glm4v": {
        "text_config": SHARED
        | {"model_type": "glm4v_text"}
        | {"rope_scaling": {"rope_type": "default", "mrope_section": [1, 1, 0]}},
        "vision_config": PATCHES | {"model_type": "glm4v"},
        "eos_token_id": 1,
    },
    "gemma3": {
        "text_config": SHARED
        | {"model_type": "gemma3_text", "sliding_window": WINDOW, "sliding_window_pattern": 2}
        | {"mm_tokens_per_image": 4, "query_pre_attn_scalar": 8, "rope_theta": 1e6},
        "vision_config": {
            "model_type": "siglip_vision_model",
            "num_hidden_layers": 1,
            "hidden_size": 32,
            "intermediate_size": 48,
            "num_attention_heads": 4,
            "patch_size": 4,
            "image_size": 16,
        },
        "tie_word_embeddings": True,
    },
    "mistral3": {
        "text_config": SHARED | {"model_type": "mistral"},
        "vision_config": {
            "model_type": "pixtral",
            "num_hidden_layers": 1,
            "hidden_size": 32,
            "head_dim": 8,
            "intermediate_size": 48,
            "num_attention_heads": 4,
            "patch_size": 4,
            "image_size": 16,
        },
    },
    "idefics3": {
        "text_config": SHARED | {"model_type": "llama"},
        "vision_config": {
            "model_type": "idefics3",
            "num_hidden_layers": 1,
            "hidden_size": 32,
            "intermediate_size": 48,
            "num_attention_heads": 4,
            "patch_size": 4,
            "image_size": 16,
        },
    },
}
"""Models with a tower for images, served with text."""


def config_of(model_type: str) -> dict[str, Any]:
    """The config.json of an architecture."""
    return SHARED | {"model_type": model_type} | (ARCHITECTURES | MULTIMODAL)[model_type]

"""Turns the GGUF file of a Llama-type model into a Hugging Face style folder in float32.

MLX reads GGUF tensors (into its own quantised form) and metadata; what is left is to dequantise,
rename, undo llama.cpp's reordering of the query and key rows, and write the tokenizer. float32
because MLX's CPU backend is slow with quantised and half-precision matrices.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import mlx.core as mx
from tokenizers import AddedToken, Tokenizer
from tokenizers.decoders import ByteLevel as ByteLevelDecoder
from tokenizers.models import BPE
from tokenizers.pre_tokenizers import ByteLevel, Digits, Sequence

CONTROL_TOKEN = 3  # llama.cpp's token type for <|im_start|> and the like

# GGUF block tensors in the words of Hugging Face's Llama.
BLOCK = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
TOP = {"token_embd": "model.embed_tokens", "output_norm": "model.norm", "output": "lm_head"}


def convert(source: Path, folder: Path, progress: Callable[[int, int], None]) -> None:
    """Writes config, weights and tokenizer of `source` into the existing `folder`.

    progress(done, total) is called per tensor. Raises ValueError for another architecture or
    another tokenizer than this converter knows.
    """
    loaded: Any = mx.load(str(source), return_metadata=True)
    tensors, meta = loaded
    known = (meta.get("general.architecture"), meta.get("tokenizer.ggml.pre"))
    if known != ("llama", "smollm"):
        raise ValueError(f"{source.name}: not a llama model with smollm tokenizer: {known}")
    weights = convert_weights(tensors, meta, progress)
    mx.save_safetensors(str(folder / "model.safetensors"), weights, metadata={"format": "pt"})
    tied = "lm_head.weight" not in weights
    _write(folder / "config.json", model_config(meta, tied))
    _write(folder / "generation_config.json", special_ids(meta))
    build_tokenizer(meta).save(str(folder / "tokenizer.json"))
    _write(folder / "tokenizer_config.json", tokenizer_config(meta))


def convert_weights(
    tensors: dict[str, mx.array], meta: dict[str, Any], progress: Callable[[int, int], None]
) -> dict[str, mx.array]:
    """Evaluated float32 tensors under Hugging Face names, in sorted order."""
    names = sorted(name for name in tensors if name.endswith(".weight"))
    heads = {
        "attn_q": int(meta["llama.attention.head_count"]),
        "attn_k": int(meta["llama.attention.head_count_kv"]),
    }
    weights = {}
    for done, name in enumerate(names, 1):
        stem = name.removesuffix(".weight")
        weight = dequantise(tensors, stem)
        kind = stem.rpartition(".")[2]
        if kind in heads:
            weight = restore_row_order(weight, heads[kind])
        mx.eval(weight)
        weights[hugging_face_name(stem)] = weight
        progress(done, len(names))
    return dict(sorted(weights.items()))


def dequantise(tensors: dict[str, mx.array], stem: str) -> mx.array:
    """The tensor `stem` in float32. MLX holds Q4 and Q8 blocks as groups of 32."""
    weight, scales = tensors[f"{stem}.weight"], tensors.get(f"{stem}.scales")
    if scales is None:
        return weight.astype(mx.float32)
    bits = weight.shape[-1] // scales.shape[-1]  # 32-bit words per group of 32 values
    biases = tensors[f"{stem}.biases"].astype(mx.float32)
    return mx.dequantize(weight, scales.astype(mx.float32), biases, group_size=32, bits=bits)


def restore_row_order(weight: mx.array, heads: int) -> mx.array:
    """Undoes llama.cpp's interleaving of the two rotary halves of every head."""
    rows, columns = weight.shape
    halves = weight.reshape(heads, rows // heads // 2, 2, columns)
    return halves.swapaxes(1, 2).reshape(rows, columns)


def hugging_face_name(stem: str) -> str:
    """`blk.3.attn_q` becomes `model.layers.3.self_attn.q_proj.weight`. KeyError if unknown."""
    block = re.fullmatch(r"blk\.(\d+)\.(\w+)", stem)
    if block is None:
        return f"{TOP[stem]}.weight"
    return f"model.layers.{block[1]}.{BLOCK[block[2]]}.weight"


def model_config(meta: dict[str, Any], tied: bool) -> dict[str, Any]:
    heads = int(meta["llama.attention.head_count"])
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_size": int(meta["llama.embedding_length"]),
        "intermediate_size": int(meta["llama.feed_forward_length"]),
        "num_hidden_layers": int(meta["llama.block_count"]),
        "num_attention_heads": heads,
        "num_key_value_heads": int(meta["llama.attention.head_count_kv"]),
        "head_dim": int(meta["llama.embedding_length"]) // heads,
        "max_position_embeddings": int(meta["llama.context_length"]),
        "rms_norm_eps": round(float(meta["llama.attention.layer_norm_rms_epsilon"]), 9),
        "rope_theta": float(meta["llama.rope.freq_base"]),
        "vocab_size": int(meta["llama.vocab_size"]),
        "hidden_act": "silu",
        "tie_word_embeddings": tied,
        "torch_dtype": "float32",
        **special_ids(meta),
    }


def special_ids(meta: dict[str, Any]) -> dict[str, int]:
    return {
        "bos_token_id": int(meta["tokenizer.ggml.bos_token_id"]),
        "eos_token_id": int(meta["tokenizer.ggml.eos_token_id"]),
        "pad_token_id": int(meta["tokenizer.ggml.padding_token_id"]),
    }


def build_tokenizer(meta: dict[str, Any]) -> Tokenizer:
    """Byte-level BPE over single digits: the pre-tokenizer that llama.cpp calls `smollm`."""
    tokens: list[str] = meta["tokenizer.ggml.tokens"]
    merges = [tuple(merge.split(" ")) for merge in meta["tokenizer.ggml.merges"]]
    vocabulary = {token: number for number, token in enumerate(tokens)}
    tokenizer = Tokenizer(BPE(vocab=vocabulary, merges=merges))
    tokenizer.pre_tokenizer = Sequence(
        [Digits(individual_digits=True), ByteLevel(add_prefix_space=False)]
    )
    tokenizer.decoder = ByteLevelDecoder()
    types = meta["tokenizer.ggml.token_type"].tolist()
    control = [token for token, kind in zip(tokens, types, strict=True) if kind == CONTROL_TOKEN]
    tokenizer.add_special_tokens(
        [AddedToken(token, special=True, normalized=False) for token in control]
    )
    return tokenizer


def tokenizer_config(meta: dict[str, Any]) -> dict[str, Any]:
    tokens: list[str] = meta["tokenizer.ggml.tokens"]
    return {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": tokens[int(meta["tokenizer.ggml.bos_token_id"])],
        "eos_token": tokens[int(meta["tokenizer.ggml.eos_token_id"])],
        "pad_token": tokens[int(meta["tokenizer.ggml.padding_token_id"])],
        "unk_token": tokens[int(meta["tokenizer.ggml.unknown_token_id"])],
        "model_max_length": int(meta["llama.context_length"]),
        "clean_up_tokenization_spaces": False,
        "chat_template": meta["tokenizer.chat_template"],
    }


def _write(path: Path, content: dict[str, Any]) -> None:
    path.write_text(json.dumps(content, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")

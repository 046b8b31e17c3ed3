"""A llama of any size with random weights, as a real model folder: benchmarks need no download."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import mlx.core as mx
from mlx.utils import tree_flatten
from mlx_lm.models import llama
from tokenizers import Tokenizer
from tokenizers.decoders import ByteLevel as ByteLevelDecoder
from tokenizers.models import BPE
from tokenizers.pre_tokenizers import ByteLevel

EOS, START, END = "<|eos|>", "<|start|>", "<|end|>"
CHAT_TEMPLATE = (
    "{% for message in messages %}<|start|>{{ message.role }}\n{{ message.content }}<|end|>\n"
    "{% endfor %}{% if add_generation_prompt %}<|start|>assistant\n{% endif %}"
)


@dataclass(frozen=True, slots=True)
class Shape:
    """The sizes of a llama. The default has 1.2e9 parameters and the vocabulary of Llama 3."""

    layers: int = 16
    hidden: int = 2048
    heads: int = 32
    kv_heads: int = 8
    intermediate: int = 8192
    vocab: int = 128_256
    context: int = 32_768


def write_random_llama(folder: Path, shape: Shape) -> Path:
    """Writes config, bfloat16 weights (the same every time) and a tokenizer; returns the folder."""
    folder.mkdir(parents=True, exist_ok=True)
    config = {
        "model_type": "llama",
        "architectures": ["LlamaForCausalLM"],
        "hidden_size": shape.hidden,
        "num_hidden_layers": shape.layers,
        "intermediate_size": shape.intermediate,
        "num_attention_heads": shape.heads,
        "num_key_value_heads": shape.kv_heads,
        "rms_norm_eps": 1e-5,
        "vocab_size": shape.vocab,
        "max_position_embeddings": shape.context,
        "rope_theta": 500_000.0,
        "tie_word_embeddings": True,
        "torch_dtype": "bfloat16",
        "eos_token_id": 0,
    }
    _write_json(folder / "config.json", config)
    network = llama.Model(llama.ModelArgs.from_dict(config))
    weights = {}
    for number, (name, array) in enumerate(sorted(tree_flatten(network.parameters()))):
        if array.ndim == 1:
            weights[name] = mx.ones(array.shape, mx.bfloat16)
        else:
            key = mx.random.key(number)
            scale = array.shape[-1] ** -0.5
            weights[name] = mx.random.normal(array.shape, mx.bfloat16, scale=scale, key=key)
        mx.eval(weights[name])
    mx.save_safetensors(str(folder / "model.safetensors"), weights, metadata={"format": "mlx"})
    _write_tokenizer(folder, shape)
    return folder


def vocab_of(folder: Path) -> int:
    """The size of a model folder's vocabulary, as its config states it."""
    config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    return int(config.get("vocab_size") or config["text_config"]["vocab_size"])


def _write_tokenizer(folder: Path, shape: Shape) -> None:
    """Byte-level, and made-up words for the rest of the vocabulary, which no text is made of."""
    entries = [EOS, START, END, *sorted(ByteLevel.alphabet())]
    entries += [f"w{number}" for number in range(len(entries), shape.vocab)]
    tokenizer = Tokenizer(BPE({entry: id for id, entry in enumerate(entries)}, []))
    tokenizer.add_special_tokens([EOS, START, END])
    tokenizer.pre_tokenizer = ByteLevel(add_prefix_space=False)
    tokenizer.decoder = ByteLevelDecoder()
    tokenizer.save(str(folder / "tokenizer.json"))
    _write_json(
        folder / "tokenizer_config.json",
        {
            "tokenizer_class": "PreTrainedTokenizerFast",
            "eos_token": EOS,
            "additional_special_tokens": [START, END],
            "model_max_length": shape.context,
            "clean_up_tokenization_spaces": False,
            "chat_template": CHAT_TEMPLATE,
        },
    )


def _write_json(path: Path, value: dict[str, Any]) -> None:
    path.write_text(json.dumps(value, indent=2), encoding="utf-8")

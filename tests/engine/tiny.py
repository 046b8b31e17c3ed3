"""A tiny model with random weights and a byte-level tokenizer, written to a folder.

The folder is a real model folder: the real loaders read it, offline. The weights depend on `seed`
alone, so that two folders made with the same arguments hold the same model.
"""

from __future__ import annotations

import copy
import json
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx_lm.utils
import mlx_vlm.utils
from mlx.utils import tree_flatten
from tokenizers import Tokenizer
from tokenizers.decoders import ByteLevel as ByteLevelDecoder
from tokenizers.models import BPE
from tokenizers.pre_tokenizers import ByteLevel
from tokenizers.processors import TemplateProcessing
from tokenizers.trainers import BpeTrainer

BOS, EOS, START, END = "<|bos|>", "<|eos|>", "<|start|>", "<|end|>"
BOS_ID, EOS_ID, START_ID, END_ID = range(4)
VOCAB_SIZE = 300

CHAT_TEMPLATE = (
    "{{ bos_token }}"
    "{% for message in messages %}"
    "<|start|>{{ message.role }}\n{{ message.content }}<|end|>\n"
    "{% endfor %}"
    "{% if add_generation_prompt %}<|start|>assistant\n{% endif %}"
)
CORPUS = [
    "the quick brown fox jumps over the lazy dog while the rain in spain stays in the plain",
    "user assistant system what is the capital of france the capital of france is paris",
]


def make_tiny_model(
    folder: Path,
    *,
    seed: int = 0,
    hidden_size: int = 64,
    layers: int = 2,
    context_length: int = 512,
    scale: float = 3.0,
    config: dict[str, Any] | None = None,
) -> Path:
    """Writes weights (float32), configs and tokenizer into `folder`, and returns it.

    scale   of the output layer: the larger, the further apart are the logits of two ids
    config  entries that replace or join those of config.json; model_type chooses another
            architecture of mlx-lm than llama
    """
    folder.mkdir(parents=True, exist_ok=True)
    settings = {
        "model_type": "llama",
        "architectures": ["LlamaForCausalLM"],
        "hidden_size": hidden_size,
        "num_hidden_layers": layers,
        "intermediate_size": 2 * hidden_size,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "rms_norm_eps": 1e-5,
        "vocab_size": VOCAB_SIZE,
        "max_position_embeddings": context_length,
        "tie_word_embeddings": False,
        "bos_token_id": BOS_ID,
        "eos_token_id": EOS_ID,
        "torch_dtype": "float32",
    } | (config or {})
    write_network(folder, settings, seed=seed, scale=scale)
    _write_json(folder / "generation_config.json", {"eos_token_id": [EOS_ID, END_ID]})
    _write_tokenizer(folder, context_length)
    return folder


def write_network(
    folder: Path, settings: dict[str, Any], *, seed: int = 0, scale: float = 3.0
) -> Path:
    """Writes config.json and random weights, and returns the folder."""
    folder.mkdir(parents=True, exist_ok=True)
    _write_json(folder / "config.json", settings)
    weights = {}
    for number, (name, array) in enumerate(sorted(tree_flatten(_network(settings).parameters()))):
        head = "lm_head" in name
        if head and settings.get("tie_word_embeddings"):
            continue
        key = mx.random.key((seed << 32) + number)
        if array.ndim > 1:
            spread = array.shape[-1] ** -0.5 * (scale if head else 1.5)
            weights[name] = mx.random.normal(array.shape, key=key) * spread
        elif name.endswith(".bias"):
            weights[name] = mx.random.normal(array.shape, key=key) * 0.1
        elif name.endswith("norm.weight"):
            weights[name] = mx.ones(array.shape)
        else:
            weights[name] = mx.random.uniform(0.5, 1.0, array.shape, key=key)
    mx.save_safetensors(str(folder / "model.safetensors"), weights, metadata={"format": "mlx"})
    return folder


def _network(settings: dict[str, Any]) -> Any:
    """The network of a config: mlx-lm's, or if it has a tower for images mlx-vlm's."""
    settings = copy.deepcopy(settings)
    if "vision_config" not in settings:
        model, arguments = mlx_lm.utils._get_classes(settings)
        return model(arguments.from_dict(settings))
    library, _ = mlx_vlm.utils.get_model_and_args(settings)
    settings.setdefault("text_config", {})
    config = library.ModelConfig.from_dict(settings)
    parts = ["text", "vision", "projector"]
    return library.Model(mlx_vlm.utils.update_module_configs(config, library, settings, parts))


def _write_tokenizer(folder: Path, context_length: int) -> None:
    tokenizer = Tokenizer(BPE())
    tokenizer.pre_tokenizer = ByteLevel(add_prefix_space=False)
    tokenizer.decoder = ByteLevelDecoder()
    trainer = BpeTrainer(
        vocab_size=VOCAB_SIZE,
        special_tokens=[BOS, EOS, START, END],
        initial_alphabet=ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(CORPUS, trainer)
    # As llama does: raw text gets a BOS from the tokenizer, and a chat from its template.
    tokenizer.post_processor = TemplateProcessing(
        single=f"{BOS} $A", special_tokens=[(BOS, BOS_ID)]
    )
    tokenizer.save(str(folder / "tokenizer.json"))
    _write_json(
        folder / "tokenizer_config.json",
        {
            "tokenizer_class": "PreTrainedTokenizerFast",
            "bos_token": BOS,
            "eos_token": EOS,
            "additional_special_tokens": [START, END],
            "model_max_length": context_length,
            "clean_up_tokenization_spaces": False,
            "chat_template": CHAT_TEMPLATE,
        },
    )


def _write_json(path: Path, value: dict[str, Any]) -> None:
    path.write_text(json.dumps(value, indent=2), encoding="utf-8")

"""Finds and loads a model, and reads from its files what the asyncio side must know of it."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx_lm.utils
from huggingface_hub import snapshot_download

from mlxq.protocol.errors import MlxqError
from mlxq.worker.engine.fingerprint import fingerprint
from mlxq.worker.engine.request import ModelInfo

NO_LIMIT = 2**31 - 1
"""Context length of a model that states none, such as a recurrent one."""

_FILES = ["*.json", "*.jinja", "*.txt", "model*.safetensors", "tokenizer.model", "*.tiktoken"]
_CONTEXT_KEYS = ("max_position_embeddings", "n_positions", "max_sequence_length", "seq_length")


class ModelError(MlxqError):
    """The model cannot be found, read or run; the message is one line."""


@dataclass(frozen=True, slots=True)
class LoadedModel:
    """`network(ids (rows, length), cache=...)` gives logits (rows, length, vocabulary)."""

    network: Any
    info: ModelInfo


def load_model(source: str) -> LoadedModel:
    """Loads a text model with mlx-lm, on the calling thread, which must be the one that runs it.

    source is a local folder or a hub name. Code that comes with a model is never run; the
    tokenizer is not loaded. Raises ModelError.
    """
    folder = find_model(source)
    try:
        network, config = mlx_lm.utils.load_model(folder)
        # Shapes are known before anything is computed: this costs no forward pass.
        vocab_size: int = network(mx.zeros((1, 1), mx.int32)).shape[-1]
        info = ModelInfo(
            name=folder.name if Path(source).expanduser().is_dir() else source,
            path=str(folder),
            fingerprint=fingerprint(folder),
            vocab_size=vocab_size,
            context_length=context_length(folder, config),
            eos_ids=eos_ids(folder),
        )
    except Exception as error:
        raise ModelError(f"cannot load the model in {folder}: {one_line(error)}") from error
    return LoadedModel(network, info)


def find_model(source: str) -> Path:
    """The folder of a model: `source` itself, or the hub's snapshot of it, fetched if need be."""
    folder = Path(source).expanduser()
    if folder.is_dir():
        if not (folder / "config.json").is_file():
            raise ModelError(f"{source} is no model folder: it has no config.json")
        return folder.resolve()
    if source.startswith(("/", ".", "~")):
        raise ModelError(f"{source} is no folder")
    try:
        return Path(snapshot_download(source, allow_patterns=_FILES))
    except Exception as error:
        raise ModelError(
            f"{source} is neither a folder nor a model the hub gave us: {one_line(error)}"
        ) from error


def context_length(folder: Path, config: dict[str, Any]) -> int:
    """Most positions of a row: what the config states, else the tokenizer, else NO_LIMIT."""
    for part in (config, config.get("text_config") or {}):
        for key in _CONTEXT_KEYS:
            if isinstance(part.get(key), int):
                return int(part[key])
    stated = _read_json(folder / "tokenizer_config.json").get("model_max_length")
    # Tokenizers without a limit state 1e30.
    return int(stated) if stated is not None and stated < NO_LIMIT else NO_LIMIT


def eos_ids(folder: Path) -> frozenset[int]:
    """Every id that ends an output, after any of the files that may state one.

    They often name different ones: the config the end of a text, the others that of a chat turn.
    """
    config = _read_json(folder / "config.json")
    text_config = config.get("text_config") or {}
    found: set[int] = set()
    for part in (_read_json(folder / "generation_config.json"), config, text_config):
        stated = part.get("eos_token_id")
        found.update(stated if isinstance(stated, list) else [] if stated is None else [stated])
    token = _read_json(folder / "tokenizer_config.json").get("eos_token")
    if token is not None:
        text = token["content"] if isinstance(token, dict) else token
        found.update(id for id, content in _added_tokens(folder) if content == text)
    return frozenset(found)


def _added_tokens(folder: Path) -> Iterator[tuple[int, str]]:
    """Special tokens and their ids, from either of the two files that may list them."""
    listed = _read_json(folder / "tokenizer_config.json").get("added_tokens_decoder") or {}
    for id, token in listed.items():
        yield int(id), token["content"]
    for token in _read_json(folder / "tokenizer.json").get("added_tokens") or []:
        yield token["id"], token["content"]


def _read_json(path: Path) -> dict[str, Any]:
    """The object in a file; an empty one if there is no such file."""
    if not path.exists():
        return {}
    value = json.loads(path.read_text(encoding="utf-8"))
    return value if isinstance(value, dict) else {}


def one_line(error: Exception) -> str:
    """An error's message for a person, whatever lines it had."""
    return " ".join((str(error) or type(error).__name__).split())[:500]

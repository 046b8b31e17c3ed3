"""Finds and loads a model, and reads from its files what the asyncio side must know of it."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import structlog
from huggingface_hub import snapshot_download
from huggingface_hub.utils import disable_progress_bars

from mlxq.protocol.errors import MlxqError
from mlxq.worker.engine.fingerprint import fingerprint
from mlxq.worker.engine.library import load_network
from mlxq.worker.engine.network import Network
from mlxq.worker.engine.request import ModelInfo

NO_LIMIT = 2**31 - 1
"""Context length of a model that states none, such as a recurrent one."""

_FILES = ["*.json", "*.jinja", "*.txt", "model*.safetensors", "tokenizer.model", "*.tiktoken"]
_CODE_FILES = ["*.py"]
_ADAPTER_FILES = ["adapter_config.json", "adapters.safetensors", "weights.safetensors"]
_CONTEXT_KEYS = ("max_position_embeddings", "n_positions", "max_sequence_length", "seq_length")

_log = structlog.get_logger()


class ModelError(MlxqError):
    """The model cannot be found, read or run; the message is one line."""


@dataclass(frozen=True, slots=True)
class LoadedModel:
    """A network and what must be known of it."""

    network: Network
    info: ModelInfo


class Source(NamedTuple):
    """Which model, and how to load it.

    model              local folder or hub name
    adapter            the same of LoRA weights on top of it; "": none
    revision           branch, tag or commit of the model on the hub; "": the newest
    trust_remote_code  whether code that comes with the model may run
    """

    model: str
    adapter: str = ""
    revision: str = ""
    trust_remote_code: bool = False


def load_model(source: Source | str) -> LoadedModel:
    """Loads a model on the calling thread, which must be the one that runs it.

    Of a multimodal model only the language part is loaded. The tokenizer is not. A plain string is
    the model of a Source. Raises ModelError.
    """
    model, adapter, revision, trusted = source if isinstance(source, Source) else Source(source)
    folder = find(model, "config.json", _FILES + _CODE_FILES if trusted else _FILES, revision)
    adapted = find(adapter, "adapter_config.json", _ADAPTER_FILES) if adapter else None
    try:
        config = _read_json(folder / "config.json")
        network, library = load_network(folder, config, adapter=adapted, trust_remote_code=trusted)
        info = ModelInfo(
            name=_name(model) + (f"+{_name(adapter)}" if adapter else ""),
            path=str(folder),
            fingerprint=fingerprint(folder, adapted),
            vocab_size=network.vocab_size,
            context_length=context_length(folder, config),
            eos_ids=eos_ids(folder),
        )
    except Exception as error:
        raise ModelError(f"cannot load the model in {folder}: {one_line(error)}") from error
    _log.info("model_read", model=info.name, library=library, layers=network.describe())
    return LoadedModel(network, info)


def find(source: str, marker: str, patterns: list[str], revision: str = "") -> Path:
    """The folder that `source` names, or the hub's snapshot of it, fetched if need be.

    marker    a file that the folder must have
    patterns  of the files to fetch
    """
    folder = Path(source).expanduser()
    if folder.is_dir():
        if revision:
            raise ModelError(f"{source} is a folder: a revision is of a model on the hub")
        if not (folder / marker).is_file():
            raise ModelError(f"{source} is no model folder: it has no {marker}")
        return folder.resolve()
    if source.startswith(("/", ".", "~")):
        raise ModelError(f"{source} is no folder")
    if not sys.stderr.isatty():
        disable_progress_bars()
    _log.info("model_fetching", source=source, revision=revision or "newest")
    try:
        return Path(snapshot_download(source, revision=revision or None, allow_patterns=patterns))
    except Exception as error:
        raise ModelError(
            f"{source} is neither a folder nor a model the hub gave us: {one_line(error)}"
        ) from error


def _name(source: str) -> str:
    folder = Path(source).expanduser()
    return folder.name if folder.is_dir() else source


def context_length(folder: Path, config: dict[str, Any]) -> int:
    """Most positions of a row: what the config states, else the tokenizer, else NO_LIMIT."""
    for part in (config, _text_config(config)):
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
    found: set[int] = set()
    for part in (_read_json(folder / "generation_config.json"), config, _text_config(config)):
        stated = part.get("eos_token_id")
        found.update(stated if isinstance(stated, list) else [] if stated is None else [stated])
    token = _read_json(folder / "tokenizer_config.json").get("eos_token")
    if token is not None:
        text = token["content"] if isinstance(token, dict) else token
        found.update(id for id, content in _added_tokens(folder) if content == text)
    return frozenset(found)


def _text_config(config: dict[str, Any]) -> dict[str, Any]:
    """What the config of a multimodal model says of its language part."""
    return config.get("text_config") or config.get("llm_config") or {}


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

"""Which of the two libraries loads a model, and what came of asking each."""

from __future__ import annotations

import importlib.util
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Literal

import mlx.core as mx
import mlx.nn as nn
import mlx_lm.utils
import mlx_vlm.utils
import structlog
from mlx.utils import tree_flatten
from mlx_vlm.trainer.peft.utils import apply_lora_layers
from rich.console import Console
from rich.progress import track

from mlxq.worker.engine.network import Network

Library = Literal["mlx-lm", "mlx-vlm"]

WRONG_IN_MLX_VLM = {
    "deepseek_v32": "the index of what to attend to has its positions interleaved",
    "gemma3_text": "quantised embeddings that are the head too are not read",
    "internlm2": "positions are doubled unless the config scales them linearly",
    "internlm3": "positions are doubled unless the config scales them linearly",
    "lfm2_moe": "experts are weighted by a softmax where the model has sigmoids",
}
"""Types that both libraries have, and what mlx-vlm gets wrong: tests/engine/test_matrix.py."""

PART_BYTES = 1 << 28
SAY_INTERVAL_S = 10.0

_log = structlog.get_logger()


def load_network(
    folder: Path,
    config: dict[str, Any],
    *,
    adapter: Path | None = None,
    trust_remote_code: bool = False,
) -> tuple[Network, Library]:
    """Loads the weights of a model's language part; those of towers beside it are never read.

    A library that cannot load the folder gives way to the other one, if that has the type too.
    Raises what the first library raised if none can.

    config   of the folder, from its config.json
    adapter  folder of LoRA weights, as either library saves them
    """
    failure: Exception | None = None
    for library in libraries(config):
        try:
            network = _load(library, folder, adapter, trust_remote_code)
            _read_weights(network.model)
        except Exception as error:
            _log.warning("library_failed", library=library, error=str(error)[:500])
            failure = failure or error
        else:
            return network, library
    assert failure is not None
    raise failure


def libraries(config: dict[str, Any]) -> list[Library]:
    """The libraries that may load a model of this config, the preferred one first.

    mlx-vlm, for the prefix cache knows its KV caches; mlx-lm for what mlx-vlm lacks or gets wrong,
    and for code that comes with the model, which mlx-vlm would run unasked.
    """
    kind = mlx_vlm.utils.get_model_type(config) or ""
    wrong = kind in WRONG_IN_MLX_VLM or (kind == "gemma3" and _has_another_base(config))
    if config.get("model_file") or wrong or not _in_mlx_vlm(kind):
        return ["mlx-lm"]
    return ["mlx-vlm", "mlx-lm"]


def _has_another_base(config: dict[str, Any]) -> bool:
    """Of Gemma 3, mlx-vlm takes the usual base of the positions for any that the config states."""
    return bool((config.get("text_config") or {}).get("rope_theta", 1e6) != 1e6)


def _in_mlx_vlm(kind: str) -> bool:
    return kind.isidentifier() and importlib.util.find_spec(f"mlx_vlm.models.{kind}") is not None


def _load(library: Library, folder: Path, adapter: Path | None, trust_remote_code: bool) -> Network:
    """The network with its weights still unread, so that a failure here costs little."""
    if library == "mlx-lm":
        model, _ = mlx_lm.utils.load_model(folder, lazy=True, trust_remote_code=trust_remote_code)
        language = model
    else:
        model = mlx_vlm.utils.load_model(folder, lazy=True)
        language = model.language_model
    if adapter is not None:
        _apply(adapter, model, language)
    return Network(language)


def _apply(adapter: Path, model: nn.Module, language: nn.Module) -> None:
    """Adds LoRA layers. An adapter that does not fit raises: it must not do nothing in silence.

    mlx-vlm names tensors from the whole model on, mlx-lm from the language part on.
    """
    files = [adapter / "adapters.safetensors", adapter / "weights.safetensors"]
    file = next((file for file in files if file.is_file()), files[0])
    names = {str(name) for name in dict(mx.load(str(file)))}  # type: ignore[arg-type]
    if any(name.startswith("language_model.") for name in names):
        apply_lora_layers(model, file)
        if unknown := names - {name for name, _ in tree_flatten(model.parameters())}:
            raise ValueError(f"the adapter does not fit the model: {sorted(unknown)[:3]}")
    else:
        mlx_lm.utils.load_adapters(language, str(adapter))
    model.eval()


def _read_weights(language: nn.Module) -> None:
    """Reads the weights into memory, part by part."""
    parts: list[list[mx.array]] = [[]]
    part_bytes = 0
    for _, array in tree_flatten(language.parameters()):
        if part_bytes > PART_BYTES:
            parts.append([])
            part_bytes = 0
        parts[-1].append(array)
        part_bytes += array.nbytes
    for part in _telling(parts):
        mx.eval(part)


def _telling(parts: list[list[mx.array]]) -> Iterator[list[mx.array]]:
    """The parts; how far it is shows as a bar on a terminal, in service as a line now and then."""
    if sys.stderr.isatty():
        yield from track(parts, "loading", console=Console(stderr=True), transient=True)
        return
    said_s = time.monotonic()
    for number, part in enumerate(parts, 1):
        yield part
        if time.monotonic() - said_s > SAY_INTERVAL_S:
            said_s = time.monotonic()
            _log.info("model_loading", percent=100 * number // len(parts))

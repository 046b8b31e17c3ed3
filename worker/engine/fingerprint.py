"""The fingerprint of a model folder: do two workers hold the same model?"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator
from pathlib import Path

_SAMPLE_BYTES = 1024


def fingerprint(folder: Path, adapter: Path | None = None) -> str:
    """16 hex digits, from the files alone; costs one small read per tensor.

    Covers config.json, the tokenizer's vocabulary files, and of every tensor its name, type, shape
    and 1 KiB from its middle: a fine-tune has the names and shapes of its base, but not its bytes.
    How the tensors are ordered and spread over files makes no difference. Not covered: weights
    that differ outside the samples only, the chat template, generation defaults.

    adapter  folder of LoRA weights on top: another model
    """
    digest = hashlib.sha256()
    files = [folder / name for name in ("config.json", "tokenizer.json", "tokenizer.model")]
    weights = list(folder.glob("model*.safetensors"))
    if adapter is not None:
        files.append(adapter / "adapter_config.json")
        weights += adapter.glob("*.safetensors")
    for path in files:
        content = path.read_bytes() if path.exists() else b""
        digest.update(f"{path.name} {len(content)}\n".encode())
        digest.update(content)
    tensors: dict[str, bytes] = {}
    for path in weights:
        tensors.update(_tensors(path))
    for name, sample in sorted(tensors.items()):
        digest.update(name.encode() + b"\n" + sample)
    return digest.hexdigest()[:16]


def _tensors(path: Path) -> Iterator[tuple[str, bytes]]:
    """Of each tensor of a safetensors file, in the order of the file: description and sample."""
    with path.open("rb") as file:
        header_bytes = int.from_bytes(file.read(8), "little")
        header = json.loads(file.read(header_bytes))
        header.pop("__metadata__", None)
        for name, entry in sorted(header.items(), key=lambda item: item[1]["data_offsets"]):
            start, end = entry["data_offsets"]
            size = min(_SAMPLE_BYTES, end - start)
            file.seek(8 + header_bytes + (start + end - size) // 2)
            yield f"{name} {entry['dtype']} {entry['shape']}", file.read(size)

"""The fingerprint of a model folder: do two workers hold the same model?"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator
from pathlib import Path

_SAMPLE_BYTES = 1024


def fingerprint(folder: Path) -> str:
    """16 hex digits, from the files alone; costs one small read per tensor.

    Covers config.json, the tokenizer's vocabulary files, and of every weight file the size, the
    header (names, types and shapes) and 1 KiB from the middle of each tensor: a fine-tune has the
    same header as its base, but not the same bytes. Not covered: weights that differ outside those
    samples only, the chat template, generation defaults. The same weights in other shards or
    another precision have another fingerprint.
    """
    digest = hashlib.sha256()
    for name in ("config.json", "tokenizer.json", "tokenizer.model"):
        path = folder / name
        content = path.read_bytes() if path.exists() else b""
        digest.update(f"{name} {len(content)}\n".encode())
        digest.update(content)
    for path in sorted(folder.glob("model*.safetensors")):
        digest.update(f"{path.name} {path.stat().st_size}\n".encode())
        for sample in _samples(path):
            digest.update(sample)
    return digest.hexdigest()[:16]


def _samples(path: Path) -> Iterator[bytes]:
    """The header of a safetensors file, then some bytes of each tensor, in file order."""
    with path.open("rb") as file:
        length = int.from_bytes(file.read(8), "little")
        header = file.read(length)
        yield header
        entries = json.loads(header)
        entries.pop("__metadata__", None)
        for start, end in sorted(entry["data_offsets"] for entry in entries.values()):
            middle = (start + end - min(_SAMPLE_BYTES, end - start)) // 2
            file.seek(8 + length + middle)
            yield file.read(min(_SAMPLE_BYTES, end - start))

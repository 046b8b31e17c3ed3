"""One file of the prefix cache: safetensors, and behind it a digest of all that is before it."""

from __future__ import annotations

import hashlib
import json
import struct
from collections.abc import Iterable
from pathlib import Path
from typing import Any, NamedTuple

import mlx.core as mx
from mlx_vlm import apc

FORMAT = "1"
"""Changes whenever older files must not be read any more."""

_DIGEST_BYTES = 32
_PIECE_BYTES = 1 << 22
_DTYPES = {
    mx.bool_: "BOOL",
    mx.uint8: "U8",
    mx.uint16: "U16",
    mx.uint32: "U32",
    mx.uint64: "U64",
    mx.int8: "I8",
    mx.int16: "I16",
    mx.int32: "I32",
    mx.int64: "I64",
    mx.float16: "F16",
    mx.bfloat16: "BF16",
    mx.float32: "F32",
}

BAD = (OSError, ValueError, TypeError, KeyError, AttributeError, IndexError, RecursionError)
"""What the bytes of a file that is not ours may raise, whoever reads them."""


class PrefixFile(NamedTuple):
    """What a file is to hold: plain bytes, so that a thread without MLX can write it."""

    header: bytes
    views: list[memoryview]

    @classmethod
    def of(cls, arrays: dict[str, mx.array], metadata: dict[str, str]) -> PrefixFile | None:
        """Evaluates the arrays, on the thread that owns them. None: a type that cannot be stored.

        Copies only what lies in pieces. While a view exists, MLX writes nothing into its buffer.
        """
        if any(array.dtype not in _DTYPES for array in arrays.values()):
            return None
        flat = [mx.contiguous(array).reshape(-1).view(mx.uint8) for array in arrays.values()]
        mx.eval(flat)
        header: dict[str, Any] = {"__metadata__": metadata | {"format": FORMAT}}
        end = 0
        for name, array in arrays.items():
            start, end = end, end + array.nbytes
            dtype = _DTYPES[array.dtype]
            header[name] = {"dtype": dtype, "shape": array.shape, "data_offsets": [start, end]}
        views = [memoryview(array) for array in flat]  # type: ignore[arg-type]  # it is a buffer
        return cls(json.dumps(header).encode(), views)

    @property
    def size(self) -> int:
        """Bytes of the file."""
        return 8 + len(self.header) + sum(map(len, self.views)) + _DIGEST_BYTES

    def write(self, path: Path) -> None:
        """Raises OSError."""
        digest = hashlib.sha256()
        with path.open("wb") as file:
            pieces: Iterable[Any] = (struct.pack("<Q", len(self.header)), self.header, *self.views)
            for piece in pieces:
                digest.update(piece)
                file.write(piece)
            file.write(digest.digest())


def describe(path: Path, namespace: str) -> dict[str, str]:
    """The metadata of a file, whose length and namespace are right. Raises one of BAD if not."""
    parsed = apc._read_safetensors_header(path)
    if parsed is None:
        raise ValueError("no header")
    entries, metadata, data_start = parsed
    end = max((entry["data_offsets"][1] for entry in entries.values()), default=0)
    if path.stat().st_size != data_start + end + _DIGEST_BYTES:
        raise ValueError("cut off")
    if (metadata["namespace"], metadata["format"]) != (namespace, FORMAT):
        raise ValueError("of another model")
    return metadata  # type: ignore[no-any-return]


def is_intact(path: Path) -> bool:
    """Whether the file is as it was written. Reads all of it. Raises OSError."""
    digest = hashlib.sha256()
    left = path.stat().st_size - _DIGEST_BYTES
    with path.open("rb") as file:
        while left > 0 and (piece := file.read(min(left, _PIECE_BYTES))):
            digest.update(piece)
            left -= len(piece)
        return file.read() == digest.digest()

"""One call for the networks of both libraries: ids and a cache in, logits out."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, MutableSequence
from typing import Any, Literal

import mlx.core as mx
import mlx.nn as nn
from mlx_lm.models import cache as lm_cache
from mlx_vlm.models import cache as vlm_cache

LayerKind = Literal["attention", "rotating", "recurrent", "composite", "other"]

_KINDS: tuple[tuple[LayerKind, tuple[type, ...]], ...] = (
    ("attention", (lm_cache.KVCache, vlm_cache.KVCache)),
    ("rotating", (lm_cache.RotatingKVCache, vlm_cache.RotatingKVCache)),
    ("recurrent", (lm_cache.ArraysCache, vlm_cache.ArraysCache)),
    ("composite", (lm_cache.CacheList, vlm_cache.CacheList)),
)


class Network:
    """`network(ids, cache)`: ids (rows, length) int32 to logits (rows, length, vocab_size).

    The cache, a list with one entry per layer, is updated in place. Whatever a row is lies in its
    cache, nothing of it on the model, so that any rows may follow each other. Engine thread only.

    model             what mlx-lm loaded, or the language model of what mlx-vlm did
    layer_kinds       of the caches, one per layer
    padding_is_exact  whether rows of different length may be prefilled side by side, padded to the
                      longest: an attention cache masks the padding, but a recurrent state takes it
                      in as input. The self-check may set it to False
    window            positions that the shortest sliding window holds; None: there is none
    dtype             of the logits
    """

    def __init__(self, model: nn.Module) -> None:
        _repair(model)
        self.model = model
        self._multi_axis_rope = hasattr(self.model, "_rope_deltas")
        empty = self.make_cache()
        self.layer_kinds = tuple(map(_kind, empty))
        leaves = list(_leaves(empty))
        kinds = set(map(_kind, leaves))
        self.padding_is_exact = kinds <= {"attention", "rotating"}
        windows = [leaf.max_size for leaf in leaves if _kind(leaf) == "rotating"]
        self.window: int | None = min(windows, default=None)
        # Shapes are known before anything is computed: this costs no forward pass.
        logits = self(mx.zeros((1, 1), mx.int32), empty)
        self.vocab_size: int = logits.shape[-1]
        self.dtype = logits.dtype

    def __call__(self, ids: mx.array, cache: MutableSequence[Any]) -> mx.array:
        arguments: dict[str, Any] = {}
        if self._multi_axis_rope:
            # These models keep the positions of the row they read last. A row of text has none.
            self.model._position_ids = None
            self.model._rope_deltas = mx.zeros((ids.shape[0], 1), mx.int32)
            arguments["rope_deltas"] = self.model._rope_deltas
        entries = list(cache)
        output = self.model(ids, cache=entries, **arguments)
        # Some models put new entries into the list they are given.
        cache[:] = entries
        logits: mx.array = getattr(output, "logits", output)
        return logits

    def make_cache(self) -> list[Any]:
        """The empty cache of one row."""
        made: list[Any] = vlm_cache.make_prompt_cache(self.model)
        return made

    def describe(self) -> str:
        """How many layers there are of each kind, such as `6 attention, 20 rotating`."""
        return ", ".join(f"{count} {kind}" for kind, count in Counter(self.layer_kinds).items())


class _GroupedMask(nn.Module):  # type: ignore[misc]  # mlx has no types
    """Attention whose scores have an axis for the heads that share a key: so must its mask.

    Without, the mask of rows of different length does not broadcast, or to the wrong axes.
    """

    def __init__(self, attention: nn.Module) -> None:
        super().__init__()
        self.attention = attention

    def __call__(self, x: mx.array, mask: mx.array | None = None, cache: Any = None) -> mx.array:
        if mask is not None and mask.ndim == 4:
            mask = mask[:, :, None]
        output: mx.array = self.attention(x, mask, cache)
        return output


def _repair(model: nn.Module) -> None:
    """Mends in place what both libraries get wrong for a batch."""
    if getattr(model, "model_type", None) == "gemma2":
        for layer in model.layers:
            attention = layer.self_attn
            if not isinstance(attention, _GroupedMask) and attention.repeats > 1:
                layer.self_attn = _GroupedMask(attention)


def _kind(cache: Any) -> LayerKind:
    for kind, types in _KINDS:
        if type(cache) in types:
            return kind
    return "other"


def _leaves(caches: Iterable[Any]) -> Iterator[Any]:
    """The caches, and instead of composite ones their parts."""
    for cache in caches:
        if _kind(cache) == "composite":
            yield from _leaves(cache.caches)
        else:
            yield cache

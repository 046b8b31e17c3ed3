"""From the parameters of a request: how its row turns logits into the next id.

Order, as in vLLM and Hugging Face: penalties, logit bias, temperature, top-k, top-p, min-p, draw.
Arrays are one row, (1, vocabulary). Nothing here waits for the device.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable

import mlx.core as mx
from mlx_lm.sample_utils import greedy_sampler

from mlxq.worker.engine.request import SamplingParams

Sampler = Callable[[mx.array], mx.array]
"""Log-probabilities (rows, vocabulary) to ids (rows,)."""

Processor = Callable[[mx.array, mx.array], mx.array]
"""All ids of the row so far (length,) and its logits (1, vocabulary) to new logits."""

greedy: Sampler = greedy_sampler
"""One object for all greedy rows: a batch whose rows share a sampler is sampled in one call."""

_COLDEST = 1e-5  # below it, dividing by the temperature overflows float32


def make_sampler(params: SamplingParams, position: int) -> Sampler:
    """The sampler of one row whose next id is the `position`-th of its output, from 0."""
    if params.temperature < _COLDEST or params.top_k == 1:
        return greedy
    return SeededSampler(params, position)


def make_processors(
    params: SamplingParams, prompt_length: int, vocab_size: int
) -> tuple[Processor, ...]:
    """The logits processors of one row; empty if its logits are taken as they are.

    What stands behind the first `prompt_length` ids of the context counts as output, so a row
    that was resumed has the penalties it had before.
    """
    processors: list[Processor] = []
    if params.repetition_penalty != 1.0:
        processors.append(_repetition_penalty(params.repetition_penalty))
    if params.presence_penalty or params.frequency_penalty:
        processors.append(
            _output_penalties(params.presence_penalty, params.frequency_penalty, prompt_length)
        )
    # An id beyond the vocabulary would write out of bounds.
    bias = {id: value for id, value in params.logit_bias.items() if 0 <= id < vocab_size}
    if bias:
        processors.append(_logit_bias(bias))
    return tuple(processors)


def fold(seed: int, position: int) -> mx.array:
    """The random key of one draw: a hash, so that near seeds and positions share nothing."""
    words = (seed % 2**64).to_bytes(8, "little") + position.to_bytes(8, "little")
    digest = hashlib.blake2b(words, digest_size=8).digest()
    key: mx.array = mx.random.key(int.from_bytes(digest, "little"))
    return key


class SeededSampler:
    """Draws the ids of one row, one call per id; the n-th depends on its logits, seed and n alone.

    So neither batch mates nor a change of worker can alter a row's output.
    """

    def __init__(self, params: SamplingParams, position: int) -> None:
        self.params = params
        self.position = position

    def __call__(self, logprobs: mx.array) -> mx.array:
        key = fold(self.params.seed, self.position)
        self.position += 1
        return mx.random.categorical(_cut(logprobs, self.params), key=key)


def _cut(logprobs: mx.array, params: SamplingParams) -> mx.array:
    """Scaled by the temperature, best at 0, with -inf for every id that was cut off."""
    scaled = logprobs.astype(mx.float32)
    scaled = (scaled - scaled.max(axis=-1, keepdims=True)) / params.temperature
    if 0 < params.top_k < scaled.shape[-1]:
        least = mx.topk(scaled, params.top_k, axis=-1).min(axis=-1, keepdims=True)
        scaled = mx.where(scaled < least, -mx.inf, scaled)
    if params.top_p < 1.0:
        ranked = -mx.sort(-scaled, axis=-1)
        mass_above = mx.cumsum(mx.softmax(ranked, axis=-1), axis=-1, inclusive=False)
        kept = mx.where(mass_above < params.top_p, ranked, mx.inf)
        scaled = mx.where(scaled < kept.min(axis=-1, keepdims=True), -mx.inf, scaled)
    if params.min_p > 0.0:
        scaled = mx.where(scaled < math.log(params.min_p), -mx.inf, scaled)
    return scaled


def _repetition_penalty(penalty: float) -> Processor:
    """Weakens every id of prompt and output (CTRL, https://arxiv.org/abs/1909.05858)."""

    def process(context: mx.array, logits: mx.array) -> mx.array:
        seen = logits[:, context]
        logits[:, context] = mx.where(seen < 0, seen * penalty, seen / penalty)
        return logits

    return process


def _output_penalties(presence: float, frequency: float, prompt_length: int) -> Processor:
    """OpenAI's penalties: of the output alone, once per id and once per occurrence."""

    def process(context: mx.array, logits: mx.array) -> mx.array:
        output = context[prompt_length:]
        if output.size == 0:
            return logits
        counts = mx.zeros(logits.shape[-1]).at[output].add(1.0)
        penalty = frequency * counts + presence * (counts > 0)
        # Back to the model's precision: a wider row would widen its batch mates too.
        return (logits - penalty).astype(logits.dtype)

    return process


def _logit_bias(bias: dict[int, float]) -> Processor:
    ids, values = mx.array(list(bias.keys())), mx.array(list(bias.values()))

    def process(context: mx.array, logits: mx.array) -> mx.array:
        return logits.at[:, ids].add(values.astype(logits.dtype))

    return process

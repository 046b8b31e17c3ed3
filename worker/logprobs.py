"""Log probabilities as the wire has them: with the text of every token, in few digits."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from mlxq.protocol.events import TokenLogprob, TopLogprob
from mlxq.worker.chat import Tokenizer
from mlxq.worker.engine.request import Logprob

# What OpenAI writes for a token that cannot come; JSON has no infinity.
LEAST: Final = -9999.0


def written(
    tokenizer: Tokenizer, ids: Sequence[int], logprobs: Sequence[Logprob]
) -> list[TokenLogprob]:
    """One entry for each of `ids`. Loop thread: it asks the tokenizer for texts."""
    text = tokenizer.token_text
    return [
        TokenLogprob(
            text(token),
            _short(logprob),
            [TopLogprob(text(other), other, _short(value)) for other, value in top] or None,
        )
        for token, (logprob, top) in zip(ids, logprobs, strict=True)
    ]


def _short(logprob: float) -> float:
    """Six significant digits: float32 has no more that mean anything."""
    return float(f"{logprob:.6g}") if logprob > LEAST else LEAST

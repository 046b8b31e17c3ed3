"""From the bytes of a spec to a request of token ids, or one readable reason why not."""

from __future__ import annotations

import zlib
from collections.abc import Callable, Collection
from dataclasses import dataclass
from typing import Final

from mlxq.protocol.errors import BadRequest, ContextOverflow
from mlxq.protocol.jobs import Job, decode_job
from mlxq.worker.chat import Tokenizer
from mlxq.worker.engine.request import ModelInfo, SamplingParams

MAX_REASON: Final = 500  # characters: a reason may quote the job, and travels in an event

# Dividing logits by less can overflow float32. Sampling there is greedy already.
_LEAST_TEMPERATURE: Final = 1e-4


@dataclass(frozen=True, slots=True)
class Admitted:
    """A job that the model can run: all its limits are checked.

    prompt      token ids, at least one; together with max_tokens they fit the context
    stop_ids    ids that end the output: the model's own, none with ignore_eos
    """

    job: Job
    prompt: list[int]
    max_tokens: int
    sampling: SamplingParams
    stops: list[str]
    stop_ids: frozenset[int]


class Admission:
    """Checks jobs against the loaded model. Lives where its tokenizer does: the loop thread."""

    def __init__(
        self, tokenizer: Tokenizer, info: ModelInfo, *, default_max_tokens: int = 1024
    ) -> None:
        self._tokenizer = tokenizer
        self._info = info
        self._default_max_tokens = default_max_tokens

    def admit(self, spec: bytes, job_id: str) -> Admitted:
        """The request that `spec` asks for.

        Raises BadRequest (or ContextOverflow, which is one) and nothing else, whatever the bytes.
        """
        try:
            job = decode_job(spec)
            prompt = self._prompt(job)
            max_tokens = self._max_tokens(job, len(prompt))
            self._check_ids("the prompt", prompt)
            self._check_ids("logit_bias", job.logit_bias)
        except BadRequest as error:
            reason = str(error)
            if len(reason) <= MAX_REASON:
                raise
            raise type(error)(f"{reason[:MAX_REASON]}...") from None
        return Admitted(
            job=job,
            prompt=prompt,
            max_tokens=max_tokens,
            sampling=self._sampling(job, job_id),
            stops=job.stops,
            stop_ids=frozenset() if job.ignore_eos else self._info.eos_ids,
        )

    def _prompt(self, job: Job) -> list[int]:
        if job.prompt_token_ids is not None:
            return job.prompt_token_ids
        if job.prompt is not None:
            prompt = self._encode(job.prompt, self._tokenizer.encode)
        else:
            text = self._tokenizer.apply_template(job.messages or [])
            prompt = self._encode(text, self._tokenizer.encode_rendered)
        if not prompt:
            raise BadRequest("the prompt is empty: it has no tokens")
        return prompt

    def _encode(self, text: str, encode: Callable[[str], list[int]]) -> list[int]:
        """Tokenises `text`, and stops early where it cannot fit: the loop waits meanwhile.

        The longest token bounds what can fit at all. Below that, ever longer beginnings are tried;
        one is too long only at twice the context, for its last tokens may be others in the whole.
        """
        context = self._info.context_length
        fits = len(text) <= context * self._tokenizer.longest_token
        size = 4 * context  # characters; most texts that fit are shorter, and read once
        while fits and size < len(text):
            fits = len(encode(text[:size])) <= 2 * context
            size *= 2
        if not fits:
            raise ContextOverflow(
                f"the prompt of {len(text)} characters does not fit the context of {context} tokens"
            )
        return encode(text)

    def _max_tokens(self, job: Job, prompt_tokens: int) -> int:
        context = self._info.context_length
        room = context - prompt_tokens
        if room < 1:
            raise ContextOverflow(
                f"the prompt of {prompt_tokens} tokens leaves no room for output "
                f"in the context of {context} tokens"
            )
        if job.max_tokens is None:
            return min(self._default_max_tokens, room)
        if job.max_tokens > room:
            raise ContextOverflow(
                f"the prompt of {prompt_tokens} tokens + max_tokens {job.max_tokens} = "
                f"{prompt_tokens + job.max_tokens} exceed the context of {context} tokens"
            )
        return job.max_tokens

    def _check_ids(self, name: str, ids: Collection[int]) -> None:
        vocab_size = self._info.vocab_size
        if ids and (largest := max(ids)) >= vocab_size:
            raise BadRequest(
                f"{name} has token id {largest}, and the vocabulary has ids below {vocab_size}"
            )

    def _sampling(self, job: Job, job_id: str) -> SamplingParams:
        return SamplingParams(
            temperature=job.temperature if job.temperature >= _LEAST_TEMPERATURE else 0.0,
            top_p=job.top_p,
            # All ranks are no cut-off; samplers raise for more ranks than ids.
            top_k=job.top_k if job.top_k < self._info.vocab_size else 0,
            min_p=job.min_p,
            repetition_penalty=job.repetition_penalty,
            presence_penalty=job.presence_penalty,
            frequency_penalty=job.frequency_penalty,
            logit_bias=job.logit_bias,
            seed=zlib.crc32(job_id.encode()) if job.seed is None else job.seed,
        )

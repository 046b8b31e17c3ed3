"""From the bytes of a spec to a request of token ids, or one readable reason why not."""

from __future__ import annotations

import zlib
from collections.abc import Callable, Collection
from dataclasses import dataclass
from typing import Final, NamedTuple

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

    prompt      token ids, at least one; together with max_tokens they fit the context and the
                KV memory
    stop_ids    ids that end the output: the model's own, unless ignore_eos, and the job's
    kv_bytes    KV memory of the whole row
    """

    job: Job
    prompt: list[int]
    max_tokens: int
    sampling: SamplingParams
    stops: list[str]
    stop_ids: frozenset[int]
    kv_bytes: int


class Admission:
    """Checks jobs against the loaded model. Lives where its tokenizer does: the loop thread."""

    def __init__(
        self, tokenizer: Tokenizer, info: ModelInfo, *, default_max_tokens: int = 1024
    ) -> None:
        self._tokenizer = tokenizer
        self._info = info
        self._default_max_tokens = default_max_tokens
        self._room = Room.of(info)

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
            self._check_ids("stop_token_ids", job.stop_token_ids)
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
            stop_ids=frozenset(job.stop_token_ids).union(
                () if job.ignore_eos else self._info.eos_ids
            ),
            kv_bytes=kv_bytes(self._info, len(prompt) + max_tokens),
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
        one is too long only at twice the room, for its last tokens may be others in the whole.
        """
        room = self._room.tokens
        fits = len(text) <= room * self._tokenizer.longest_token
        size = 4 * room  # characters; most texts that fit are shorter, and read once
        while fits and size < len(text):
            fits = len(encode(text[:size])) <= 2 * room
            size *= 2
        if not fits:
            raise ContextOverflow(
                f"the prompt of {len(text)} characters does not fit {self._room.name}"
            )
        return encode(text)

    def _max_tokens(self, job: Job, prompt_tokens: int) -> int:
        room = self._room.tokens - prompt_tokens
        if room < 1:
            raise ContextOverflow(
                f"the prompt of {prompt_tokens} tokens leaves no room for output "
                f"in {self._room.name}"
            )
        # Asked for or not: what must be made must fit.
        name, needed = "max_tokens", job.max_tokens
        if needed is None:
            name, needed = "min_tokens", job.min_tokens
        if needed > room:
            raise ContextOverflow(
                f"the prompt of {prompt_tokens} tokens + {name} {needed} = "
                f"{prompt_tokens + needed} exceed {self._room.name}"
            )
        return job.max_tokens or min(max(self._default_max_tokens, job.min_tokens), room)

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
            repetition_window=job.repetition_context_size,
            min_tokens=job.min_tokens,
            logprobs=job.top_logprobs if job.logprobs else None,
        )


class Room(NamedTuple):
    """How many positions a row can ever have here, and by whose limit."""

    tokens: int
    name: str

    @classmethod
    def of(cls, info: ModelInfo) -> Room:
        """The context of the model, or less where the KV memory ends before it."""
        context = info.context_length
        if kv_bytes(info, context) <= info.kv_budget_bytes:
            return cls(context, f"the context of {context} tokens")
        spare_bytes = max(0, info.kv_budget_bytes - info.kv_row_bytes)
        tokens = spare_bytes // max(1, info.kv_bytes_per_token)
        return cls(tokens, f"the {tokens} tokens that this worker has KV memory for")


def kv_bytes(info: ModelInfo, tokens: int) -> int:
    """KV memory of a row of so many positions."""
    return info.kv_row_bytes + tokens * info.kv_bytes_per_token

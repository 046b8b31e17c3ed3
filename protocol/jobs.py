"""The job as a submitter writes it: OpenAI chat field names, strict types, JSON.

A job is a pure function of the submitter's arguments: no clock, no random value is put in,
so that a repeated submit writes the same bytes.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Annotated, Literal

import msgspec
from msgspec import Meta, Struct

from mlxq.protocol.errors import BadRequest

Role = Literal["system", "developer", "user", "assistant", "tool"]
TokenId = Annotated[int, Meta(ge=0, lt=2**31)]
StopString = Annotated[str, Meta(min_length=1, max_length=256)]

MAX_MESSAGES = 4_096
MAX_STOPS = 16
MAX_STOP_IDS = 64
MAX_TOP_LOGPROBS = 20


class TextPart(Struct, frozen=True, forbid_unknown_fields=True, tag_field="type", tag="text"):
    """One text part of a message's content."""

    text: str


class Message(Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    """One chat message. `content` is a text or a list of text parts."""

    role: Role
    content: str | list[TextPart]
    name: str | None = None


class Job(Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True, kw_only=True):
    """What to generate and how. Exactly one of messages, prompt and prompt_token_ids is given.

    messages            chat messages, put through the model's chat template
    prompt              raw text, no template
    prompt_token_ids    ids of the model's own vocabulary
    max_tokens          most tokens to generate; None: up to 1,024 and what the context has room for
    min_tokens          no end-of-sequence token, stop token or stop string before so many tokens
    temperature         0 is greedy; 1 samples from the model's distribution
    top_p, top_k, min_p nucleus, rank (0: off) and relative-probability cut-offs
    repetition_penalty  >1 divides the logits of tokens seen in the prompt or the output
    repetition_context_size  how many of the last tokens it looks back over; 0: all of them
    presence_penalty    OpenAI: subtracted once from every token of the output so far
    frequency_penalty   OpenAI: subtracted per occurrence in the output so far
    logit_bias          added to the logits, by token id (as a string, as in the OpenAI API)
    seed                reproducible sampling; None: derived from the job id
    stop                strings that end the output; never part of the text
    stop_token_ids      ids that end the output beside the model's own; never part of it
    ignore_eos          go on past the model's end-of-sequence token (for benchmarks)
    logprobs            report the log probability of every token of the output
    top_logprobs        and of so many of the most probable tokens at its place
    cache_salt          jobs of different salts share no cached prompt prefix: one for each tenant
                        keeps them from learning by timing what others have asked
    """

    messages: Annotated[list[Message], Meta(min_length=1, max_length=MAX_MESSAGES)] | None = None
    prompt: Annotated[str, Meta(min_length=1)] | None = None
    prompt_token_ids: Annotated[list[TokenId], Meta(min_length=1)] | None = None
    max_tokens: Annotated[int, Meta(ge=1, lt=2**31)] | None = None
    min_tokens: Annotated[int, Meta(ge=0, lt=2**31)] = 0
    temperature: Annotated[float, Meta(ge=0, le=10)] = 1.0
    top_p: Annotated[float, Meta(gt=0, le=1)] = 1.0
    top_k: Annotated[int, Meta(ge=0, lt=2**31)] = 0
    min_p: Annotated[float, Meta(ge=0, le=1)] = 0.0
    repetition_penalty: Annotated[float, Meta(ge=0.01, le=10)] = 1.0
    repetition_context_size: Annotated[int, Meta(ge=0, lt=2**31)] = 0
    presence_penalty: Annotated[float, Meta(ge=-2, le=2)] = 0.0
    frequency_penalty: Annotated[float, Meta(ge=-2, le=2)] = 0.0
    logit_bias: dict[TokenId, Annotated[float, Meta(ge=-100, le=100)]] = {}
    seed: Annotated[int, Meta(ge=0, le=2**63 - 1)] | None = None
    stop: StopString | Annotated[list[StopString], Meta(max_length=MAX_STOPS)] = []
    stop_token_ids: Annotated[list[TokenId], Meta(max_length=MAX_STOP_IDS)] = []
    ignore_eos: bool = False
    logprobs: bool = False
    top_logprobs: Annotated[int, Meta(ge=0, le=MAX_TOP_LOGPROBS)] = 0
    cache_salt: Annotated[str, Meta(max_length=256)] = ""

    @property
    def stops(self) -> list[str]:
        """The stop strings as a list, whichever way they were written."""
        return [self.stop] if isinstance(self.stop, str) else self.stop


_decoder = msgspec.json.Decoder(Job)
_encoder = msgspec.json.Encoder()


def encode_job(job: Job) -> bytes:
    """JSON bytes of a checked job. Raises BadRequest for values outside the types or ranges."""
    for name in job.__struct_fields__:
        value = getattr(job, name)
        if isinstance(value, float) and not math.isfinite(value):
            raise BadRequest(f"{name} is {value}: a finite number is needed")
    try:
        spec = _encoder.encode(job)
    except (TypeError, ValueError, msgspec.MsgspecError) as error:
        raise BadRequest(str(error)) from None
    decode_job(spec)
    return spec


def decode_job(spec: bytes | str) -> Job:
    """The job in `spec`. Raises BadRequest with a readable message; nothing else."""
    try:
        job = _decoder.decode(spec)
    except (msgspec.MsgspecError, UnicodeError, RecursionError) as error:
        reason = str(error)
        if reason.endswith(".type`"):  # of a content part: nothing else has a type
            reason += ": only text parts are supported"
        raise BadRequest(reason) from None
    given = [
        name
        for name, value in (
            ("messages", job.messages),
            ("prompt", job.prompt),
            ("prompt_token_ids", job.prompt_token_ids),
        )
        if value is not None
    ]
    if len(given) != 1:
        found = " and ".join(given) or "none"
        raise BadRequest(f"give exactly one of messages, prompt, prompt_token_ids; found {found}")
    if job.max_tokens is not None and job.min_tokens > job.max_tokens:
        raise BadRequest(f"min_tokens {job.min_tokens} is more than max_tokens {job.max_tokens}")
    if job.top_logprobs and not job.logprobs:
        raise BadRequest(f"top_logprobs {job.top_logprobs} needs logprobs: true")
    return job


def text_of(content: str | Sequence[TextPart]) -> str:
    """A message's content as one text."""
    return content if isinstance(content, str) else "".join(part.text for part in content)

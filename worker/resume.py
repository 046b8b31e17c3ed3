"""Takes up a job where an earlier attempt stopped: its transcript is its checkpoint."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import msgspec
from redis.asyncio import Redis as AsyncRedis

from mlxq.protocol.errors import MlxqError
from mlxq.protocol.events import Resumed, Started, Token, TokenLogprob, decode_event
from mlxq.protocol.scripts import Taken
from mlxq.worker.chat import Tokenizer
from mlxq.worker.link import decoded
from mlxq.worker.output import OutputStage

PAGE = 1000


class CannotResume(MlxqError):
    """The transcript and the job hash, or the transcript and this worker, contradict."""


@dataclass(frozen=True, slots=True)
class Transcript:
    """What the earlier attempts stored: ids, text, and the model of the last of them.

    logprobs    one for each id, if the job asked for them
    """

    ids: list[int]
    text: str
    model: str
    logprobs: list[TokenLogprob]


async def read_transcript(client: AsyncRedis, key: str, taken: Taken) -> Transcript:
    """All events before this attempt.

    Raises CannotResume if their number is not `taken.seq`, or one of them is damaged.
    """
    ids: list[int] = []
    texts: list[str] = []
    logprobs: list[TokenLogprob] = []
    model = ""
    count = 0
    start = "-"
    while count < taken.seq:
        page: Any = await client.xrange(key, start, f"({taken.attempt}-0", count=PAGE)
        if not page:
            break
        for entry_id, fields in page:
            try:
                event = decode_event(fields[b"e"])
            except (KeyError, msgspec.MsgspecError) as error:
                raise CannotResume(f"event {decoded(entry_id)} is damaged: {error}") from None
            count += 1
            if isinstance(event, Token):
                ids += event.ids
                texts.append(event.text)
                logprobs += event.logprobs or ()
            elif isinstance(event, Started | Resumed):
                model = event.model
        start = f"({decoded(page[-1][0])}"
    if count != taken.seq:
        raise CannotResume(f"transcript has {count} events, the job says {taken.seq}")
    return Transcript(ids, "".join(texts), model, logprobs)


def rebuild(
    transcript: Transcript, stage: OutputStage, tokenizer: Tokenizer, fingerprint: str
) -> tuple[list[int], int]:
    """Feeds a fresh output stage with what is stored.

    Returns the ids generated so far in this model's vocabulary, and how many characters of what
    the stage emits next are published already. Raises CannotResume if the texts contradict.
    """
    if transcript.model == fingerprint:
        for token in transcript.ids:
            stage.feed([token])
        if stage.text != transcript.text:
            raise CannotResume("the stored ids do not decode to the stored text")
        return transcript.ids, 0
    ids = tokenizer.encode_continuation(transcript.text)
    stage.feed(ids)
    if not transcript.text.startswith(stage.text):
        raise CannotResume("this model's tokenizer cannot reproduce the stored text")
    return ids, len(transcript.text) - len(stage.text)

"""One fixed value for each event and job type; golden/NAME.json holds its exact bytes."""

from __future__ import annotations

from mlxq.protocol.events import (
    Done,
    Event,
    Failed,
    Requeued,
    Result,
    Resumed,
    Started,
    Timings,
    Token,
    TokenLogprob,
    TopLogprob,
    Usage,
)
from mlxq.protocol.jobs import Job, Message, TextPart

USAGE = Usage(prompt_tokens=12, completion_tokens=57)
TIMINGS = Timings(first_token_s=0.25, total_s=1.5)
LOGPROBS = [
    TokenLogprob("h", -0.5),
    TokenLogprob("m", -1.25, [TopLogprob("n", 78, -0.75), TopLogprob("m", 77, -1.25)]),
]

EVENTS: dict[str, Event] = {
    "started": Started(attempt=1, worker="mac1", model="a1b2c3d4", prompt_tokens=12),
    "started_cached": Started(
        attempt=1, worker="mac1", model="a1b2c3d4", prompt_tokens=12, cached_tokens=8
    ),
    "resumed": Resumed(attempt=2, worker="mac2", model="a1b2c3d4", tokens=57),
    "resumed_cached": Resumed(
        attempt=2, worker="mac2", model="a1b2c3d4", tokens=57, cached_tokens=64
    ),
    "token": Token(text=' the "é"\n', ids=[262, 198]),
    "token_without_text": Token(text="", ids=[172]),
    "token_channel": Token(text="hm", ids=[23], channel="reasoning"),
    "token_logprobs": Token(text="hm", ids=[72, 77], logprobs=LOGPROBS),
    "requeued": Requeued(reason="drain"),
    "done": Done(finish_reason="stop", attempts=2, usage=USAGE, timings=TIMINGS),
    "done_cached": Done(
        finish_reason="length", attempts=1, usage=Usage(12, 57, 8), timings=TIMINGS
    ),
    "done_aborted": Done(finish_reason="aborted", attempts=2, usage=Usage(completion_tokens=57)),
    "failed": Failed(
        code="bad_request", message="max_tokens is 0", attempts=1, usage=Usage(prompt_tokens=12)
    ),
    "failed_retryable": Failed(
        code="deadline_exceeded", message="too late", retryable=True, attempts=1
    ),
}

JOBS: dict[str, Job] = {
    "job_messages": Job(
        messages=[
            Message(role="system", content="Be brief."),
            Message(role="user", content=[TextPart(text="Hi")], name="ann"),
        ],
        max_tokens=64,
        temperature=0.7,
        seed=7,
    ),
    "job_prompt": Job(prompt="Hi"),
    "job_token_ids": Job(prompt_token_ids=[1, 2, 3], ignore_eos=True, stop="\n\n"),
    "job_everything": Job(
        prompt="é",
        max_tokens=1,
        min_tokens=1,
        temperature=0.0,
        top_p=0.5,
        top_k=40,
        min_p=0.05,
        repetition_penalty=1.25,
        repetition_context_size=64,
        presence_penalty=-2.0,
        frequency_penalty=2.0,
        logit_bias={50256: -100.0},
        seed=2**63 - 1,
        stop=["a", "b"],
        stop_token_ids=[7],
        ignore_eos=True,
        logprobs=True,
        top_logprobs=20,
        cache_salt="tenant-1",
    ),
}

RESULTS: dict[str, Result] = {
    "result": Result(
        text="Paris.", token_ids=[6342, 30], finish_reason="stop", usage=USAGE, timings=TIMINGS
    ),
    "result_logprobs": Result(
        text="hm",
        token_ids=[72, 77],
        finish_reason="length",
        usage=USAGE,
        timings=TIMINGS,
        logprobs=LOGPROBS,
    ),
}

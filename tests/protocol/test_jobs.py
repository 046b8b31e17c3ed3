"""Bad jobs: BadRequest with a message that names what is wrong, and nothing else is ever raised."""

from __future__ import annotations

import json
import math
from typing import Any

import pytest
from hypothesis import given, strategies as st

from mlxq.protocol.errors import BadRequest
from mlxq.protocol.jobs import Job, Message, TextPart, decode_job, encode_job, text_of

USER = {"role": "user", "content": "Hi"}

BAD: list[tuple[str, Any, str]] = [
    ("unknown field", {"prompt": "a", "max_token": 5}, "unknown field `max_token`"),
    ("wrong type", {"prompt": 5}, r"got `int` - at `\$.prompt`"),
    ("number as text", {"prompt": "a", "max_tokens": "5"}, r"got `str` - at `\$.max_tokens`"),
    ("bool as number", {"prompt": "a", "max_tokens": True}, r"at `\$.max_tokens`"),
    ("nothing to do", {}, "exactly one of messages, prompt, prompt_token_ids; found none"),
    ("two prompts", {"prompt": "a", "messages": [USER]}, "found messages and prompt"),
    ("empty prompt", {"prompt": ""}, r"length >= 1 - at `\$.prompt`"),
    ("empty ids", {"prompt_token_ids": []}, r"length >= 1 - at `\$.prompt_token_ids`"),
    ("max_tokens 0", {"prompt": "a", "max_tokens": 0}, r">= 1 - at `\$.max_tokens`"),
    ("max_tokens negative", {"prompt": "a", "max_tokens": -1}, r">= 1 - at `\$.max_tokens`"),
    ("max_tokens huge", {"prompt": "a", "max_tokens": 10**30}, r"at `\$.max_tokens`"),
    ("temperature -1", {"prompt": "a", "temperature": -1}, r">= 0.0 - at `\$.temperature`"),
    ("temperature null", {"prompt": "a", "temperature": None}, r"at `\$.temperature`"),
    ("top_p 0", {"prompt": "a", "top_p": 0}, r"> 0.0 - at `\$.top_p`"),
    ("top_p 2", {"prompt": "a", "top_p": 2}, r"<= 1.0 - at `\$.top_p`"),
    ("min_p 2", {"prompt": "a", "min_p": 2}, r"at `\$.min_p`"),
    ("repetition 0", {"prompt": "a", "repetition_penalty": 0}, r"at `\$.repetition_penalty`"),
    ("presence 3", {"prompt": "a", "presence_penalty": 3}, r"at `\$.presence_penalty`"),
    ("token id -1", {"prompt_token_ids": [1, -1]}, r">= 0 - at `\$.prompt_token_ids\[1\]`"),
    ("token id text", {"prompt_token_ids": ["a"]}, r"got `str` - at `\$.prompt_token_ids\[0\]`"),
    ("token id fraction", {"prompt_token_ids": [1.5]}, r"at `\$.prompt_token_ids\[0\]`"),
    ("token id huge", {"prompt_token_ids": [2**31]}, r"at `\$.prompt_token_ids\[0\]`"),
    ("unknown role", {"messages": [{"role": "boss", "content": "x"}]}, r"'boss' .*\[0\].role"),
    ("no messages", {"messages": []}, r"length >= 1 - at `\$.messages`"),
    ("too many messages", {"messages": [USER] * 4_097}, r"at `\$.messages`"),
    ("no content", {"messages": [{"role": "user"}]}, "required field `content`"),
    (
        "image part",
        {"messages": [{"role": "user", "content": [{"type": "image_url"}]}]},
        r"'image_url' - at `\$.messages\[0\].content\[0\].type`",
    ),
    ("empty stop", {"prompt": "a", "stop": [""]}, r"at `\$.stop\[0\]`"),
    ("17 stops", {"prompt": "a", "stop": ["x"] * 17}, r"at `\$.stop`"),
    ("long stop", {"prompt": "a", "stop": "x" * 257}, r"at `\$.stop`"),
    ("min_tokens -1", {"prompt": "a", "min_tokens": -1}, r"at `\$.min_tokens`"),
    (
        "min over max",
        {"prompt": "a", "min_tokens": 3, "max_tokens": 2},
        "min_tokens 3 is more than max_tokens 2",
    ),
    ("21 top_logprobs", {"prompt": "a", "logprobs": True, "top_logprobs": 21}, r"<= 20 - at"),
    ("top alone", {"prompt": "a", "top_logprobs": 2}, "top_logprobs 2 needs logprobs: true"),
    ("logprobs 5", {"prompt": "a", "logprobs": 5}, r"at `\$.logprobs`"),
    ("window -1", {"prompt": "a", "repetition_context_size": -1}, r"_context_size`"),
    ("65 stop ids", {"prompt": "a", "stop_token_ids": [1] * 65}, r"at `\$.stop_token_ids`"),
    ("stop id -1", {"prompt": "a", "stop_token_ids": [-1]}, r"at `\$.stop_token_ids\[0\]`"),
    ("long salt", {"prompt": "a", "cache_salt": "x" * 257}, r"at `\$.cache_salt`"),
    ("seed -1", {"prompt": "a", "seed": -1}, r"at `\$.seed`"),
    ("bias of a word", {"prompt": "a", "logit_bias": {"the": 1}}, r"`\$.logit_bias`"),
    ("bias 101", {"prompt": "a", "logit_bias": {"1": 101}}, r"`\$.logit_bias"),
    ("a list", [], "got `array`"),
    ("a text", "Hi", "got `str`"),
    ("null", None, "got `null`"),
]


@pytest.mark.parametrize(("spec", "message"), [case[1:] for case in BAD], ids=[c[0] for c in BAD])
def test_a_bad_job_is_a_readable_bad_request(spec: Any, message: str) -> None:
    with pytest.raises(BadRequest, match=message) as caught:
        decode_job(json.dumps(spec))
    assert caught.value.code == "bad_request"
    assert len(str(caught.value)) < 200


@pytest.mark.parametrize(
    "spec",
    [
        b"",
        b"{",
        b"not JSON",
        b'{"prompt":"a"} {}',
        b'{"prompt":"a","temperature":NaN}',
        b'{"prompt":"a","temperature":1e999}',
        b'{"prompt":"\xff"}',
        b'{"prompt":"\\ud800"}',
        b'{"prompt":' + b"[" * 100_000,
    ],
    ids=lambda spec: repr(spec[:20]),
)
def test_what_is_not_json_is_a_bad_request(spec: bytes) -> None:
    with pytest.raises(BadRequest) as caught:
        decode_job(spec)
    assert 10 < len(str(caught.value)) < 200


@given(st.binary(max_size=200))
def test_no_bytes_raise_anything_else(spec: bytes) -> None:
    try:
        decode_job(spec)
    except BadRequest:
        return


@pytest.mark.parametrize(
    ("job", "message"),
    [
        (Job(prompt="a", temperature=math.nan), "temperature is nan: a finite number"),
        (Job(prompt="a", top_p=math.inf), "top_p is inf"),
        (Job(prompt="a", temperature=-1), r"at `\$.temperature`"),
        (Job(prompt="a", logit_bias={1: math.nan}), r"`\$.logit_bias"),
        (Job(prompt="\ud800"), "surrogates"),
        (Job(prompt=5), r"at `\$.prompt`"),  # type: ignore[arg-type]
        (Job(prompt="a", stop=object()), "unsupported"),  # type: ignore[arg-type]
        (Job(), "found none"),
    ],
)
def test_a_bad_job_is_refused_before_it_is_sent(job: Job, message: str) -> None:
    with pytest.raises(BadRequest, match=message):
        encode_job(job)


def test_a_large_prompt_is_sound_here() -> None:
    """Its size is for ENQUEUE (`max_bytes`) and for the model's context to refuse."""
    spec = encode_job(Job(prompt="x" * 10_000_000))
    assert len(decode_job(spec).prompt or "") == 10_000_000


def test_the_same_arguments_are_the_same_bytes() -> None:
    job = Job(messages=[Message(role="user", content="Hi")], logit_bias={2: 1.0, 1: 2.0})
    again = Job(messages=[Message(role="user", content="Hi")], logit_bias={2: 1.0, 1: 2.0})
    assert encode_job(job) == encode_job(again)


def test_stops_and_contents_are_read_either_way() -> None:
    assert Job(prompt="a", stop="x").stops == ["x"]
    assert Job(prompt="a", stop=["x", "y"]).stops == ["x", "y"]
    assert Job(prompt="a").stops == []
    assert text_of("ab") == "ab"
    assert text_of([TextPart(text="a"), TextPart(text="b")]) == "ab"

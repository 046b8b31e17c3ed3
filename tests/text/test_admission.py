"""Every job is admitted within its limits or refused with one readable reason."""

from __future__ import annotations

import json
import zlib
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import example, given, strategies as st

from mlxq.protocol.errors import BadRequest, ContextOverflow
from mlxq.protocol.jobs import MAX_MESSAGES, MAX_STOPS
from mlxq.worker.admission import MAX_REASON, Admission, Admitted
from mlxq.worker.engine.request import ModelInfo, SamplingParams
from tests.text.samples import sample

CONTEXT = 64
TOKENIZER, INNER = sample("byte_level")
VOCABULARY = len(INNER)
EOS = frozenset({INNER.eos_token_id})
INFO = ModelInfo(
    name="sample",
    path="sample",
    fingerprint="sample",
    vocab_size=VOCABULARY,
    context_length=CONTEXT,
    eos_ids=EOS,
)
ADMISSION = Admission(TOKENIZER, INFO)
USER = {"role": "user", "content": "hello"}


def admit(job_id: str = "job-1", /, **job: Any) -> Admitted:
    return ADMISSION.admit(json.dumps(job).encode(), job_id)


def test_the_three_forms_of_a_prompt() -> None:
    assert admit(prompt="ab the").prompt == TOKENIZER.encode("ab the")
    assert admit(prompt_token_ids=[5, 0, VOCABULARY - 1]).prompt == [5, 0, VOCABULARY - 1]
    assert INNER.decode(admit(messages=[USER]).prompt) == (
        "<|im_start|>user\nhello<|im_end|>\n<|im_start|>assistant\n"
    )


def test_defaults() -> None:
    admitted = admit(prompt="ab")
    assert admitted.sampling == SamplingParams(seed=zlib.crc32(b"job-1"))
    assert (admitted.stops, admitted.stop_ids) == ([], EOS)
    assert admitted.job.prompt == "ab"


def test_all_that_a_job_says_is_passed_on() -> None:
    sampling: dict[str, Any] = {
        "temperature": 0.5,
        "top_p": 0.9,
        "top_k": 40,
        "min_p": 0.1,
        "repetition_penalty": 1.1,
        "presence_penalty": -1.0,
        "frequency_penalty": 2.0,
        "seed": 7,
        "min_tokens": 2,
    }
    others = {"repetition_context_size": 9, "logprobs": True, "top_logprobs": 3, "cache_salt": "t"}
    admitted = admit(prompt="ab", logit_bias={"3": -100, "4": 0.5}, **sampling, **others)
    sampling |= {"repetition_window": 9, "logprobs": 3}
    assert admitted.sampling == SamplingParams(logit_bias={3: -100.0, 4: 0.5}, **sampling)
    assert admitted.job.cache_salt == "t"
    assert admit(prompt="ab", logprobs=True).sampling.logprobs == 0


def test_seed_follows_from_the_job_id_alone() -> None:
    assert admit("a", prompt="x").sampling.seed == admit("a", prompt="y").sampling.seed
    assert admit("a", prompt="x").sampling.seed != admit("b", prompt="x").sampling.seed
    assert admit("a", prompt="x", seed=0).sampling.seed == 0


def test_sampling_values_that_mean_greedy_or_no_cut_off() -> None:
    assert admit(prompt="ab", temperature=1e-300).sampling.greedy
    assert not admit(prompt="ab", temperature=0.01).sampling.greedy
    assert admit(prompt="ab", top_k=VOCABULARY - 1).sampling.top_k == VOCABULARY - 1
    assert admit(prompt="ab", top_k=VOCABULARY).sampling.top_k == 0
    assert admit(prompt="ab", top_k=2**31 - 1).sampling.top_k == 0


def test_stops() -> None:
    assert admit(prompt="ab", stop="x").stops == ["x"]
    assert admit(prompt="ab", stop=["x", "yz"]).stops == ["x", "yz"]
    assert admit(prompt="ab", ignore_eos=True).stop_ids == frozenset()
    assert admit(prompt="ab", stop_token_ids=[3]).stop_ids == EOS | {3}
    assert admit(prompt="ab", stop_token_ids=[3], ignore_eos=True).stop_ids == {3}
    with pytest.raises(BadRequest, match=f"stop_token_ids has token id {VOCABULARY}"):
        admit(prompt="ab", stop_token_ids=[VOCABULARY])


def test_min_tokens_must_fit_too() -> None:
    small = Admission(TOKENIZER, INFO, default_max_tokens=8)
    spec = json.dumps({"prompt_token_ids": [1], "min_tokens": 20}).encode()
    assert small.admit(spec, "job").max_tokens == 20
    with pytest.raises(ContextOverflow, match=f"1 tokens \\+ min_tokens {CONTEXT} = {CONTEXT + 1}"):
        admit(prompt_token_ids=[1], min_tokens=CONTEXT)


def test_a_job_must_fit_the_kv_memory() -> None:
    """10 bytes for each of 50 positions and 100 for the row: less than the context has."""
    tight = replace(INFO, kv_bytes_per_token=10, kv_row_bytes=100, kv_budget_bytes=609)
    admission = Admission(TOKENIZER, tight)

    def fitted(**job: Any) -> Admitted:
        return admission.admit(json.dumps(job).encode(), "job")

    assert fitted(prompt_token_ids=[1] * 20, max_tokens=5).kv_bytes == 350
    assert fitted(prompt_token_ids=[1] * 20).max_tokens == 30
    with pytest.raises(ContextOverflow) as refusal:
        fitted(prompt_token_ids=[1] * 20, max_tokens=31)
    assert str(refusal.value) == (
        "the prompt of 20 tokens + max_tokens 31 = 51 exceed "
        "the 50 tokens that this worker has KV memory for"
    )
    with pytest.raises(ContextOverflow, match="leaves no room for output in the 50 tokens"):
        fitted(prompt_token_ids=[1] * 50)
    with pytest.raises(ContextOverflow, match="characters does not fit the 50 tokens"):
        fitted(prompt="ab " * 10_000)
    roomy = Admission(TOKENIZER, replace(tight, kv_budget_bytes=10**6))
    assert roomy.admit(b'{"prompt_token_ids":[1]}', "job").max_tokens == CONTEXT - 1


@pytest.mark.parametrize("prompt_tokens", [1, 40, CONTEXT - 1])
def test_max_tokens_fits_the_context(prompt_tokens: int) -> None:
    room = CONTEXT - prompt_tokens
    ids = [1] * prompt_tokens
    assert admit(prompt_token_ids=ids).max_tokens == room
    assert admit(prompt_token_ids=ids, max_tokens=room).max_tokens == room
    small = Admission(TOKENIZER, INFO, default_max_tokens=8)
    spec = json.dumps({"prompt_token_ids": ids}).encode()
    assert small.admit(spec, "job").max_tokens == min(8, room)
    with pytest.raises(ContextOverflow) as refusal:
        admit(prompt_token_ids=ids, max_tokens=room + 1)
    assert str(refusal.value) == (
        f"the prompt of {prompt_tokens} tokens + max_tokens {room + 1} = {CONTEXT + 1} "
        f"exceed the context of {CONTEXT} tokens"
    )


def test_a_prompt_that_leaves_no_room() -> None:
    for job in ({}, {"max_tokens": 1}):
        with pytest.raises(ContextOverflow) as refusal:
            admit(prompt_token_ids=[1] * CONTEXT, **job)
        assert str(refusal.value) == (
            f"the prompt of {CONTEXT} tokens leaves no room for output "
            f"in the context of {CONTEXT} tokens"
        )


@pytest.fixture
def tokenised(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Every text that is tokenised during a test."""
    texts: list[str] = []

    def noting(encode: Callable[[str], list[int]]) -> Callable[[str], list[int]]:
        def noted(text: str) -> list[int]:
            texts.append(text)
            return encode(text)

        return noted

    for name in ("encode", "encode_rendered"):
        monkeypatch.setattr(TOKENIZER, name, noting(getattr(TOKENIZER, name)))
    return texts


@pytest.mark.parametrize(
    "job",
    [
        {"prompt": "a" * (CONTEXT * TOKENIZER.longest_token + 1)},
        {"prompt": "a" * 10_000_000},
        {"messages": [{"role": "user", "content": "a" * CONTEXT * TOKENIZER.longest_token}]},
    ],
    ids=["just too long", "10 MB", "with the template"],
)
def test_a_text_that_cannot_fit_is_not_tokenised(job: dict[str, Any], tokenised: list[str]) -> None:
    with pytest.raises(ContextOverflow, match=r"of \d+ characters does not fit the context of 64"):
        admit(**job)
    assert tokenised == []


def test_a_text_that_does_not_fit_is_not_tokenised_to_its_end(tokenised: list[str]) -> None:
    with pytest.raises(ContextOverflow, match="of 700 characters does not fit the context of 64"):
        admit(prompt="?" * 700)
    assert tokenised == ["?" * 4 * CONTEXT]


def test_a_text_of_long_tokens_is_tokenised_whole(tokenised: list[str]) -> None:
    text = "<|im_start|>" * (CONTEXT - 1)
    assert admit(prompt=text).prompt == TOKENIZER.encode(text)
    assert admit(prompt=text).max_tokens == 1
    assert text in tokenised


def test_a_text_a_little_too_long_is_told_its_tokens(tokenised: list[str]) -> None:
    with pytest.raises(ContextOverflow, match="the prompt of 65 tokens leaves no room"):
        admit(prompt="?" * 65)
    assert tokenised == ["?" * 65]


@pytest.mark.parametrize(
    ("job", "reason"),
    [
        ({}, "exactly one of messages, prompt, prompt_token_ids; found none"),
        ({"prompt": "a", "messages": [USER]}, "found messages and prompt"),
        ({"prompt": ""}, "length >= 1"),
        ({"messages": []}, "length >= 1"),
        ({"messages": [USER] * (MAX_MESSAGES + 1)}, "length <= 4096"),
        ({"messages": [{"role": "robot", "content": "a"}]}, "robot"),
        ({"messages": [{"role": "user"}]}, "missing required field `content`"),
        ({"messages": [{"role": "user", "content": None}]}, "content"),
        ({"prompt_token_ids": []}, "length >= 1"),
        ({"prompt_token_ids": [1, -1]}, ">= 0"),
        ({"prompt_token_ids": [1, True]}, "Expected `int`"),
        ({"prompt_token_ids": [1, VOCABULARY]}, f"the prompt has token id {VOCABULARY}"),
        ({"prompt_token_ids": [2**31]}, "2147483647"),
        (
            {"prompt": "a", "logit_bias": {str(VOCABULARY): 1}},
            f"logit_bias has token id {VOCABULARY}",
        ),
        ({"prompt": "a", "logit_bias": {"the": 1}}, "logit_bias"),
        ({"prompt": "a", "max_tokens": 0}, ">= 1"),
        ({"prompt": "a", "max_tokens": -5}, ">= 1"),
        ({"prompt": "a", "max_tokens": "5"}, "got `str`"),
        ({"prompt": "a", "temperature": -1}, ">= 0"),
        ({"prompt": "a", "temperature": float("nan")}, "malformed"),
        ({"prompt": "a", "temperature": float("inf")}, "malformed"),
        ({"prompt": "a", "seed": 10**400}, r"\$\.seed"),
        ({"prompt": "a", "stop": [""]}, "length >= 1"),
        ({"prompt": "a", "stop": ["x"] * (MAX_STOPS + 1)}, "length <= 16"),
        ({"prompt": "a", "tempratur": 1}, "unknown field `tempratur`"),
        ({"prompt": "\ud800"}, "truncated|surrogate"),
        ({"prompt": "\udc00\ud800"}, "surrogate"),
    ],
)
def test_bad_jobs(job: dict[str, Any], reason: str) -> None:
    with pytest.raises(BadRequest, match=reason) as refusal:
        admit(**job)
    assert refusal.value.code == "bad_request"


@pytest.mark.parametrize(
    "spec",
    [
        b"",
        b"not json",
        b"null",
        b"[]",
        b'{"prompt":"a"',
        b'{"prompt":"a"}\x00',
        b'{"prompt":"a\x00"}',
        b'{"prompt":"\xff"}',
        b'{"prompt":"\xed\xa0\x80"}',
        b"\xef\xbb\xbf" + b'{"prompt":"a"}',
        "{'prompt':'a'}".encode("utf-16"),
        b"[" * 1_000_000,
        b'{"messages":' + b"[" * 1_000_000,
        b'{"prompt":"a","x":' + b'{"x":' * 1_000_000,
        b'{"prompt":"a","seed":' + b"9" * 1_000_000 + b"}",
        b'{"prompt":"a","temperature":1e999999999}',
    ],
    ids=lambda spec: repr(spec[:24]),
)
def test_bad_bytes(spec: bytes) -> None:
    with pytest.raises(BadRequest) as refusal:
        ADMISSION.admit(spec, "job")
    assert refusal.value.code == "bad_request"
    assert str(refusal.value)


def test_a_nul_that_is_written_out_is_a_character_like_others() -> None:
    assert INNER.decode(admit(prompt="a\x00b").prompt) == "a\x00b"


def test_a_reason_does_not_quote_megabytes() -> None:
    with pytest.raises(BadRequest, match="unknown field `xxx") as refusal:
        admit(prompt="a", **{"x" * 1_000_000: 1})
    assert len(str(refusal.value)) <= MAX_REASON + len("...")


def test_a_text_without_tokens_is_an_empty_prompt() -> None:
    tokenizer, inner = sample("wordpiece")
    info = ModelInfo("words", "words", "words", len(inner), CONTEXT, frozenset())
    with pytest.raises(BadRequest, match="the prompt is empty"):
        Admission(tokenizer, info).admit(b'{"prompt":"  "}', "job")


def test_a_tokenizer_larger_than_its_model() -> None:
    info = ModelInfo("small", "small", "small", 200, CONTEXT, EOS)
    with pytest.raises(BadRequest, match="the vocabulary has ids below 200"):
        Admission(TOKENIZER, info).admit(b'{"prompt":"hello"}', "job")


def test_a_template_that_refuses() -> None:
    tokenizer, inner = sample("llama")
    info = ModelInfo("llama", "llama", "llama", len(inner), CONTEXT, frozenset())
    spec = json.dumps({"messages": [USER, USER]}).encode()
    with pytest.raises(BadRequest, match="roles must alternate user/assistant"):
        Admission(tokenizer, info).admit(spec, "job")


VALID: list[dict[str, Any]] = [
    {"prompt": "hello the ab", "max_tokens": 5, "seed": 1, "stop": ["x"], "ignore_eos": True},
    {"prompt_token_ids": [1, 2, 3], "logit_bias": {"5": 1.5}, "temperature": 0.0, "top_k": 3},
    {
        "messages": [{"role": "developer", "content": "é"}, USER],
        "top_p": 0.5,
        "min_p": 0.1,
        "repetition_penalty": 1.5,
    },
    {"messages": [{"role": "tool", "content": [{"type": "text", "text": "👩"}], "name": "n"}]},
]
NUMBERS = st.integers() | st.floats() | st.integers(-2, 300) | st.floats(-3, 11)
JSON = st.recursive(
    st.none() | st.booleans() | NUMBERS | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=4), inner),
    max_leaves=6,
)


def check(spec: bytes) -> None:
    """Admits within all limits, or refuses with a reason that can be sent."""
    try:
        admitted = ADMISSION.admit(spec, "job")
    except BadRequest as refusal:
        assert refusal.code in ("bad_request", "context_overflow")
        assert 0 < len(str(refusal).encode()) < 4 * MAX_REASON
        return
    sampling = admitted.sampling
    assert admitted.prompt and max(admitted.prompt) < VOCABULARY and min(admitted.prompt) >= 0
    assert 1 <= admitted.max_tokens <= CONTEXT - len(admitted.prompt)
    assert sampling.temperature == 0 or 1e-4 <= sampling.temperature <= 10
    assert 0 < sampling.top_p <= 1 and 0 <= sampling.min_p <= 1
    assert 0 <= sampling.top_k < VOCABULARY and sampling.seed >= 0
    assert all(0 <= token < VOCABULARY for token in sampling.logit_bias)
    assert all(admitted.stops)


@given(spec=st.binary(max_size=200))
def test_fuzz_any_bytes(spec: bytes) -> None:
    check(spec)


@given(data=st.data())
def test_fuzz_valid_specs_with_other_bytes(data: st.DataObject) -> None:
    spec = bytearray(json.dumps(data.draw(st.sampled_from(VALID)), ensure_ascii=False).encode())
    for _ in range(data.draw(st.integers(1, 4))):
        start = data.draw(st.integers(0, len(spec)))
        end = data.draw(st.integers(start, min(start + 4, len(spec))))
        spec[start:end] = data.draw(
            st.binary(max_size=4) | st.sampled_from([b"\\", b'"', b"9" * 40])
        )
    check(bytes(spec))


@given(data=st.data())
def test_fuzz_valid_specs_with_other_values(data: st.DataObject) -> None:
    spec: dict[str, Any] = dict(data.draw(st.sampled_from(VALID)))
    for _ in range(data.draw(st.integers(1, 3))):
        field = data.draw(st.sampled_from(sorted({name for job in VALID for name in job})))
        spec[field] = data.draw(JSON)
    check(json.dumps(spec).encode())


@given(
    messages=st.lists(
        st.fixed_dictionaries(
            {
                "role": st.sampled_from(["system", "developer", "user", "assistant", "tool"]),
                "content": st.text(max_size=10)
                | st.lists(st.text(max_size=4).map(lambda text: {"type": "text", "text": text})),
            }
        ),
        min_size=1,
        max_size=4,
    )
)
@example(messages=[{"role": "user", "content": ""}])
@example(messages=[{"role": "user", "content": "{{ raise_exception('x') }}{% endfor %}"}])
def test_fuzz_messages(messages: list[dict[str, Any]]) -> None:
    check(json.dumps({"messages": messages}).encode())

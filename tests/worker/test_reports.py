"""What a job is told beside its text: log probabilities, and what the prefix cache had."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable
from typing import Any

import msgspec
import pytest

from mlxq.protocol.events import TokenLogprob, TopLogprob
from mlxq.worker.chat import Tokenizer
from mlxq.worker.engine.request import Logprob, ModelInfo
from mlxq.worker.logprobs import LEAST, written
from tests.server import Server, free_port
from tests.text.samples import sample
from tests.worker.fakes import FakeBatch
from tests.worker.harness import Submitter, check_stream, running
from tests.worker.test_metrics import read_metrics

TEXT = "the quick brown fox jumps over the lazy dog"
Fake = Callable[..., FakeBatch]


def logprob_of(token: int) -> Logprob:
    return Logprob(-token / 3, [(token, -token / 3), (token + 1, -50.0)])


@pytest.fixture
def fake(info: ModelInfo, tokenizer: Tokenizer) -> Fake:
    answer = tokenizer.encode_continuation(TEXT)
    return lambda **options: FakeBatch(info, lambda request: answer, **options)


@pytest.fixture
def settings(server: Server, queue: str) -> dict[str, Any]:
    return {"redis_url": server.url, "queue": queue, "name": "mac1"}


async def _result(submitter: Submitter, job_id: str) -> dict[str, Any]:
    result: dict[str, Any] = msgspec.json.decode((await submitter.job(job_id))["result"])
    return result


async def test_logprobs_travel_with_every_token_and_over_attempts(
    submitter: Submitter, fake: Fake, settings: dict[str, Any]
) -> None:
    first = fake(manual=True, logprobs=logprob_of)
    async with running(lambda: first, **settings, drain_timeout_s=0) as worker:
        await submitter.enqueue("a", prompt="Hi", logprobs=True, top_logprobs=2)
        await submitter.enqueue("plain", prompt="Hi")
        first.allow(4)
        await submitter.until("a", tokens=4)
        await worker.stop()
    async with running(lambda: fake(logprobs=logprob_of), **settings):
        await submitter.terminal("a")
        await submitter.terminal("plain")
    events = await submitter.events("a")
    ids = check_stream(events)
    entries = [entry for event in events for entry in event.get("logprobs", [])]
    assert [entry["logprob"] for entry in entries] == [float(f"{-i / 3:.6g}") for i in ids]
    assert [entry["top_logprobs"][0]["id"] for entry in entries] == ids
    assert "".join(entry["token"] for entry in entries) == TEXT
    assert (await _result(submitter, "a"))["logprobs"] == entries
    assert not any("logprobs" in event for event in await submitter.events("plain"))
    assert "logprobs" not in await _result(submitter, "plain")


async def test_logprobs_end_with_the_id_that_completes_a_stop(
    submitter: Submitter, fake: Fake, settings: dict[str, Any]
) -> None:
    async with running(lambda: fake(logprobs=logprob_of), **settings):
        await submitter.enqueue("a", prompt="Hi", logprobs=True, stop="brown")
        await submitter.terminal("a")
    result = await _result(submitter, "a")
    assert len(result["logprobs"]) == len(result["token_ids"]) > 0
    assert result["text"] == "the quick "


async def test_cached_tokens_are_told_at_the_start_in_usage_and_in_metrics(
    submitter: Submitter, fake: Fake, settings: dict[str, Any]
) -> None:
    batch, port = fake(manual=True, cached=2), free_port()
    async with running(lambda: batch, **settings, metrics_port=port):
        await submitter.enqueue("a", prompt="Hi there")
        await submitter.until("a")
        [started] = await submitter.events("a")
        assert (started["type"], started["cached_tokens"]) == ("started", 2)
        batch.allow(1000)
        terminal = await submitter.terminal("a")
        assert terminal["usage"]["cached_tokens"] == 2
        assert (await _result(submitter, "a"))["usage"] == terminal["usage"]
        found = await asyncio.to_thread(read_metrics, port)
    assert found["mlxq:prefix_cache_queries_total"] == started["prompt_tokens"]
    assert found["mlxq:prefix_cache_hits_total"] == 2


async def test_a_job_is_started_when_the_engine_begins_or_when_it_is_given_back(
    submitter: Submitter, fake: Fake, settings: dict[str, Any]
) -> None:
    """Admitted is not begun. Who reads is told of an attempt that never began all the same."""
    batch = fake()
    batch.step = lambda: []  # type: ignore[method-assign]
    async with running(lambda: batch, **settings, drain_timeout_s=0) as worker:
        await submitter.enqueue("a", prompt="Hi")
        while not batch.admitted:
            await asyncio.sleep(0.005)
        assert await submitter.events("a") == []
        await worker.stop()
    assert [event["type"] for event in await submitter.events("a")] == ["started", "requeued"]
    async with running(fake, **settings):
        await submitter.terminal("a")
    assert [event["type"] for event in await submitter.events("a")][2] == "resumed"
    check_stream(await submitter.events("a"))


def test_texts_of_single_ids_and_short_numbers() -> None:
    tokenizer, inner = sample("byte_level")
    half, word, special = inner.convert_tokens_to_ids(["ðŁ", "Ġthe", "<|im_end|>"])
    found = written(
        tokenizer,
        [half, word],
        [Logprob(-1.23456789, []), Logprob(-math.inf, [(special, -0.00001234567)])],
    )
    assert found == [
        TokenLogprob("\ufffd", -1.23457),
        TokenLogprob(" the", LEAST, [TopLogprob("<|im_end|>", special, -1.23457e-05)]),
    ]


@pytest.mark.parametrize("kind", ["llama", "gemma", "metaspace", "wordpiece"])
def test_every_id_has_a_text_in_any_vocabulary(kind: str) -> None:
    tokenizer, inner = sample(kind)
    texts = [tokenizer.token_text(token) for token in range(len(inner))]
    assert sum(map(bool, texts)) > 0.9 * len(texts)
    assert texts == [tokenizer.token_text(token) for token in range(len(inner))]

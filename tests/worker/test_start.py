"""What stops a worker before it loads a model, and what it says of a server that is not there."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Callable
from typing import Any

import pytest
from redis.exceptions import AuthenticationError, ConnectionError, NoPermissionError
from structlog.testing import capture_logs

from mlxq.worker import link as link_module
from mlxq.worker.chat import Tokenizer
from mlxq.worker.config import EXIT_BAD_CONFIG, EXIT_DRAINED, BadConfig, Config
from mlxq.worker.engine.request import ModelInfo
from mlxq.worker.link import UNANSWERED, Link
from mlxq.worker.orders import Order
from mlxq.worker.trouble import describe
from tests.server import Server, free_port
from tests.worker.fakes import FakeBatch
from tests.worker.harness import Submitter, running


def never() -> FakeBatch:
    raise AssertionError("the model is loaded")


@pytest.fixture
def settings(server: Server, queue: str) -> dict[str, Any]:
    return {"redis_url": server.url, "queue": queue, "name": "mac1"}


@pytest.fixture
def fake(info: ModelInfo, tokenizer: Tokenizer) -> Callable[[], FakeBatch]:
    answer = tokenizer.encode_continuation("the fox")
    return lambda: FakeBatch(info, lambda request: answer)


async def test_a_metrics_port_in_use_is_told_before_the_model_is_loaded(
    settings: dict[str, Any],
) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken, capture_logs() as logs:
        port = taken.getsockname()[1]
        async with running(never, **settings, metrics_port=port) as worker:
            assert await asyncio.wait_for(worker.exit, 30) == EXIT_BAD_CONFIG
    [said] = [entry["error"] for entry in logs if entry["event"] == "cannot_start"]
    assert said.startswith(f"--metrics-port: cannot listen on 127.0.0.1:{port}: ")


async def test_refused_credentials_are_told_before_the_model_is_loaded(
    server: Server, settings: dict[str, Any]
) -> None:
    url = f"redis://nobody:hunter2@127.0.0.1:{server.port}"
    with capture_logs() as logs:
        async with running(never, **{**settings, "redis_url": url}) as worker:
            assert await asyncio.wait_for(worker.exit, 30) == EXIT_BAD_CONFIG
    [said] = [entry["error"] for entry in logs if entry["event"] == "cannot_start"]
    assert said.startswith("the server refuses the user or the password in --redis: ")
    assert "hunter2" not in str(logs)


async def test_nobody_is_served_before_the_server_has_answered(
    fake: Callable[[], FakeBatch], settings: dict[str, Any]
) -> None:
    late = Server()
    settings["redis_url"] = late.url
    try:
        with capture_logs() as logs:
            async with running(fake, **settings) as worker:
                while not any(entry["event"] == "model_loaded" for entry in logs):
                    await asyncio.sleep(0.01)
                await asyncio.sleep(0.1)
                events = [entry["event"] for entry in logs]
                assert "redis_lost" in events and "serving" not in events
                await asyncio.to_thread(late.start)
                while not any(entry["event"] == "serving" for entry in logs):
                    await asyncio.sleep(0.01)
                assert await worker.stop() == EXIT_DRAINED
    finally:
        late.stop()


async def test_a_worker_that_drains_says_so_at_once(
    submitter: Submitter, info: ModelInfo, settings: dict[str, Any]
) -> None:
    batch = FakeBatch(info, lambda request: [5] * 50, manual=True)
    async with running(lambda: batch, **settings, max_batch=4) as worker:
        await submitter.enqueue("a", prompt="Hi")
        await submitter.until("a")
        key = submitter.keys.worker(worker.config.owner)
        states = set()
        while "draining" not in states:
            found: Any = await submitter.client.hget(key, "state")
            states.add((found or b"").decode())
            if "serving" in states:
                worker.orders.give(Order.DRAIN)
            await asyncio.sleep(0.005)
        batch.allow(1000)
        assert await asyncio.wait_for(worker.exit, 30) == EXIT_DRAINED
    assert states >= {"serving", "draining"}
    assert not await submitter.client.exists(key)


async def test_slots_in_effect_are_those_of_the_model_if_it_has_fewer(
    submitter: Submitter, info: ModelInfo, settings: dict[str, Any]
) -> None:
    alone = FakeBatch(_with(info, max_batch=1), lambda request: [5] * 50, manual=True)
    async with running(lambda: alone, **settings, max_batch=4) as worker:
        for job_id in ("a", "b"):
            await submitter.enqueue(job_id, prompt="Hi")
        await submitter.until("a")
        key = submitter.keys.worker(worker.config.owner)
        while not await submitter.client.exists(key):
            await asyncio.sleep(0.01)
        assert await submitter.client.hget(key, "slots") == b"1"
        alone.allow(1000)
        await submitter.terminal("b")
    assert len(alone.admitted) == 2 and max(alone.together) == 1


def _with(info: ModelInfo, **changes: Any) -> ModelInfo:
    return ModelInfo(**{**{name: getattr(info, name) for name in info.__slots__}, **changes})


async def _reasons(url: str, times: int = 1) -> list[str]:
    """What is logged of requests that go unanswered."""
    link = Link(url, "{mlxq:a}:bell", timeout_s=0.3, on_back=lambda down_s: None)
    with capture_logs() as logs:
        for _ in range(times):
            with pytest.raises(UNANSWERED):
                await link.once(link.client.ping)
    await link.close()
    return [entry["error"] for entry in logs if entry["event"] == "redis_lost"]


async def test_the_reason_of_an_outage_is_named(server: Server) -> None:
    port = server.port
    [refused] = await _reasons(f"redis://127.0.0.1:{free_port()}")
    assert refused.startswith("nothing listens there: ")
    [silent] = await _reasons(f"rediss://127.0.0.1:{port}")
    assert silent == "no answer in time; does it speak TLS, as rediss:// says?"
    [password] = await _reasons(f"redis://nobody:hunter2@127.0.0.1:{port}")
    assert password.startswith("the server refuses the user or the password")
    wrapped = ConnectionError("no node knows it")
    wrapped.__cause__ = AuthenticationError("WRONGPASS")
    assert describe(wrapped) == (
        "the server refuses the user or the password in --redis: no node knows it"
    )
    unknown = ConnectionError("Error -2 connecting to nowhere:6379.")
    unknown.__context__ = socket.gaierror(-2, "Name or service not known")
    assert describe(unknown) == ("unknown host in --redis: Error -2 connecting to nowhere:6379.")
    assert describe(NoPermissionError("no HSET")).startswith("the user in --redis lacks a right")
    assert describe(TimeoutError()) == "no answer in time"
    assert describe(ValueError("a\nb")) == "ValueError: a"


async def test_an_outage_is_told_again_while_it_lasts(monkeypatch: pytest.MonkeyPatch) -> None:
    url = f"redis://127.0.0.1:{free_port()}"
    assert len(await _reasons(url, times=5)) == 1
    monkeypatch.setattr(link_module, "WARN_INTERVAL_S", 0.0)
    assert len(await _reasons(url, times=5)) == 5


def test_bad_flags_of_metrics() -> None:
    with pytest.raises(BadConfig, match="--metrics-host"):
        Config(model="m", metrics_host="")
    with pytest.raises(BadConfig, match="--metrics-port must be 0 to 65535"):
        Config(model="m", metrics_port=65536)

"""A folder of a multimodal model serves text."""

from __future__ import annotations

from functools import partial
from pathlib import Path

import mlx.core as mx
import pytest

from mlxq.worker.chat import Tokenizer
from mlxq.worker.engine.load import load_batch
from mlxq.worker.engine.models import load_model
from tests.engine.architectures import SHARED, config_of
from tests.engine.tiny import make_tiny_model
from tests.server import Server
from tests.worker.harness import Submitter, running


@pytest.mark.parametrize("model_type", ["qwen2_vl", "gemma3"])
async def test_text_of_a_multimodal_model(
    submitter: Submitter, queue: str, server: Server, tmp_path: Path, model_type: str
) -> None:
    folder = make_tiny_model(tmp_path / "model", config=SHARED | config_of(model_type))
    prompt = "the quick brown fox"
    load = partial(load_batch, str(folder), max_batch=4, prefill_step=16)
    async with running(load, queue=queue, redis_url=server.url):
        await submitter.enqueue("one", prompt=prompt, max_tokens=8, temperature=0)
        await submitter.terminal("one")
    got = [id for event in await submitter.events("one") for id in event.get("ids", [])]
    network = load_model(str(folder)).network
    ids = Tokenizer.load(str(folder)).encode(prompt)
    for _ in range(len(got)):
        ids.append(int(network(mx.array([ids]), network.make_cache())[0, -1].argmax()))
    assert got == ids[-len(got) :] and len(got) > 1

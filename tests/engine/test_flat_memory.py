"""Memory after many jobs is what it was before them."""

from __future__ import annotations

import gc
import random
from pathlib import Path

import mlx.core as mx
import pytest

from mlxq.worker.engine.memory import measure
from mlxq.worker.engine.models import load_model
from mlxq.worker.engine.request import Admit, SamplingParams
from tests.engine.rig import GREEDY, Rig, prompt_of, request
from tests.engine.tiny import make_tiny_model

ROUNDS = 20  # of 100 jobs each
SAMPLINGS = (
    GREEDY,
    SamplingParams(seed=1, top_p=0.9),
    SamplingParams(seed=2, top_k=20, repetition_penalty=1.2, logprobs=3),
    SamplingParams(seed=3, frequency_penalty=0.5, logit_bias={5: 1.0}),
)


def jobs(count: int, choice: random.Random) -> list[Admit]:
    made = []
    for number in range(count):
        length = choice.choice((3, 9, 30, 80))
        made.append(
            request(
                str(number),
                prompt_of(choice.randrange(1, length), number),
                max_tokens=choice.randrange(1, 20),
                sampling=SAMPLINGS[number % len(SAMPLINGS)],
                stop_ids=frozenset({choice.randrange(300)}),
                priority=choice.randrange(3),
            )
        )
    return made


def drain(rig: Rig, count: int, seed: int) -> int:
    """Runs so many jobs, a fifth of them aborted in some stage; the bytes that stay in use."""
    choice = random.Random(seed)
    waiting = jobs(count, choice)
    while waiting or rig.batch.busy:
        for _ in range(choice.randrange(4)):
            if waiting:
                row = waiting.pop()
                rig.admit(row)
                if choice.random() < 0.2:
                    rig.step(choice.randrange(3))
                    rig.batch.cancel(row.key)
        rig.step()
    assert rig.batch.kv_bytes == 0
    rig.ids.clear()
    rig.ends.clear()
    rig.cached.clear()
    rig.logprobs.clear()
    gc.collect()
    mx.synchronize()
    return mx.get_active_memory()


@pytest.mark.slow
def test_memory_is_flat(tmp_path: Path) -> None:
    loaded = load_model(str(make_tiny_model(tmp_path)))
    cost = measure(loaded.network)
    rig = Rig(
        loaded,
        max_batch=12,
        prefill_step=64,
        kv_cost=cost,
        budget_bytes=cost.of_batch(10, 100),
    )
    before = drain(rig, 60, seed=0)
    for seed in range(1, ROUNDS + 1):
        assert drain(rig, 100, seed) <= 1.02 * before


@pytest.mark.parametrize("kind", ["falcon_h1"])
def test_memory_is_flat_with_recurrent_state(tmp_path: Path, kind: str) -> None:
    loaded = load_model(str(make_tiny_model(tmp_path, config={"model_type": kind})))
    rig = Rig(loaded, max_batch=8, prefill_step=64)
    before = drain(rig, 20, seed=0)
    assert drain(rig, 60, seed=1) <= 1.02 * before

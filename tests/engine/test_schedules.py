"""Random schedules of everything at once: each row ends as it would have alone."""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest

from mlxq.worker.engine.memory import measure
from mlxq.worker.engine.models import LoadedModel, load_model
from mlxq.worker.engine.prefix_cache import PrefixCache
from mlxq.worker.engine.request import NO_BOUND, Admit, SamplingParams
from tests.engine.rig import GREEDY, Rig, prompt_of, request, run
from tests.engine.tiny import make_tiny_model

KINDS: dict[str, dict[str, Any]] = {
    "attention": {},
    "sliding window": {
        "sliding_window": 16,
        "layer_types": ["sliding_attention", "full_attention"],
    },
    "hybrid": {"model_type": "falcon_h1"},
}
SAMPLINGS = (
    GREEDY,
    SamplingParams(temperature=0.0, frequency_penalty=0.4, logprobs=0),
    SamplingParams(seed=5),
    SamplingParams(seed=6, top_p=0.9, temperature=0.8, logprobs=2),
    SamplingParams(seed=7, top_k=20, repetition_penalty=1.2, min_tokens=3),
)
SCHEDULES = 6


@pytest.fixture(scope="module", params=KINDS)
def model(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[LoadedModel]:
    folder = tmp_path_factory.mktemp("models") / "tiny"
    yield load_model(str(make_tiny_model(folder, config=KINDS[request.param])))


def rows(choice: random.Random, seed: int) -> list[Admit]:
    """Prompts that share a beginning or not, with everything a request may ask for."""
    shared = prompt_of(130, seed)
    made = []
    for number in range(choice.randrange(3, 12)):
        own = prompt_of(choice.randrange(1, 50), 100 * seed + number)
        made.append(
            request(
                str(number),
                shared[: choice.randrange(130)] + own,
                max_tokens=choice.randrange(1, 30),
                sampling=choice.choice(SAMPLINGS),
                priority=choice.randrange(3),
                stop_ids=frozenset(choice.sample(range(4, 290), choice.choice((0, 20)))),
            )
        )
    return made


def rig_for(loaded: LoadedModel, choice: random.Random, prefixes: PrefixCache) -> Rig:
    cost = measure(loaded.network)
    return Rig(
        loaded,
        max_batch=choice.choice((1, 2, 3, 12)),
        prefill_step=choice.choice((1, 7, 64, 512)),
        kv_cost=cost,
        budget_bytes=choice.choice((NO_BOUND, cost.of_batch(3, 150))),
        prefix_cache=prefixes,
    )


@pytest.mark.parametrize("seed", range(SCHEDULES))
def test_every_row_ends_as_it_would_have_alone(model: LoadedModel, seed: int) -> None:
    choice = random.Random(seed)
    memory_bytes = choice.choice((0, 1 << 20, 1 << 26))
    prefixes = PrefixCache.of(model.network, "tiny", memory_bytes=memory_bytes)
    rig = rig_for(model, choice, prefixes)
    requests = rows(choice, seed)
    coming, cancelled = list(requests), set()
    while coming or rig.batch.busy:
        if coming and choice.random() < 0.4:
            rig.admit(coming.pop(0))
        if choice.random() < 0.02:
            victim = choice.choice(requests)
            if victim not in coming and victim.key.job_id not in rig.ends:
                rig.batch.cancel(victim.key)
                cancelled.add(victim.key)
        rig.step()
        assert rig.steps < 5_000
    for each in requests:
        if each.key in cancelled:
            continue
        name = each.key.job_id
        made, reports = rig.ids[name], rig.logprobs[name]
        assert len(reports) == (0 if each.sampling.logprobs is None else len(made))
        if rig.ends[name].finish == "preempted":
            made = made + run(model, replace(each, generated=made), max_batch=1)[name]
        assert made == run(model, each, max_batch=1, prefill_step=512)[name]
    assert rig.batch.kv_bytes == 0
    prefixes.close()

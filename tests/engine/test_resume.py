"""A row that another worker took up goes on as if nothing had happened."""

from __future__ import annotations

import pytest

from mlxq.worker.engine.models import LoadedModel
from mlxq.worker.engine.request import SamplingParams
from tests.engine.rig import GREEDY, prompt_of, request, run

COUNT = 24
PROMPT = prompt_of(11, 3)
WAYS = {
    "greedy": GREEDY,
    "greedy, penalties": SamplingParams(
        temperature=0.0, repetition_penalty=1.1, presence_penalty=-2.0, frequency_penalty=-1.0
    ),
    "seeded": SamplingParams(seed=7),
    "seeded, large seed": SamplingParams(temperature=1.4, seed=2**63 - 1),
    "seeded, cut": SamplingParams(temperature=0.9, top_p=0.9, top_k=40, min_p=0.02, seed=8),
    "seeded, everything": SamplingParams(
        temperature=1.2,
        top_p=0.95,
        top_k=100,
        min_p=0.01,
        repetition_penalty=1.2,
        presence_penalty=0.5,
        frequency_penalty=0.7,
        logit_bias={5: 2.0, 6: -100.0},
        seed=9,
    ),
}


@pytest.mark.parametrize("way", WAYS)
def test_resume_at_every_split_alone_and_in_company(loaded: LoadedModel, way: str) -> None:
    sampling = WAYS[way]
    whole = run(loaded, request("whole", PROMPT, max_tokens=COUNT, sampling=sampling))["whole"]
    assert len(whole) == COUNT
    parts = [
        request(str(split), PROMPT, generated=whole[:split], max_tokens=COUNT, sampling=sampling)
        for split in range(COUNT)
    ]
    together = run(loaded, *parts, max_batch=COUNT)
    for part in parts:
        name, split = part.key.job_id, len(part.generated)
        assert whole[:split] + together[name] == whole, f"together, split at {split}"
        alone = run(loaded, part, prefill_step=512)[name]
        assert whole[:split] + alone == whole, f"alone, split at {split}"


@pytest.mark.parametrize("mates", [1, 3, 5])
def test_seeded_row_does_not_depend_on_its_mates(loaded: LoadedModel, mates: int) -> None:
    sampling = WAYS["seeded, everything"]
    row = request("row", PROMPT, max_tokens=COUNT, sampling=sampling)
    alone = run(loaded, row)["row"]
    company = [
        request(str(n), prompt_of(4 + 9 * n, n), max_tokens=9 * n + 3, sampling=mate)
        for n, mate in enumerate(list(WAYS.values())[:mates])
    ]
    assert run(loaded, *company, row)["row"] == alone
    assert run(loaded, row, *company)["row"] == alone


def test_seeds_make_the_difference(loaded: LoadedModel) -> None:
    rows = [
        request(str(n), PROMPT, max_tokens=COUNT, sampling=SamplingParams(seed=n // 2))
        for n in range(8)
    ]
    ids = run(loaded, *rows)
    assert all(ids[str(n)] == ids[str(n + 1)] for n in range(0, 8, 2))
    assert len({tuple(row) for row in ids.values()}) == 4

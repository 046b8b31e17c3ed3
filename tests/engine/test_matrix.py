"""Every row of a batch is what it is alone, for tiny random models of many architectures.

The reference is the plain loop of a single request: the whole prompt at once, then id after id.
"""

from __future__ import annotations

from pathlib import Path

import mlx.core as mx
import pytest

from mlxq.worker.engine import library
from mlxq.worker.engine.library import WRONG_IN_MLX_VLM, load_network
from mlxq.worker.engine.models import load_model
from mlxq.worker.engine.network import Network
from mlxq.worker.engine.request import SamplingParams
from mlxq.worker.engine.row_cache import CacheOptions
from mlxq.worker.engine.selfcheck import self_check
from tests.engine.architectures import ARCHITECTURES, MULTIMODAL, WINDOW, config_of
from tests.engine.rig import Rig, prompt_of, request
from tests.engine.tiny import write_network

LENGTHS = [3, 17, 40, 9, 2, 25, 1]
COUNT = 6

CLOSE = 1e-4
GREEDY = SamplingParams(temperature=0.0, logprobs=0)

ONE_ROW = {
    "afm7": "layers that reuse keys take their positions from the length of the longest row",
    "gpt_bigcode": "positions are counted from one number for all rows",
    "llama4": "a chunked cache has no form for many rows",
}
"""Architectures that no batch can be exact for; the self-check must find out."""

SLIDING = ["gemma3_text", "gemma4_text", "gpt_oss", "ministral3", "recurrent_gemma", "baichuan_m1"]
ONE_LIBRARY = {"gemma3n", "gptj", "internlm2", "llama4", "olmo_hybrid", "glm4v", "idefics3"}
"""One of the libraries has it not, or reads it only with a tower that these tests leave out."""

MULTI_AXIS = ["qwen2_vl", "qwen2_5_vl", "qwen3_vl", "glm4v"]
"""These keep the positions of the row they read last on themselves."""

BOTH = sorted({*ARCHITECTURES, *MULTIMODAL} - ONE_LIBRARY)

Row = tuple[list[int], list[float]]
"""Ids and their log probabilities."""


@pytest.fixture
def folder(model_type: str, tmp_path: Path) -> Path:
    return write_network(tmp_path / model_type, config_of(model_type))


def alone(network: Network, prompt: list[int], count: int) -> Row:
    cache = network.make_cache()
    if prompt[:-1]:
        network(mx.array([prompt[:-1]]), cache)
    ids, logprobs = [prompt[-1]], []
    for _ in range(count):
        logits = network(mx.array([ids[-1:]]), cache)[0, -1]
        best = logits.argmax()
        logprobs.append(float(logits[best] - mx.logsumexp(logits)))
        ids.append(int(best))
    return ids[1:], logprobs


def assert_equal(
    rig: Rig, network: Network, prompts: dict[str, list[int]], count: int = COUNT
) -> None:
    for name, prompt in prompts.items():
        ids, logprobs = alone(network, prompt, count)
        assert rig.ids[name] == ids, name
        got = [logprob.logprob for logprob in rig.logprobs[name]]
        assert got == pytest.approx(logprobs, abs=CLOSE), name


@pytest.mark.parametrize("model_type", [*ARCHITECTURES, *MULTIMODAL])
def test_every_row_is_what_it_is_alone(folder: Path, model_type: str) -> None:
    loaded = self_check(load_model(str(folder)), CacheOptions())
    assert (loaded.info.max_batch == 1) == (model_type in ONE_ROW)
    rig = Rig(loaded, max_batch=min(6, loaded.info.max_batch), prefill_step=8)
    prompts = {str(length): prompt_of(length, length) for length in LENGTHS}

    def arrive(*names: str) -> None:
        for name in names:
            rig.admit(request(name, prompts[name], max_tokens=COUNT, sampling=GREEDY))

    arrive("3", "2")
    rig.step(3)
    arrive("40", "17")
    rig.step(4)
    arrive("9", "1")
    rig.cancel("17")
    rig.step(2)
    arrive("25")
    rig.finish()
    del prompts["17"]
    assert_equal(rig, loaded.network, prompts)


@pytest.mark.parametrize("model_type", MULTI_AXIS)
def test_positions_that_another_row_left_on_the_model(folder: Path, model_type: str) -> None:
    """Multimodal alignment, what concerns rows of text: an image moves all positions behind it."""
    network = load_model(str(folder)).network
    expected = alone(network, prompt_of(20), COUNT)
    network.model._rope_deltas = mx.array([[7]])
    network.model._position_ids = mx.zeros((3, 1, 40), mx.int32)
    assert alone(network, prompt_of(20), COUNT) == expected


@pytest.mark.parametrize("model_type", SLIDING)
def test_a_short_row_beside_one_whose_window_has_wrapped(folder: Path, model_type: str) -> None:
    loaded = load_model(str(folder))
    assert loaded.network.window == WINDOW
    rig = Rig(loaded, prefill_step=8)
    prompts = {"30": prompt_of(30), "3": prompt_of(3, 1), "5": prompt_of(5, 2)}
    count = 3 * WINDOW

    def arrive(name: str) -> None:
        rig.admit(request(name, prompts[name], max_tokens=count, sampling=GREEDY))

    arrive("30")
    rig.step_until("30", WINDOW + 3)
    arrive("3")
    rig.step_until("3", WINDOW + 1)
    arrive("5")
    rig.finish()
    assert_equal(rig, loaded.network, prompts, count)


@pytest.mark.parametrize("model_type", BOTH)
def test_the_libraries_agree_but_for_what_is_known(
    folder: Path, model_type: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """That mlx-vlm is preferred is right only as long as it computes the same."""
    rows: list[Row] = []
    for only in ("mlx-lm", "mlx-vlm"):
        monkeypatch.setattr(library, "libraries", lambda config, only=only: [only])
        network, _ = load_network(folder, config_of(model_type))
        rows.append(alone(network, prompt_of(2 * WINDOW + 5), 3))
    (ids, logprobs), (other_ids, others) = rows
    agree = ids == other_ids and logprobs == pytest.approx(others, abs=CLOSE)
    assert agree == (model_type not in {*WRONG_IN_MLX_VLM} - {"gemma3_text"})

"""Steps a batch on the test's own thread, and collects what its rows put out."""

from __future__ import annotations

import gc
from pathlib import Path
from typing import Any, cast

import mlx.core as mx
from mlx_lm.generate import generate_step

from mlxq.worker.engine.batch import MlxBatch
from mlxq.worker.engine.models import LoadedModel, load_model
from mlxq.worker.engine.request import Admit, Logprob, Output, RowKey, SamplingParams
from tests.engine.tiny import make_tiny_model

GREEDY = SamplingParams(temperature=0.0)
STEP_LIMIT = 2_000


def request(
    name: str,
    prompt: list[int],
    *,
    generated: list[int] | None = None,
    max_tokens: int = 16,
    sampling: SamplingParams = GREEDY,
    stop_ids: frozenset[int] = frozenset(),
    priority: int = 1,
) -> Admit:
    key = RowKey(name, 1)
    return Admit(key, prompt, generated or [], max_tokens, sampling, stop_ids, priority)


def prompt_of(length: int, salt: int = 0) -> list[int]:
    """Some ids, no two prompts alike."""
    return [(7 * salt + 13 * index + index * index) % 290 + 4 for index in range(length)]


def greedy_reference(loaded: LoadedModel, prompt: list[int], count: int) -> list[int]:
    """What the library's own single-request loop generates."""
    tokens = generate_step(mx.array(prompt), loaded.network, max_tokens=count)
    return [int(token) for token, _ in tokens]


def reference_logprobs(loaded: LoadedModel, prompt: list[int], output: list[int]) -> list[float]:
    """The log probability of each id of an output, from one forward pass over all of it."""
    network = loaded.network
    logits = network(mx.array([prompt + output[:-1]], mx.int32), network.make_cache())[0]
    logprobs = logits - mx.logsumexp(logits, axis=-1, keepdims=True)
    drawn = mx.take_along_axis(logprobs[len(prompt) - 1 :], mx.array(output)[:, None], axis=-1)
    return cast(list[float], drawn[:, 0].tolist())


class Rig:
    """A batch, and per row its ids and how it ended."""

    def __init__(
        self, loaded: LoadedModel, *, max_batch: int = 8, prefill_step: int = 16, **options: Any
    ) -> None:
        self.batch = MlxBatch(loaded, max_batch=max_batch, prefill_step=prefill_step, **options)
        self.ids: dict[str, list[int]] = {}
        self.ends: dict[str, Output] = {}
        self.cached: dict[str, int] = {}
        self.logprobs: dict[str, list[Logprob]] = {}
        self.steps = 0

    def admit(self, *requests: Admit) -> None:
        for each in requests:
            self.batch.admit(each)

    def cancel(self, name: str) -> None:
        self.batch.cancel(RowKey(name, 1))

    def step(self, count: int = 1) -> None:
        for _ in range(count):
            self.steps += 1
            for output in self.batch.step():
                name = output.key.job_id
                assert name not in self.ends, "output after the end"
                if output.cached is not None:
                    assert name not in self.cached and name not in self.ids
                    self.cached[name] = output.cached
                if output.ids or output.finish is not None:
                    self.ids.setdefault(name, []).extend(output.ids)
                self.logprobs.setdefault(name, []).extend(output.logprobs or [])
                if output.finish is not None:
                    self.ends[name] = output

    def step_until(self, name: str, count: int = 1) -> None:
        """Until the row has put out `count` ids."""
        while len(self.ids.get(name, [])) < count:
            assert self.steps < STEP_LIMIT
            self.step()

    def finish(self) -> dict[str, list[int]]:
        """Steps until nothing is left; the ids of every row."""
        while self.batch.busy:
            assert self.steps < STEP_LIMIT
            self.step()
        return self.ids

    def finishes(self) -> dict[str, str | None]:
        return {name: output.finish for name, output in self.ends.items()}


def run(loaded: LoadedModel, *requests: Admit, **options: Any) -> dict[str, list[int]]:
    """The ids of all requests, admitted at once."""
    rig = Rig(loaded, **options)
    rig.admit(*requests)
    return rig.finish()


def settled_rig(folder: Path) -> tuple[Rig, int]:
    """A rig of a wider tiny model that has run once, and the bytes in use since then."""
    wide = load_model(str(make_tiny_model(folder, hidden_size=128)))
    rig = Rig(wide, max_batch=8, prefill_step=256)
    rig.admit(request("warm", prompt_of(9), max_tokens=2))
    rig.finish()
    gc.collect()
    return rig, mx.get_active_memory()


class Trap:
    """A network that raises whenever it reads the id `poison`, and always once `broken`."""

    def __init__(self, network: Any, poison: int) -> None:
        self._network = network
        self._poison = poison
        self.broken = False

    def __call__(self, ids: mx.array, **arguments: Any) -> Any:
        if self.broken or bool((ids == self._poison).any()):
            raise RuntimeError("poisoned")
        return self._network(ids, **arguments)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._network, name)

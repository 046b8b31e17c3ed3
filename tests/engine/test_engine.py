"""The whole engine: a real loader and batch on its own thread, driven from outside."""

from __future__ import annotations

import queue
import random
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import mlx.core as mx
import pytest

from mlxq.worker.engine.batch import MlxBatch
from mlxq.worker.engine.load import load_batch
from mlxq.worker.engine.memory import plan_memory
from mlxq.worker.engine.models import LoadedModel, ModelError
from mlxq.worker.engine.request import Admit, Output, RowKey, SamplingParams
from mlxq.worker.engine.thread import EngineThread
from tests.engine.rig import greedy_reference, prompt_of, request
from tests.engine.tiny import make_tiny_model

GUARD_S = 60.0


class Driver:
    """An engine on the tiny model; outputs are collected per row."""

    def __init__(self, load: Callable[[], MlxBatch]) -> None:
        self.ids: dict[RowKey, list[int]] = {}
        self.ended: queue.SimpleQueue[Output] = queue.SimpleQueue()
        self.dead: queue.SimpleQueue[BaseException] = queue.SimpleQueue()
        self.engine = EngineThread(load, on_outputs=self._collect, on_dead=self.dead.put)

    def _collect(self, outputs: list[Output]) -> None:
        for output in outputs:
            self.ids.setdefault(output.key, []).extend(output.ids)
            if output.finish is not None:
                self.ended.put(output)

    def close(self) -> None:
        self.engine.stop()
        self.engine.join(GUARD_S)


@pytest.fixture
def driver(tiny: Path) -> Iterator[Driver]:
    driver = Driver(lambda: load_batch(str(tiny), max_batch=4, prefill_step=16))
    driver.engine.start()
    driver.engine.info.result(GUARD_S)
    yield driver
    driver.close()


def test_network_is_called_on_the_engine_thread_only(
    tiny: Path, loaded: LoadedModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    callers: set[str] = set()
    original = type(loaded.network).__call__

    def spy(self: Any, *arguments: Any, **options: Any) -> Any:
        callers.add(threading.current_thread().name)
        return original(self, *arguments, **options)

    monkeypatch.setattr(type(loaded.network), "__call__", spy)
    driver = Driver(lambda: load_batch(str(tiny), max_batch=4, prefill_step=16))
    driver.engine.start()
    driver.engine.info.result(GUARD_S)
    driver.engine.admit(request("row", prompt_of(40)))
    assert driver.ended.get(timeout=GUARD_S).finish == "length"
    driver.close()
    assert callers == {"engine"}


def test_storm_of_admits_and_cancels_from_many_threads(driver: Driver, loaded: LoadedModel) -> None:
    kept: queue.SimpleQueue[Admit] = queue.SimpleQueue()

    def client(number: int) -> None:
        choice = random.Random(number)
        for index in range(12):
            row = request(
                f"{number}-{index}",
                prompt_of(choice.randrange(1, 60), 100 * number + index),
                max_tokens=choice.randrange(1, 12),
            )
            if choice.random() < 0.2:
                driver.engine.cancel(row.key)
            driver.engine.admit(row)
            if choice.random() < 0.5:
                driver.engine.cancel(row.key)
                driver.engine.cancel(row.key)
            else:
                kept.put(row)

    clients = [threading.Thread(target=client, args=(number,)) for number in range(4)]
    for thread in clients:
        thread.start()
    for thread in clients:
        thread.join()
    finished: set[RowKey] = set()
    rows = [kept.get() for _ in range(kept.qsize())]
    while not {row.key for row in rows} <= finished:
        finished.add(driver.ended.get(timeout=GUARD_S).key)
    for row in rows:
        expected = greedy_reference(loaded, row.prompt, row.max_tokens)
        assert driver.ids[row.key] == expected, row.key
    assert driver.dead.empty()


def test_two_engines_in_turn_give_the_same(tiny: Path) -> None:
    results = []
    for _ in range(2):
        driver = Driver(lambda: load_batch(str(tiny), max_batch=4, prefill_step=16))
        driver.engine.start()
        row = request("row", prompt_of(20), sampling=SamplingParams(seed=4))
        driver.engine.admit(row)
        assert driver.ended.get(timeout=GUARD_S).finish == "length"
        driver.close()
        results.append(driver.ids[row.key])
    assert results[0] == results[1]


def test_a_job_after_a_bad_one_runs(driver: Driver, loaded: LoadedModel) -> None:
    driver.engine.admit(request("bad", [10**6]))
    good = request("good", prompt_of(4))
    driver.engine.admit(good)
    ends = [driver.ended.get(timeout=GUARD_S) for _ in range(2)]
    assert {output.key.job_id: output.finish for output in ends} == {
        "bad": "error",
        "good": "length",
    }
    assert driver.ids[good.key] == greedy_reference(loaded, good.prompt, 16)


def test_an_error_in_the_decode_step_ends_the_engine(
    driver: Driver, monkeypatch: pytest.MonkeyPatch, loaded: LoadedModel
) -> None:
    def fail(self: Any, *arguments: Any, **options: Any) -> Any:
        raise RuntimeError("device lost")

    row = request("row", prompt_of(4), max_tokens=400)
    first = threading.Event()
    collect = driver._collect

    def watch(outputs: list[Output]) -> None:
        collect(outputs)
        first.set()

    driver.engine._on_outputs = watch
    driver.engine.admit(row)
    assert first.wait(GUARD_S)
    monkeypatch.setattr(type(loaded.network), "__call__", fail)
    assert str(driver.dead.get(timeout=GUARD_S)) == "device lost"
    driver.engine.join(GUARD_S)


def test_a_model_that_cannot_generate_is_refused_at_load(
    tiny: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(self: MlxBatch) -> None:
        raise RuntimeError("[broadcast_shapes]\nno way")

    monkeypatch.setattr(MlxBatch, "probe", fail)
    driver = Driver(lambda: load_batch(str(tiny)))
    driver.engine.start()
    error = driver.engine.info.exception(GUARD_S)
    assert isinstance(error, ModelError)
    assert str(error) == "tiny fails its first generation: [broadcast_shapes] no way"
    assert driver.dead.get(timeout=GUARD_S) is error


def test_memory_limits(tiny: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    wired: list[int] = []

    def record(limit: int) -> int:
        wired.append(limit)
        return 0

    monkeypatch.setattr(mx, "set_wired_limit", record)
    monkeypatch.setattr(mx, "device_info", lambda: {"max_recommended_working_set_size": 64 << 30})
    driver = Driver(lambda: load_batch(str(tiny)))
    driver.engine.start()
    driver.engine.admit(request("row", prompt_of(4)))
    driver.ended.get(timeout=GUARD_S)
    driver.close()
    assert wired == []
    plan = plan_memory(0)
    assert plan.cache_limit_bytes < plan.total_bytes // 8
    assert mx.set_cache_limit(plan.cache_limit_bytes) == plan.cache_limit_bytes
    assert mx.set_memory_limit(plan.total_bytes) == plan.total_bytes


SCRIPT = """
import sys
from mlxq.worker.engine.load import load_batch
from mlxq.worker.engine.request import Admit, RowKey, SamplingParams
from mlxq.worker.engine.thread import EngineThread
import threading
began = threading.Event()
engine = EngineThread(
    lambda: load_batch(sys.argv[1]),
    on_outputs=lambda outputs: began.set(),
    on_dead=lambda error: began.set(),
)
engine.start()
row = Admit(RowKey("a", 1), [5, 6], [], 400, SamplingParams(presence_penalty=0.1), frozenset())
engine.admit(row)
began.wait(60)
engine.stop()
engine.join()
sys.exit(7)
"""


@pytest.mark.parametrize(("state", "times"), [("busy", 3), ("not loadable", 1)])
def test_the_process_ends_with_its_own_exit_code(tmp_path: Path, state: str, times: int) -> None:
    folder = make_tiny_model(tmp_path / "model")
    if state == "not loadable":
        mx.save_safetensors(str(folder / "model.safetensors"), {"odd.weight": mx.ones(3)})
    for _ in range(times):
        done = subprocess.run(
            [sys.executable, "-c", SCRIPT, str(folder)], capture_output=True, timeout=GUARD_S
        )
        assert done.returncode == 7, done.stderr.decode()

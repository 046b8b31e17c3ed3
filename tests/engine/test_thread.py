"""The engine thread with a fake batch: order, ownership, stalls and death."""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable, Iterator

import pytest

from mlxq.worker.engine.request import Admit, ModelInfo, Output, RowKey, SamplingParams
from mlxq.worker.engine.thread import EngineThread

GUARD_S = 30.0
INFO = ModelInfo("fake", "/nowhere", "f" * 16, 10, 100, frozenset({1}))


def request(name: str, max_tokens: int = 3) -> Admit:
    return Admit(RowKey(name, 1), [5], [], max_tokens, SamplingParams(), frozenset())


class FakeBatch:
    """Gives every row one id per step. `gate` holds a step back; `fault` breaks one."""

    info = INFO

    def __init__(self) -> None:
        self.threads = {threading.current_thread().name}
        self.rows: dict[RowKey, list[int]] = {}
        self.seen: list[str] = []
        self.gate = threading.Event()
        self.gate.set()
        self.stepping = threading.Event()
        self.fault: BaseException | None = None
        self.closed = 0

    @property
    def kv_bytes(self) -> int:
        self._called()
        return 0

    @property
    def busy(self) -> bool:
        self._called()
        return bool(self.rows)

    def admit(self, request: Admit) -> None:
        self._called()
        self.seen.append(f"admit {request.key.job_id}")
        self.rows[request.key] = [request.max_tokens]

    def cancel(self, key: RowKey) -> None:
        self._called()
        self.seen.append(f"cancel {key.job_id}")
        self.rows.pop(key, None)

    def step(self) -> list[Output]:
        self._called()
        self.stepping.set()
        assert self.gate.wait(GUARD_S)
        if self.fault is not None:
            raise self.fault
        outputs = []
        for key, left in list(self.rows.items()):
            left[0] -= 1
            outputs.append(Output(key, [7], None if left[0] else "length"))
            if not left[0]:
                del self.rows[key]
        return outputs

    def close(self) -> None:
        self._called()
        self.closed += 1

    def _called(self) -> None:
        self.threads.add(threading.current_thread().name)


class Driver:
    """An engine thread on a fake batch, with what came out of it."""

    def __init__(self, load: Callable[[], FakeBatch] = FakeBatch) -> None:
        self.outputs: queue.SimpleQueue[list[Output]] = queue.SimpleQueue()
        self.dead: queue.SimpleQueue[BaseException] = queue.SimpleQueue()
        self.on_outputs: Callable[[list[Output]], None] = self.outputs.put
        self.batches: queue.SimpleQueue[FakeBatch] = queue.SimpleQueue()
        self.engine = EngineThread(
            lambda: self._keep(load()),
            on_outputs=lambda outputs: self.on_outputs(outputs),
            on_dead=self.dead.put,
        )

    def _keep(self, batch: FakeBatch) -> FakeBatch:
        self.batches.put(batch)
        return batch

    def start(self) -> FakeBatch:
        self.engine.start()
        assert self.engine.info.result(GUARD_S) is INFO
        return self.batches.get(timeout=GUARD_S)

    def next(self) -> list[Output]:
        return self.outputs.get(timeout=GUARD_S)

    def ended(self) -> bool:
        return self.engine.join(GUARD_S)


@pytest.fixture
def driver() -> Iterator[Driver]:
    driver = Driver()
    yield driver
    driver.engine.stop()


def until(reached: Callable[[], bool]) -> None:
    """Waits for something that the engine thread does on its own."""
    deadline = time.monotonic() + GUARD_S
    while not reached():
        assert time.monotonic() < deadline
        time.sleep(0.001)


def test_one_list_of_outputs_per_step(driver: Driver) -> None:
    batch = driver.start()
    batch.gate.clear()
    driver.engine.admit(request("a", 2))
    assert batch.stepping.wait(GUARD_S)
    driver.engine.admit(request("b", 1))
    batch.gate.set()
    a, b = RowKey("a", 1), RowKey("b", 1)
    assert driver.next() == [Output(a, [7])]
    assert driver.next() == [Output(a, [7], "length"), Output(b, [7], "length")]
    assert driver.engine.steps == 2


def test_all_of_the_batch_runs_on_one_thread_that_is_not_ours(driver: Driver) -> None:
    batch = driver.start()
    driver.engine.admit(request("a"))
    driver.engine.cancel(RowKey("b", 1))
    for _ in range(3):
        driver.next()
    driver.engine.stop()
    assert driver.ended()
    assert batch.threads == {"engine"}
    assert batch.closed == 1


def test_messages_keep_their_order(driver: Driver) -> None:
    batch = driver.start()
    batch.gate.clear()
    driver.engine.admit(request("first", 1))
    assert batch.stepping.wait(GUARD_S)
    driver.engine.cancel(RowKey("early", 1))
    driver.engine.admit(request("early", 1))
    driver.engine.admit(request("gone"))
    driver.engine.cancel(RowKey("gone", 1))
    driver.engine.cancel(RowKey("gone", 1))
    batch.gate.set()
    assert driver.next()[0].key.job_id == "first"
    assert [output.key.job_id for output in driver.next()] == ["early"]
    assert batch.seen[1:] == [
        "cancel early",
        "admit early",
        "admit gone",
        "cancel gone",
        "cancel gone",
    ]


def test_idle_engine_waits_for_a_message_and_does_not_step(driver: Driver) -> None:
    batch = driver.start()
    driver.engine.cancel(RowKey("nobody", 1))
    driver.engine.admit(request("a", 1))
    driver.next()
    driver.engine.cancel(RowKey("a", 1))
    driver.engine.admit(request("b", 1))
    driver.next()
    assert driver.engine.steps == 2
    assert batch.seen == ["cancel nobody", "admit a", "cancel a", "admit b"]


def test_stop_ends_an_idle_engine_and_may_be_repeated(driver: Driver) -> None:
    batch = driver.start()
    driver.engine.stop()
    driver.engine.stop()
    assert driver.ended()
    driver.engine.stop()
    assert batch.closed == 1
    assert driver.dead.empty()


def test_stop_ends_a_busy_engine_after_its_step(driver: Driver) -> None:
    batch = driver.start()
    batch.gate.clear()
    driver.engine.admit(request("a", 1_000_000))
    assert batch.stepping.wait(GUARD_S)
    driver.engine.stop()
    assert not driver.engine.join(0.01), "in a step"
    batch.gate.set()
    assert driver.ended()
    assert driver.engine.steps == 1
    assert driver.next() == [Output(RowKey("a", 1), [7])]
    assert driver.engine.stalled_s == 0.0
    assert batch.closed == 1


def test_stop_before_the_model_is_loaded() -> None:
    loading = threading.Event()

    def load() -> FakeBatch:
        assert loading.wait(GUARD_S)
        return FakeBatch()

    driver = Driver(load)
    driver.engine.start()
    driver.engine.admit(request("a"))
    driver.engine.stop()
    loading.set()
    assert driver.ended()
    assert driver.outputs.empty()
    assert driver.dead.empty()


def test_failed_load_reaches_info_and_on_dead() -> None:
    error = ValueError("no such model")

    def load() -> FakeBatch:
        raise error

    driver = Driver(load)
    driver.engine.start()
    assert driver.engine.info.exception(GUARD_S) is error
    assert driver.dead.get(timeout=GUARD_S) is error
    assert driver.ended()


def test_a_waiter_that_gives_up_does_not_spoil_info(driver: Driver) -> None:
    assert not driver.engine.info.cancel()
    driver.start()


@pytest.mark.parametrize("error", [RuntimeError("no memory"), KeyboardInterrupt()])
def test_step_that_raises_ends_the_thread(driver: Driver, error: BaseException) -> None:
    batch = driver.start()
    batch.fault = error
    driver.engine.admit(request("a"))
    assert driver.dead.get(timeout=GUARD_S) is error
    assert driver.ended()
    assert batch.closed == 1
    assert driver.dead.empty()


def test_callback_that_raises_ends_the_thread(driver: Driver) -> None:
    error = RuntimeError("loop is closed")

    def refuse(outputs: list[Output]) -> None:
        raise error

    driver.on_outputs = refuse
    batch = driver.start()
    driver.engine.admit(request("a"))
    assert driver.dead.get(timeout=GUARD_S) is error
    assert driver.ended()
    assert batch.closed == 1


class Clock:
    """Time that moves only when told to."""

    def __init__(self) -> None:
        self.now = 100.0

    def monotonic(self) -> float:
        return self.now


def test_stall_is_the_time_since_the_last_step_while_there_is_work(
    driver: Driver, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock = Clock()
    monkeypatch.setattr("mlxq.worker.engine.thread.time", clock)
    assert driver.engine.stalled_s == 0.0
    batch = driver.start()
    clock.now += 50.0
    assert driver.engine.stalled_s == 0.0, "idle"

    batch.gate.clear()
    driver.engine.admit(request("a", 2))
    assert batch.stepping.wait(GUARD_S)
    clock.now += 5.0
    assert driver.engine.stalled_s == 5.0, "stuck in the first step"

    batch.stepping.clear()
    holding = threading.Event()

    def hold_the_next(outputs: list[Output]) -> None:
        batch.gate.clear()
        holding.set()

    driver.on_outputs = hold_the_next
    batch.gate.set()
    assert holding.wait(GUARD_S)
    assert batch.stepping.wait(GUARD_S)
    assert driver.engine.stalled_s == 0.0, "a step is progress"
    clock.now += 3.0
    assert driver.engine.stalled_s == 3.0, "stuck in the second step"

    driver.on_outputs = driver.outputs.put
    batch.gate.set()
    driver.next()
    clock.now += 50.0
    until(lambda: driver.engine.stalled_s == 0.0)

    driver.engine.stop()
    assert driver.ended()
    clock.now += 50.0
    assert driver.engine.stalled_s == 0.0, "ended"


def test_an_engine_that_died_at_work_stays_stalled(
    driver: Driver, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock = Clock()
    monkeypatch.setattr("mlxq.worker.engine.thread.time", clock)
    batch = driver.start()
    batch.fault = RuntimeError("lost device")
    driver.engine.admit(request("a"))
    driver.dead.get(timeout=GUARD_S)
    clock.now += 9.0
    assert driver.engine.stalled_s == 9.0

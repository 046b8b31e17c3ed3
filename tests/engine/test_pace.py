"""A chunk takes the time it may, on devices fast and slow, at the start and at any context."""

from __future__ import annotations

from dataclasses import dataclass, replace

import pytest

from mlxq.worker.engine.pace import FIRST_IDS, GROWTH, IDLE_S, LEAST_IDS, SHARE, Pace


@dataclass(frozen=True)
class Device:
    """What a chunk takes: for itself, for each id, and for each of those per id of context."""

    chunk_s: float
    id_s: float
    context_id_s: float
    step_s: float

    def read_s(self, ids: int, context: int) -> float:
        return self.chunk_s + ids * (self.id_s + self.context_id_s * (context + ids / 2))


GPU = Device(chunk_s=1e-3, id_s=5e-6, context_id_s=4e-10, step_s=3e-3)
LAPTOP = Device(chunk_s=2e-2, id_s=1.5e-3, context_id_s=5e-8, step_s=3e-2)
SLOW = Device(chunk_s=0.2, id_s=0.12, context_id_s=1e-5, step_s=0.5)
DEVICES = {"gpu": GPU, "laptop": LAPTOP, "slow": SLOW}


Chunks = list[tuple[int, float]]
"""Ids and seconds of each chunk."""


def read_alone(pace: Pace, device: Device, length: int) -> Chunks:
    """A prompt while nothing decodes."""
    chunks, context = [], 0
    while context < length:
        ids = min(pace.ids(context, decoding=False), length - context)
        seconds = device.read_s(ids, context)
        pace.chunk_alone(ids, context, seconds)
        chunks.append((ids, seconds))
        context += ids
    return chunks


def read_beside(pace: Pace, device: Device, length: int, *, ahead: bool = True) -> Chunks:
    """A prompt beside decode steps. The host runs ahead of the device by a step, or does not."""
    chunks, context, before_s = [], 0, 0.0
    while context < length:
        chunk, seconds = None, 0.0
        if not pace.resting:
            ids = min(pace.ids(context, decoding=True), length - context)
            chunk, seconds = (ids, context), device.read_s(ids, context)
            chunks.append((ids, seconds))
            context += ids
        pace.step(device.step_s + (before_s if ahead else seconds), chunk)
        before_s = seconds
    pace.step(device.step_s + (before_s if ahead else 0.0), None)
    return chunks


@pytest.mark.parametrize("name", DEVICES)
def test_idle_chunks_grow_to_their_time(name: str) -> None:
    chunks = read_alone(Pace(10**9), DEVICES[name], 400_000 if name == "gpu" else 40_000)[:60]
    sizes = [ids for ids, _ in chunks]
    assert sizes[0] == FIRST_IDS
    assert all(after <= GROWTH * max(sizes[: n + 1]) for n, after in enumerate(sizes[1:]))
    least_s = DEVICES[name].read_s(LEAST_IDS, 0)
    late = [seconds for _, seconds in chunks[12:-1]]
    assert all(seconds < 1.5 * max(IDLE_S, least_s) for seconds in late)
    assert all(seconds > 0.6 * IDLE_S for seconds in late)


@pytest.mark.parametrize("ahead", [True, False])
@pytest.mark.parametrize("name", ["gpu", "laptop"])
def test_beside_decoding_rows_a_chunk_takes_its_share_of_a_step(name: str, ahead: bool) -> None:
    device = DEVICES[name]
    pace = Pace(2048)
    pace.step(device.step_s, None)
    read_beside(pace, device, 8192, ahead=ahead)
    chunks = [chunk for _ in range(4) for chunk in read_beside(pace, device, 8192, ahead=ahead)]
    least_s = device.read_s(LEAST_IDS, 8192)
    times = sorted(seconds for _, seconds in chunks)
    assert times[len(times) * 95 // 100] < 1.25 * max(SHARE * device.step_s, least_s)
    assert sum(times) / len(times) > 0.6 * SHARE * device.step_s


def test_a_batch_that_grew_meanwhile_is_noticed() -> None:
    """Under an unbroken stream of prompts no step is without a chunk, but for a rest."""
    pace = Pace(2048)
    pace.step(GPU.step_s, None)
    grown = replace(GPU, step_s=4 * GPU.step_s)
    chunks = [chunk for _ in range(40) for chunk in read_beside(pace, grown, 4096)]
    times = [seconds for _, seconds in chunks[len(chunks) // 2 :]]
    assert sum(times) / len(times) > 0.6 * SHARE * grown.step_s


def test_a_prompt_after_another_starts_with_the_speed_of_no_context() -> None:
    pace = Pace(10**6)
    read_alone(pace, GPU, 400_000)
    ids = pace.ids(0, decoding=False)
    assert GPU.read_s(ids, 0) < 1.5 * IDLE_S
    again = [seconds for _, seconds in read_alone(pace, GPU, 400_000)]
    assert all(0.6 * IDLE_S < seconds < 1.5 * IDLE_S for seconds in again[3:-1])


def test_a_slow_device_never_goes_without_progress_for_long() -> None:
    """On a slow CPU a chunk of 512 ids took over a minute, and the watchdog fired."""
    crawling = Device(chunk_s=0.5, id_s=0.12, context_id_s=0.0, step_s=2.0)
    chunks = read_alone(Pace(2048), crawling, 2_000)
    assert max(seconds for _, seconds in chunks) < 10.0


def test_one_outlier_does_not_last() -> None:
    """The first chunk compiles its kernels."""
    pace = Pace(2048)
    pace.chunk_alone(64, 0, 5.0)
    sizes = [ids for ids, _ in read_alone(pace, GPU, 200_000)]
    assert 2048 in sizes[:16]
    assert set(sizes[20:-1]) == {2048}


def test_beside_rows_of_unknown_speed_the_least_is_read() -> None:
    pace = Pace(2048)
    pace.chunk_alone(2048, 0, 0.01)
    assert pace.ids(0, decoding=True) == LEAST_IDS


def test_no_chunk_exceeds_the_limit() -> None:
    for limit in (1, 5, 40):
        pace = Pace(limit)
        sizes = {ids for ids, _ in read_beside(pace, GPU, 1000)}
        assert max(sizes) <= limit
        assert pace.ids(0, decoding=False) <= limit

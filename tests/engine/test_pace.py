"""A chunk takes the time it may, on devices fast and slow, at the start and at any context."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import ClassVar

import pytest

from mlxq.worker.engine.pace import FEW, FIRST_IDS, IDLE_S, LEAST_IDS, MOST_S, SHARE, TAIL, Pace


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
HOST_BOUND = Device(chunk_s=5e-3, id_s=1e-5, context_id_s=0.0, step_s=5e-3)
LAPTOP = Device(chunk_s=2e-2, id_s=1.5e-3, context_id_s=5e-8, step_s=6e-2)
SLOW = Device(chunk_s=0.2, id_s=0.12, context_id_s=1e-5, step_s=0.5)
DEVICES = {"gpu": GPU, "laptop": LAPTOP, "slow": SLOW}
COMPILING_S = 5.0
ROWS = 32


class Chunks(list[tuple[int, float]]):
    """Ids and seconds of each chunk."""

    @property
    def sizes(self) -> list[int]:
        return [ids for ids, _ in self]

    @property
    def times(self) -> list[float]:
        return sorted(seconds for _, seconds in self)


def read_alone(pace: Pace, device: Device, length: int) -> Chunks:
    """A prompt while nothing decodes."""
    chunks, context = Chunks(), 0
    while context < length:
        ids = pace.ids(length - context, decoding=0)
        seconds = device.read_s(ids, context)
        pace.chunk_alone(ids, seconds)
        chunks.append((ids, seconds))
        context += ids
    return chunks


def read_beside(
    pace: Pace, device: Device, lengths: list[int], *, ahead: bool = True
) -> tuple[Chunks, int]:
    """Prompts beside decode steps, and how many steps that took; what fits a chunk goes together.

    The host runs ahead of the device by a step, or does not.
    """
    chunks, waiting, context, before_s, steps = Chunks(), list(lengths), 0, 0.0, 0
    while waiting:
        chunk, seconds = None, 0.0
        if not pace.resting(decoding=ROWS):
            left, size = waiting[0] - context, pace.size(decoding=ROWS)
            together = size // left if context == 0 else 0
            if together > 1:
                chunk = sum(waiting[:together])
                del waiting[:together]
            else:
                chunk = pace.ids(left, decoding=ROWS)
            seconds = device.read_s(chunk, context)
            if together <= 1:
                context += chunk
                if chunk == left:
                    context = 0
                    waiting.pop(0)
            chunks.append((chunk, seconds))
        pace.step(device.step_s + (before_s if ahead else seconds), chunk, decoding=ROWS)
        before_s = seconds
        steps += 1
    pace.step(device.step_s + (before_s if ahead else 0.0), None, decoding=ROWS)
    return chunks, steps


@pytest.mark.parametrize("name", DEVICES)
def test_idle_chunks_grow_to_their_time(name: str) -> None:
    device = DEVICES[name]
    chunks = read_alone(Pace(10**9), device, 400_000 if name == "gpu" else 40_000)[:60]
    assert chunks[0][0] == FIRST_IDS
    least_s = device.read_s(LEAST_IDS, 40_000)
    late = [seconds for _, seconds in chunks[12:-2]]
    assert all(seconds < 1.6 * max(IDLE_S, least_s) for seconds in late)
    assert all(seconds > 0.6 * IDLE_S for seconds in late)


@pytest.mark.parametrize("ahead", [True, False])
@pytest.mark.parametrize("name", ["gpu", "laptop"])
def test_beside_decoding_rows_a_chunk_takes_its_share_of_a_step(name: str, ahead: bool) -> None:
    device, pace = DEVICES[name], Pace(2048)
    read_beside(pace, device, [8192], ahead=ahead)
    chunks, _ = read_beside(pace, device, [8192] * 4, ahead=ahead)
    times = chunks.times
    budget_s = max(SHARE * device.step_s, device.read_s(LEAST_IDS, 8192))
    assert times[len(times) * 95 // 100] < 1.6 * budget_s
    assert sum(times) / len(times) < 1.2 * budget_s
    assert sum(times) / len(times) > 0.6 * SHARE * device.step_s


@pytest.mark.parametrize("ahead", [True, False])
@pytest.mark.parametrize(("device", "most_steps"), [(GPU, 20), (HOST_BOUND, 60)])
def test_many_short_prompts_go_together_after_a_first_chunk_that_compiled(
    device: Device, most_steps: int, ahead: bool
) -> None:
    """What a forward pass costs for itself is not taken for the time of its ids."""
    pace = Pace(2048)
    pace.chunk_alone(64, COMPILING_S)
    chunks, steps = read_beside(pace, device, [64] * 127, ahead=ahead)
    assert steps <= most_steps
    assert chunks.times[len(chunks) * 95 // 100] < 1.6 * SHARE * device.step_s


def test_a_batch_that_grew_meanwhile_is_noticed() -> None:
    """Under an unbroken stream of prompts no step is without a chunk, but for a rest."""
    pace = Pace(2048)
    read_beside(pace, GPU, [4096])
    grown = replace(GPU, step_s=4 * GPU.step_s)
    chunks, _ = read_beside(pace, grown, [4096] * 40)
    late = Chunks(chunks[len(chunks) // 2 :]).times
    assert sum(late) / len(late) > 0.6 * SHARE * grown.step_s


def test_rows_that_joined_since_do_not_make_chunks_longer() -> None:
    """The first of some long prompts has joined, and the steps of all rows take longer for it."""
    pace = Pace(2048)
    for _ in range(5):
        pace.step(GPU.step_s, None, decoding=ROWS)
    read_beside(pace, GPU, [16_384])
    slower = replace(GPU, step_s=1.6 * GPU.step_s)
    chunks, steps = read_beside(pace, slower, [16_384])
    assert steps > 32, "it has rested"
    times = Chunks(chunks[6:]).times
    assert times[len(times) * 95 // 100] + slower.step_s < 3.0 * GPU.step_s
    chunks, _ = read_beside(pace, slower, [4096] * 80)
    late = Chunks(chunks[len(chunks) // 2 :]).times
    assert sum(late) / len(late) > 0.6 * SHARE * slower.step_s, "but they are no news for ever"


def test_the_more_prompts_wait_the_more_time_they_get() -> None:
    """Or the batch stays half empty while its slots are taken."""
    pace = Pace(10**6)
    read_beside(pace, GPU, [16_384])
    few = pace.size(decoding=32, reading=1)
    assert few == pace.size(decoding=8 * FEW, reading=8)
    assert pace.size(decoding=8 * FEW, reading=16) == pytest.approx(2 * few, abs=2)
    crowd = pace.size(decoding=1, reading=10**6)
    assert crowd == pytest.approx(few * MOST_S / (SHARE * GPU.step_s), rel=0.05)


def test_a_long_prompt_keeps_the_pace_of_however_few_rows() -> None:
    pace = Pace(10**6)
    read_beside(pace, GPU, [16_384])
    alone = pace.ids(10**6, decoding=32)
    assert pace.ids(10**6, decoding=1, reading=5) == alone
    short = 2 * alone
    assert pace.ids(short, decoding=1) == short > pace.ids(short, decoding=32)


def test_the_first_chunk_beside_rows_follows_from_those_alone() -> None:
    pace = Pace(2048)
    read_alone(pace, GPU, 10_000)
    chunks, _ = read_beside(pace, GPU, [8192])
    assert chunks[0][1] < 1.2 * SHARE * GPU.step_s
    assert chunks[0][0] > 4 * FIRST_IDS


def test_a_slow_device_never_goes_without_progress_for_long() -> None:
    """On a slow CPU a chunk of 512 ids took over a minute, and the watchdog fired."""
    crawling = Device(chunk_s=0.5, id_s=0.12, context_id_s=0.0, step_s=2.0)
    chunks = read_alone(Pace(2048), crawling, 2_000)
    assert max(seconds for _, seconds in chunks) < 10.0


def test_one_outlier_does_not_last() -> None:
    """The first chunk compiles its kernels."""
    pace = Pace(2048)
    pace.chunk_alone(64, COMPILING_S)
    sizes = read_alone(pace, GPU, 200_000).sizes
    assert set(sizes[6:-1]) == {2048}


def test_a_small_rest_is_read_along() -> None:
    pace = Pace(2048)
    read_alone(pace, LAPTOP, 40_000)
    size = pace.size(decoding=0)
    assert pace.ids(int(TAIL * size), decoding=0) == int(TAIL * size)
    assert size / 1.5 < pace.ids(2 * size, decoding=0) <= size


def test_sizes_come_again() -> None:
    pace = Pace(2048)
    sizes = {ids for ids, _ in read_alone(pace, LAPTOP, 100_000)[:-1]}
    assert sizes <= {each for n in range(4, 12) for each in (2**n, 3 * 2 ** (n - 1))}


def test_no_chunk_exceeds_the_limit() -> None:
    for limit in (1, 5, 40):
        pace = Pace(limit)
        chunks, _ = read_beside(pace, GPU, [1000])
        assert max(chunks.sizes) <= limit
        assert pace.ids(1000, decoding=0) <= limit
        assert pace.ids(limit + 1, decoding=0) <= limit


def test_the_first_step_beside_new_rows_shows_what_a_step_takes() -> None:
    pace = Pace(2048)
    assert pace.resting(decoding=ROWS)
    pace.step(GPU.step_s, None, decoding=ROWS)
    assert not pace.resting(decoding=ROWS)


def test_steps_of_many_rows_say_nothing_of_few() -> None:
    """Most rows have left: what a step took is taken off, and chunks would seem to be free."""
    pace, few = Pace(2048), 4
    read_alone(pace, LAPTOP, 10_000)
    for _ in range(5):
        pace.step(6 * LAPTOP.step_s, None, decoding=ROWS)
    assert not pace.resting(decoding=ROWS // 2) and pace.resting(decoding=few)
    sizes, before_s = [], 0.0
    for _ in range(30):
        chunk = None if pace.resting(decoding=few) else pace.size(decoding=few, reading=0)
        pace.step(LAPTOP.step_s + before_s, chunk, decoding=few)
        before_s = LAPTOP.read_s(chunk, 0) if chunk else 0.0
        sizes += [chunk] if chunk else []
    assert len(sizes) > 20
    assert max(LAPTOP.read_s(size, 0) for size in sizes) < 1.6 * SHARE * LAPTOP.step_s


class Planning(Device):
    """A plan is made for each new shape, and takes many times what a step does."""

    plan_s = 0.2
    shapes: ClassVar[set[tuple[int, int]]] = set()

    def read_s(self, ids: int, context: int) -> float:
        new = (ids, context) not in self.shapes
        self.shapes.add((ids, context))
        return super().read_s(ids, context) + (self.plan_s if new else 0.0)


def test_chunks_do_not_shrink_for_nothing() -> None:
    """However small, they take as long: a prompt would take as many times that as it has chunks."""
    device, pace = Planning(**vars(GPU)), Pace(2048)
    read_alone(pace, GPU, 10_000)
    chunks, _ = read_beside(pace, device, [8192] * 4)
    assert len(chunks) < 4 * 8192 / 256  # as small as may be, they would be 16 times as many
    calm, _ = read_beside(pace, GPU, [8192] * 4)
    assert calm.times[len(calm) * 95 // 100] < 1.6 * SHARE * GPU.step_s

"""What both sides of a benchmark are given, and what they give back."""

from __future__ import annotations

from itertools import pairwise, product

import msgspec

from ops.lib.bench.measure import percentile

_TASKS = (
    "Explain how {} works.",
    "Write a short story about {}.",
    "What should a child know about {}?",
    "Give three reasons to care about {}.",
)
_SUBJECTS = (
    "a lighthouse",
    "the rain in spring",
    "a steam engine",
    "the night sky",
    "an old library",
    "bread and how it is baked",
    "a river that floods its banks",
    "the first bicycle",
    "a clock tower",
    "snow in the mountains",
    "a wooden boat",
    "the migration of birds",
    "a market on a Sunday",
    "glass and how it is blown",
    "an orchard in autumn",
    "the printing press",
    "a bridge of stone",
    "the tides",
    "a violin",
    "tea and its ways",
    "a desert at night",
    "the invention of paper",
    "a beehive",
    "the telephone",
    "a castle on a hill",
    "rice and its fields",
    "a windmill",
    "the northern lights",
    "a train across a continent",
    "salt",
    "an island without people",
    "the first map of the world",
)
PROMPTS = tuple(task.format(subject) for subject, task in product(_SUBJECTS, _TASKS))
MOST_JOBS = len(PROMPTS)


class Workload(msgspec.Struct, frozen=True):
    """Chat prompts that are submitted at once; each gets exactly `tokens` ids, chosen greedily."""

    prompts: list[str]
    tokens: int


class Trace(msgspec.Struct, frozen=True):
    """One job's output: its ids, and when each arrived, in seconds from the start of the run."""

    ids: list[int]
    at_s: list[float]


class Run(msgspec.Struct, frozen=True):
    """One workload on one side: a trace per prompt, in order."""

    traces: list[Trace]

    @property
    def tokens_per_s(self) -> float:
        """Over the time from the start to the last id of all."""
        end_s = max(trace.at_s[-1] for trace in self.traces)
        return sum(len(trace.ids) for trace in self.traces) / end_s

    def ttft_ms(self, percent: int) -> float:
        """Time to first token, waiting for a slot included."""
        return percentile([1e3 * trace.at_s[0] for trace in self.traces], percent)

    def gap_ms(self, percent: int) -> float:
        """Time between the ids of a job. Ids that arrive in one event are 0 apart."""
        gaps = [
            1e3 * (later - earlier)
            for trace in self.traces
            for earlier, later in pairwise(trace.at_s)
        ]
        return percentile(gaps, percent)

    def tokens_per_arrival(self) -> float:
        """Ids that came together, on average: 1 if every id came by itself."""
        arrivals = sum(len(set(trace.at_s)) for trace in self.traces)
        return sum(len(trace.ids) for trace in self.traces) / arrivals


def check(run: Run, workload: Workload) -> Run:
    """Returns `run`. Raises RuntimeError unless every job has the ids that it should have."""
    for prompt, trace in zip(workload.prompts, run.traces, strict=True):
        if len(trace.ids) != workload.tokens or len(trace.at_s) != workload.tokens:
            raise RuntimeError(f"{prompt!r} got {len(trace.ids)} ids and not {workload.tokens}")
    return run

"""The benchmarks: what they compute from known numbers, and that a short run ends as it should."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from ops.lib.bench.main import main
from ops.lib.bench.measure import Spread, cpu_s, percentile
from ops.lib.bench.through_redis import METRICS
from ops.lib.bench.workload import MOST_JOBS, PROMPTS, Run, Trace, Workload, check
from tests.engine.tiny import make_tiny_model

ROOT = Path(__file__).parents[2]
RUN = Run([Trace([1, 2, 3], [1.0, 1.5, 3.0]), Trace([4, 5, 6], [2.0, 4.0, 4.0])])


def test_a_run_in_numbers() -> None:
    assert RUN.tokens_per_s == 6 / 4
    assert RUN.ttft_ms(50) == 1500
    assert sorted([RUN.gap_ms(1), RUN.gap_ms(99)]) == pytest.approx([15, 1985])
    assert RUN.gap_ms(50) == pytest.approx(1000)
    assert RUN.tokens_per_arrival() == 6 / 5


@pytest.mark.parametrize(
    ("values", "percent", "expected"),
    [([7.0], 95, 7.0), ([1.0, 2.0], 50, 1.5), ([4.0, 1.0, 3.0, 2.0, 5.0], 95, 4.8)],
)
def test_percentiles_interpolate(values: list[float], percent: int, expected: float) -> None:
    assert percentile(values, percent) == pytest.approx(expected)


def test_a_spread_is_median_and_extremes() -> None:
    spread = Spread.of([3.0, 1.0, 123.456789])
    assert spread == Spread(3.0, 1.0, 123.46)
    assert str(spread) == "3.00 (1.00..123)"


def test_missing_ids_are_no_result() -> None:
    assert check(RUN, Workload(["a", "b"], 3)) is RUN
    with pytest.raises(RuntimeError, match="'a' got 3 ids and not 4"):
        check(RUN, Workload(["a", "b"], 4))


def test_prompts_are_distinct() -> None:
    assert len(set(PROMPTS)) == MOST_JOBS == 128


def test_cpu_time_counts_work() -> None:
    before_s = cpu_s(os.getpid())
    while cpu_s(os.getpid()) < before_s + 0.05:
        sum(range(100_000))
    assert cpu_s(os.getpid()) <= sum(os.times()[:2]) + 0.05


def bench(*arguments: str) -> subprocess.CompletedProcess[str]:
    """Runs `ops/bench` in this environment, without setting up another."""
    return subprocess.run(
        [sys.executable, str(ROOT / "ops" / "bench"), *arguments],
        env={**os.environ, "MLXQ_OPS_STARTED": "venv"},
        capture_output=True,
        text=True,
    )


@pytest.mark.timeout(300)
def test_engine_benchmark_reports_both_sides(tmp_path: Path) -> None:
    model = make_tiny_model(tmp_path / "tiny")
    sizes = ["--rounds", "2", "--jobs", "5", "--tokens", "6", "--batch", "3"]
    file = tmp_path / "report.json"
    done = bench(
        "engine", "--part", "redis", "--model", str(model), *sizes,
        "--low-load-jobs", "2", "--json", str(file),
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    line = done.stdout.splitlines()[-1]
    assert file.read_text() == line + "\n"
    report = json.loads(line)
    assert (report["benchmark"], report["rounds"], report["machine"]["model"]) == (
        "engine", 2, "tiny",
    )  # fmt: skip
    report = report["parts"]["redis"]
    for name in METRICS:
        assert set(report[name]) == {"raw", "queue", "ratio"}
        for spread in report[name].values():
            assert_spread(spread)
    assert report["tokens_per_s"]["queue"]["min"] > 0
    assert report["tokens_per_arrival"]["raw"]["median"] == 1
    assert_spread(report["added_ttft_p50_ms"])
    assert report["same_outputs"] == [5, 5]
    assert all(isinstance(met, bool) for met in report["targets_met"].values())


def test_parts_in_one_process(tmp_path: Path) -> None:
    model = make_tiny_model(tmp_path / "tiny", context_length=4096)
    parts = [word for name in ("steps", "joins", "prefix") for word in ("--part", name)]
    sizes = ["--rounds", "2", "--batches", "1", "3", "--steps", "3", "--long", "64"]
    more = ["--running", "2", "--joiners", "2", "--burst", "3", "--shared", "64", "--turns", "2"]
    done = bench("engine", *parts, "--model", str(model), *sizes, *more)
    assert done.returncode == 0, done.stderr
    report = json.loads(done.stdout.splitlines()[-1])["parts"]
    for mix in ("greedy", "seeded", "top_p", "penalties"):
        for rows in (1, 3):
            spreads = report["steps"][f"b{rows}.{mix}"]
            assert set(spreads) == {"raw_ms", "own_ms", "raw/own", "own_greedy/own"}
            assert all(spread["min"] > 0 for spread in spreads.values())
    assert report["joins"]["long"] == 64
    for number in ("interference.gap_p95_ms", "interference.join_max_ms", "burst.first_max_ms"):
        for spread in report["joins"][number].values():
            assert_spread(spread)
    assert report["prefix"]["cold/warm"]["min"] > 0


def assert_spread(spread: dict[str, Any]) -> None:
    assert spread["min"] <= spread["median"] <= spread["max"]


@pytest.mark.parametrize("arguments", [["--jobs", "129"], ["--tokens", "1"], ["--rounds", "none"]])
def test_bad_sizes_are_refused_in_one_line(
    arguments: list[str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", ["ops/bench", "engine", *arguments])
    with pytest.raises(SystemExit) as left:
        main()
    assert left.value.code == 2
    assert (
        capsys.readouterr()
        .err.splitlines()[-1]
        .startswith(f"ops/bench engine: error: argument {arguments[0]}")
    )


def test_a_model_that_is_none_is_reported(tmp_path: Path) -> None:
    done = bench("engine", "--model", str(tmp_path))
    assert done.returncode == 1
    assert "no config.json" in done.stderr

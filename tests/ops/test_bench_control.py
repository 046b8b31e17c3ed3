"""The control-plane benchmark: what it computes, and that a short run ends as it should."""

from __future__ import annotations

import json

import pytest

from ops.lib.bench import load
from ops.lib.bench.control_report import AIMS, LINES, Aim
from ops.lib.bench.workload import Run, Trace
from ops.lib.synthetic import STAMPS
from tests.ops.test_bench import assert_spread, bench


def test_the_rate_is_that_of_the_time_in_which_all_jobs_stream() -> None:
    early = Trace([1, 2, 3, 4], [1.0, 2.0, 3.0, 4.0])
    late = Trace([5, 6, 7, 8], [2.0, 3.0, 4.0, 5.0])
    assert load.tokens_per_s(Run([early, late])) == 2  # 3 and 4, and two of the other's


def test_jobs_that_never_stream_together_have_a_rate_too() -> None:
    run = Run([Trace([1, 2], [1.0, 2.0]), Trace([3, 4], [3.0, 4.0])])
    assert load.tokens_per_s(run) == 1


def test_a_stamp_tells_the_delay_over_its_own_end() -> None:
    at_s = 3 * STAMPS / 1e6 + 0.001
    assert load.stamped_ms(STAMPS - 500, at_s) == pytest.approx(1.5)
    run = Run([Trace([0, 1_000], [0.002, 0.0025])])
    assert load.delays_ms(run) == pytest.approx([2.0, 1.5])


def test_aims_are_met_at_their_bound() -> None:
    assert Aim("a", "rate", least=40_000).verdict(40_000) == "rate >= 40,000: met"
    assert Aim("a", "rate", least=40_000).verdict(39_999) == "rate >= 40,000: missed"
    assert Aim("a", "cost", most=12).verdict(12.1) == "cost <= 12: missed"


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_a_short_run_reports_all_numbers() -> None:
    done = bench("control", "--rounds", "1", "--seconds", "0.1", "--jobs", "32")
    assert done.returncode == 0, done.stderr
    report = json.loads(done.stdout.splitlines()[-1])
    assert (report["benchmark"], report["rounds"], report["jobs"]) == ("control", 1, 32)
    for _, name, beside in LINES:
        assert_spread(report[name])
        assert report[name]["min"] > 0 or name.endswith("_us")  # CPU time comes in hundredths
        if beside:
            assert_spread(report["ratios"][f"{name}/{beside}"])
    assert set(report["targets_met"]) == {aim.name for aim in AIMS}
    assert report["b1.ids_per_event"]["min"] >= 1
    assert all(label in done.stdout for label, _, _ in LINES)

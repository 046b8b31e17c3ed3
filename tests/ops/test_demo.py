"""The demo does what it says, in both views, and Ctrl-C leaves nothing behind."""

from __future__ import annotations

import io
import os
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from rich.console import Console

from ops.lib.arguments import LEAST_TOKENS
from ops.lib.demo_view import Board, LiveView, Pane, PlainView, summary
from tests.engine.tiny import make_tiny_model
from tests.ops.processes import all_gone

ROOT = Path(__file__).parents[2]
DEMO = "from ops.lib.demo import main; raise SystemExit(main())"
ON_A_MODEL = """
import sys
from pathlib import Path
from ops.lib import demo

demo.demo_model = lambda folder=Path(sys.argv.pop(1)): folder
raise SystemExit(demo.main())
"""


@contextmanager
def demo(program: str, *arguments: str) -> Iterator[subprocess.Popen[str]]:
    """`ops/demo --plain`, killed in the end if the test has not seen it through."""
    command = [sys.executable, "-c", program, *arguments, "--plain"]
    environment = {**os.environ, "COLUMNS": "120"}
    with subprocess.Popen(
        command, cwd=ROOT, env=environment, stdout=subprocess.PIPE, text=True
    ) as process:
        try:
            yield process
        finally:
            process.kill()


def pids_in(text: str) -> list[int]:
    found = [int(pid) for pid in re.findall(r"\(pid (\d+)\)", text)]
    assert len(found) == 3, text  # the server and two workers
    return found


@pytest.mark.model
@pytest.mark.slow
@pytest.mark.timeout(400)
def test_demo_aborts_one_kills_a_worker_and_loses_nothing() -> None:
    with demo(DEMO, "--max-tokens", str(LEAST_TOKENS)) as process:
        out, _ = process.communicate()
    assert process.returncode == 0, out
    rows = [line.split() for line in out.splitlines() if re.match(r" +\d +\w", line)]
    jobs = {int(row[0]): row for row in rows if row[-1] in ("stop", "length", "aborted")}
    assert sorted(jobs) == list(range(1, 9)), out
    assert [number for number, row in jobs.items() if row[-1] == "aborted"] == [4]
    resumed = re.findall(r"job (\d) goes on at token \d+ on mac-\d", out)
    assert resumed and all(">" in jobs[int(number)] for number in resumed), out
    assert re.search(r"worker mac-\d is killed \(kill -9\)", out)
    assert all_gone(pids_in(out))


@pytest.mark.slow
def test_ctrl_c_in_mid_stream_ends_all_processes(tmp_path: Path) -> None:
    model = make_tiny_model(tmp_path / "tiny")
    with demo(ON_A_MODEL, str(model), "--max-tokens", "400") as process:
        assert process.stdout is not None
        seen = ""
        for line in process.stdout:
            seen += line
            if "is aborted by its submitter" in line:
                break
        pids = pids_in(seen)
        # As a terminal does it: the server is in our group and gets the signal as well.
        os.kill(pids[0], signal.SIGINT)
        process.send_signal(signal.SIGINT)
        process.stdout.read()
        assert process.wait() == 130, seen
    assert all_gone(pids)


def board() -> Board:
    panes = [Pane(number, f"{number} long question " * 9) for number in range(1, 9)]
    for pane in panes[:4]:
        pane.finish = "aborted"
        pane.workers += ["mac-1", "mac-2"]
        pane.state = "streaming"
        pane.add("some words and more of them \U0001f40b " * 40, 300)
    return Board(panes, stage="testing")


@pytest.mark.parametrize(("width", "height"), [(80, 24), (160, 45), (200, 20), (100, 60)])
def test_live_view_fits_the_terminal(width: int, height: int) -> None:
    console = Console(file=io.StringIO(), width=width, height=height, force_terminal=True)
    view = LiveView(board(), console)
    for number in range(20):
        view.say(f"news {number}")
    lines = console.render_lines(view.render(), pad=False)
    text = ["".join(segment.text for segment in line) for line in lines]
    assert len(lines) <= height
    assert "news 19" in text[-1]
    assert all(any(f" {number} " in line for line in text) for number in range(1, 9))


def test_plain_view_prints_all_text_once(capsys: pytest.CaptureFixture[str]) -> None:
    view, pane = PlainView(), Pane(1, "question", workers=["mac-1"])
    words = [f"w{number} " for number in range(100)]
    for word in words:
        pane.add(word, 1)
        view.streamed(pane)
    pane.finish = "stop"
    view.streamed(pane)
    view.streamed(pane)
    lines = capsys.readouterr().out.splitlines()
    assert all("[1 mac-1] " in line for line in lines)
    assert " ".join(line.partition("] ")[2] for line in lines).split() == "".join(words).split()


@pytest.mark.parametrize("width", [80, 120, 200])
def test_summary_cuts_prompts_alone(width: int) -> None:
    console = Console(file=io.StringIO(), width=width)
    console.print(summary(board(), console.width))
    assert isinstance(console.file, io.StringIO)
    text = console.file.getvalue()
    assert "…" not in text
    assert text.count("mac-1 > mac-2") == 4

"""How the demo is shown: live in a terminal, or as lines. The scenario only writes to `Board`."""

from __future__ import annotations

import time
from collections import deque
from dataclasses import dataclass, field
from types import TracebackType
from typing import Protocol, Self

from rich.box import SIMPLE_HEAD
from rich.columns import Columns
from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.panel import Panel
from rich.table import Table
from rich.text import Text

RATE_WINDOW_S = 3.0
OTHER_COLUMNS = 70  # characters that the table needs beside the prompts
STYLE = {
    "waiting": "dim",
    "streaming": "cyan",
    "worker lost": "bold red",
    "aborted": "yellow",
    "failed": "bold red",
}


@dataclass
class Pane:
    """One job as it is shown. `workers` holds one name per attempt. Times in seconds."""

    number: int
    question: str
    state: str = "waiting"
    text: str = ""
    tokens: int = 0
    workers: list[str] = field(default_factory=list)
    first_token_s: float | None = None
    finish: str = ""
    stamps: deque[tuple[float, int]] = field(default_factory=deque)

    def add(self, text: str, tokens: int) -> None:
        self.text += text
        self.tokens += tokens
        self.stamps.append((time.monotonic(), tokens))

    @property
    def ended(self) -> bool:
        return bool(self.finish)

    def tokens_per_s(self) -> float:
        """Over the last seconds; 0 for a job that stands still."""
        since = time.monotonic() - RATE_WINDOW_S
        while self.stamps and self.stamps[0][0] < since:
            self.stamps.popleft()
        return sum(tokens for _, tokens in self.stamps) / RATE_WINDOW_S


@dataclass
class Board:
    """All that there is to see."""

    panes: list[Pane]
    stage: str = ""
    news: deque[str] = field(default_factory=lambda: deque(maxlen=8))

    def tokens_per_s(self) -> float:
        return sum(pane.tokens_per_s() for pane in self.panes)


class View(Protocol):
    """What the scenario tells whoever shows it."""

    def say(self, news: str) -> None: ...

    def streamed(self, pane: Pane) -> None: ...


class LiveView:
    """Redraws the whole board several times a second; leaves nothing on the screen."""

    def __init__(self, board: Board, console: Console) -> None:
        self.board = board
        self.console = console
        self.started = time.monotonic()
        self.live = Live(
            get_renderable=self.render, console=console, refresh_per_second=8, transient=True
        )

    def __enter__(self) -> Self:
        self.live.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.live.stop()

    def say(self, news: str) -> None:
        self.board.news.append(f"{time.monotonic() - self.started:6.1f} s  {news}")

    def streamed(self, pane: Pane) -> None:
        """Nothing to do: the next redraw shows it."""

    def render(self) -> RenderableType:
        console = self.console
        across = 4 if console.width >= 140 else 2
        down = -(-len(self.board.panes) // across)
        news = list(self.board.news)[-max(3, console.height - 4 * down - 2) :]
        height = max(4, min(10, (console.height - len(news) - 2) // down))
        width = console.width // across - 1
        title = Text(f"mlxq  {self.board.stage}  ", style="bold")
        title.append(f"{self.board.tokens_per_s():.0f} tok/s", style="bold green")
        panes = [pane_panel(pane, console, width, height) for pane in self.board.panes]
        return Group(title, Columns(panes, padding=(0, 1)), *map(Text, news))


def pane_panel(pane: Pane, console: Console, width: int, height: int) -> Panel:
    """The end of the pane's text, under the worker that it comes from."""
    style = STYLE.get(pane.state, "green")
    lines = Text(pane.text).wrap(console, width - 4)
    body = Text("\n").join(lines[-(height - 2) :])
    rate = f" {pane.tokens_per_s():.0f} tok/s" if pane.state == "streaming" else ""
    return Panel(
        body if pane.text else Text(pane.question, style="dim italic"),
        title=f"{pane.number} {' > '.join(pane.workers)}",
        subtitle=f"{pane.state} {pane.tokens} tokens{rate}",
        border_style=style,
        width=width,
        height=height,
    )


class PlainView:
    """One line per happening, and the text of each stream in pieces, for logs and CI."""

    PIECE = 72  # characters

    def __init__(self) -> None:
        self.started = time.monotonic()
        self.shown: dict[int, int] = {}

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None: ...

    def say(self, news: str) -> None:
        print(f"{time.monotonic() - self.started:6.1f} s  {news}", flush=True)

    def streamed(self, pane: Pane) -> None:
        """Writes what the pane has gained: a line at a time, all of it at a pause or the end."""
        new = pane.text[self.shown.get(pane.number, 0) :]
        whole = pane.ended or pane.state == "worker lost"
        if len(new) < self.PIECE and not (whole and new):
            return
        self.shown[pane.number] = len(pane.text)
        where = pane.workers[-1] if pane.workers else "-"
        self.say(f"[{pane.number} {where}] {' '.join(new.split())}")


def summary(board: Board, width: int) -> Table:
    """The table at the end, one row per job; prompts are cut to what `width` leaves for them."""
    table = Table(title="What became of each job", title_style="bold", box=SIMPLE_HEAD)
    for name in ("job", "prompt", "workers", "attempts", "tokens", "first token", "finish"):
        number = name in ("job", "attempts", "tokens", "first token")
        table.add_column(name, justify="right" if number else "left", no_wrap=True)
    for pane in board.panes:
        table.add_row(
            str(pane.number),
            pane.question[: max(8, width - OTHER_COLUMNS)],
            " > ".join(pane.workers),
            str(len(pane.workers)),
            str(pane.tokens),
            "-" if pane.first_token_s is None else f"{pane.first_token_s:.2f} s",
            pane.finish,
        )
    return table

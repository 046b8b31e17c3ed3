"""One output's ids to the text that may be shown: whole characters, no stop, nothing that may
still become one (PROTOCOL section 7, rules 5 and 6).
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from typing import NamedTuple

from mlxq.worker.chat import Tokenizer


class Emitted(NamedTuple):
    """What a batch of ids released.

    taken   how many of the ids belong to the output: all, or up to and with the one that
            completed a stop
    """

    text: str
    taken: int
    stopped: bool


class OutputStage:
    """Detokenises one output and ends it at a stop. Loop thread.

    Ids go through one by one, so text and ids depend on the ids alone, not on their grouping.
    Text of the first `min_tokens` ids is no part of a stop.
    """

    def __init__(self, tokenizer: Tokenizer, stops: Sequence[str], min_tokens: int = 0) -> None:
        self._detokenizer = tokenizer.detokenizer()
        self._matcher = StopMatcher(stops) if stops else None
        self._min_tokens = min_tokens
        self._shown: list[str] = []
        self.ids: list[int] = []
        self.stopped = False

    @property
    def text(self) -> str:
        """All text emitted so far."""
        return "".join(self._shown)

    def feed(self, ids: Sequence[int]) -> Emitted:
        """The text that `ids` release. After a stop nothing is taken any more."""
        if self.stopped:
            return Emitted("", 0, True)
        start, before = len(self._shown), len(self.ids)
        for token in ids:
            self.ids.append(token)
            text = self._detokenizer.feed(token)
            if text and self._matcher and len(self.ids) > self._min_tokens:
                text = self._matcher.feed(text)
                self.stopped = self._matcher.stopped
            if text:
                self._shown.append(text)
            if self.stopped:
                break
        return Emitted("".join(self._shown[start:]), len(self.ids) - before, self.stopped)

    def flush(self) -> str:
        """At a natural end (EOS, length): the text that was held back."""
        if self.stopped:
            return ""
        text = self._detokenizer.flush()
        if self._matcher:
            text = self._matcher.feed(text) + self._matcher.flush()
        self._shown.append(text)
        return text


class StopMatcher:
    """Cuts a text before the stop that is completed first; of two at once, before the longer.

    An automaton over characters (Aho and Corasick, CACM 18(6), 1975): its state is the longest
    tail of the text that could begin a stop, and that tail is what is held back.
    """

    def __init__(self, stops: Sequence[str]) -> None:
        self._next: list[dict[str, int]] = [{}]
        self._depth = [0]
        self._match = [0]  # length of the longest stop that ends in a state
        for stop in stops:
            self._match[self._insert(stop)] = len(stop)
        self._fail = [0] * len(self._next)
        self._link()
        self._state = 0
        self._held = ""
        self.stopped = False

    def _insert(self, stop: str) -> int:
        state = 0
        for char in stop:
            if char not in self._next[state]:
                self._next[state][char] = len(self._next)
                self._next.append({})
                self._depth.append(self._depth[state] + 1)
                self._match.append(0)
            state = self._next[state][char]
        return state

    def _link(self) -> None:
        """Points each state, breadth first, at the state of its longest proper suffix."""
        queue = deque(self._next[0].values())
        while queue:
            state = queue.popleft()
            for char, child in self._next[state].items():
                self._fail[child] = self._step(self._fail[state], char)
                self._match[child] = self._match[child] or self._match[self._fail[child]]
                queue.append(child)

    def _step(self, state: int, char: str) -> int:
        while state and char not in self._next[state]:
            state = self._fail[state]
        return self._next[state].get(char, 0)

    def feed(self, text: str) -> str:
        """The text that is now certain to come before any stop."""
        if not self._state and self._next[0].keys().isdisjoint(text):
            return text
        end = len(self._held)
        self._held += text
        for char in text:
            self._state = self._step(self._state, char)
            end += 1
            if length := self._match[self._state]:
                self.stopped = True
                return self._release(end - length)
        return self._release(end - self._depth[self._state])

    def flush(self) -> str:
        """At the end of the text: the tail that did not become a stop."""
        return "" if self.stopped else self._release(len(self._held))

    def _release(self, end: int) -> str:
        text, self._held = self._held[:end], self._held[end:]
        return text

"""What an output shows: a function of its ids alone, cut at stops, never taken back."""

from __future__ import annotations

import pytest
from hypothesis import example, given, strategies as st

from mlxq.worker.output import Emitted, OutputStage, StopMatcher
from tests.text.samples import reference, sample

STOPS = st.lists(st.text("ab é👩", min_size=1, max_size=5), max_size=4)


def stage(stops: list[str], kind: str = "byte_level") -> OutputStage:
    return OutputStage(sample(kind)[0], stops)


def ids_for(*tokens: str) -> list[int]:
    ids: list[int] = sample("byte_level")[1].convert_tokens_to_ids(list(tokens))
    return ids


# Tokens in which stops over "ab é👩" begin, end and lie whole, halves of characters, and an EOS.
FEW = ids_for(*"ab", "ab", "ba", "aab", "bab", "Ġ", "Ã", "©", "ðŁ", "ĳ", "æĹ", "<|im_end|>")
IDS = st.lists(st.sampled_from(FEW), max_size=30) | st.lists(st.integers(0, 285), max_size=30)


def expected(texts: list[str], stops: list[str]) -> tuple[str, int, bool]:
    """The rule of the protocol by brute force: shown text, ids taken, stopped."""
    text = ""
    for taken, new in enumerate(texts, 1):
        text += new
        found = [(at + len(stop), at) for stop in stops if (at := text.find(stop)) >= 0]
        if found:
            return text[: min(found)[1]], taken, True
    return text[: len(text) - longest_tail(text, stops)], len(texts), False


def longest_tail(text: str, stops: list[str]) -> int:
    """Characters at the end of `text` that could begin a stop."""
    for length in range(min(len(text), max(map(len, stops), default=0)), 0, -1):
        if any(stop.startswith(text[-length:]) for stop in stops):
            return length
    return 0


def chunked(ids: list[int], cuts: list[int]) -> list[list[int]]:
    bounds = [0, *sorted(cut % (len(ids) + 1) for cut in cuts), len(ids)]
    return [ids[start:end] for start, end in zip(bounds, bounds[1:], strict=False)]


@given(ids=IDS, stops=STOPS)
def test_every_prefix_shows_what_the_rule_says(ids: list[int], stops: list[str]) -> None:
    detokenizer = sample("byte_level")[0].detokenizer()
    texts = [detokenizer.feed(token) for token in ids]
    under_test = stage(stops)
    for count, token in enumerate(ids, 1):
        shown = under_test.text
        emitted = under_test.feed([token])
        text, taken, stopped = expected(texts[:count], stops)
        assert under_test.text == text == shown + emitted.text
        assert (under_test.ids, under_test.stopped) == (ids[:taken], stopped)


@given(ids=IDS, stops=STOPS, min_tokens=st.integers(0, 8))
def test_no_stop_begins_before_min_tokens(
    ids: list[int], stops: list[str], min_tokens: int
) -> None:
    under_test = OutputStage(sample("byte_level")[0], stops, min_tokens)
    for token in ids:
        under_test.feed([token])
    texts = [*map(sample("byte_level")[0].detokenizer().feed, ids)]
    exempt = "".join(texts[:min_tokens])
    text, taken, stopped = expected(texts[min_tokens:], stops)
    assert under_test.text == exempt + text
    assert under_test.ids == ids[: min(len(ids), min_tokens) + taken]
    assert under_test.stopped == stopped


@given(ids=IDS, stops=STOPS, cuts=st.lists(st.integers(0, 100), max_size=8))
def test_grouping_makes_no_difference(ids: list[int], stops: list[str], cuts: list[int]) -> None:
    alone, grouped = stage(stops), stage(stops)
    for token in ids:
        alone.feed([token])
    emitted = [grouped.feed(chunk) for chunk in chunked(ids, cuts)]
    assert "".join(part.text for part in emitted) == grouped.text == alone.text
    assert sum(part.taken for part in emitted) == len(grouped.ids)
    assert grouped.ids == alone.ids
    assert grouped.stopped == alone.stopped
    assert grouped.flush() == alone.flush()


@given(ids=IDS, stops=STOPS)
def test_flush_gives_the_rest_unless_stopped(ids: list[int], stops: list[str]) -> None:
    under_test = stage(stops)
    under_test.feed(ids)
    shown, rest = under_test.text, under_test.flush()
    assert under_test.text == shown + rest
    if under_test.stopped:
        assert rest == ""
    else:
        assert shown + rest == reference("byte_level", ids)


@pytest.mark.parametrize("kind", ["llama", "gemma", "metaspace", "wordpiece"])
@given(data=st.data())
def test_text_never_holds_a_stop(kind: str, data: st.DataObject) -> None:
    ids = data.draw(st.lists(st.integers(0, len(sample(kind)[1]) - 1), max_size=30))
    stops = data.draw(st.lists(st.sampled_from(["ab", "the", "b a", " ", "\ufffd"]), min_size=1))
    under_test = stage(stops, kind)
    under_test.feed(ids)
    under_test.flush()
    assert not any(stop in under_test.text for stop in stops)


@pytest.mark.parametrize(
    ("stops", "tokens", "emitted", "rest"),
    [
        (["aab"], ["a", "a", "ab", "b"], [("", 1), ("", 1), ("a", 1), ("", 0)], ""),
        (["aab"], ["a", "aab", "b"], [("", 1), ("a", 1), ("", 0)], ""),
        (["hello the"], ["xy", "hel", "lo", "Ġthe"], [("xy", 1), ("", 1), ("", 1), ("", 1)], ""),
        # What began like a stop and went another way comes out, less what may begin one anew.
        (["aab!"], ["aab", "aa"], [("", 1), ("aab", 1)], "aa"),
        # Of a stop and a longer one that begins with it, the shorter is complete first.
        (["ab", "abba"], ["x", "ab"], [("x", 1), ("", 1)], ""),
        # A stop inside a longer one is complete first, though it begins later.
        (["xaby", "ab"], ["x", "ab"], [("", 1), ("x", 1)], ""),
        # Of two that are complete at the same character, the longer is cut out.
        (["b", "aab"], ["x", "aab"], [("x", 1), ("", 1)], ""),
        # A stop inside one token: the text before it is shown, what follows never.
        (["ell"], ["xy", "hello"], [("xy", 1), ("h", 1)], ""),
        # Characters in several ids; the first emoji shares three of four bytes with the stop.
        (["é"], ["a", "Ã", "©"], [("a", 1), ("", 1), ("", 1)], ""),
        (["👩"], ["ðŁ", "ĳ", "¨", "ðŁĳ", "©"], [("", 1), ("", 1), ("👨", 1), ("", 1), ("", 1)], ""),
        # The first of two joined emoji is whole, and shown; half of the joiner is held back.
        ([], ["ðŁĳ", "©", "â", "Ģ"], [("", 1), ("👩", 1), ("", 1), ("", 1)], "\ufffd"),
        (["ab"], ["a", "<|im_end|>"], [("", 1), ("", 1)], "a"),
        (["a\ufffd"], ["a", "Ã"], [("", 1), ("", 1)], ""),
    ],
)
def test_golden(
    stops: list[str], tokens: list[str], emitted: list[tuple[str, int]], rest: str
) -> None:
    under_test = stage(stops)
    parts = [under_test.feed([token]) for token in ids_for(*tokens)]
    assert [(part.text, part.taken) for part in parts] == emitted
    assert under_test.flush() == rest


def test_a_group_is_taken_up_to_the_id_that_completes_a_stop() -> None:
    under_test = stage(["lo the"])
    ids = ids_for("xy", "hello", "Ġthe", "a", "b")
    assert under_test.feed([]) == Emitted("", 0, False)
    assert under_test.feed(ids) == Emitted("xyhel", 3, True)
    assert under_test.feed(ids) == Emitted("", 0, True)
    assert (under_test.ids, under_test.text) == (ids[:3], "xyhel")


@given(text=st.text("ab"), stops=st.lists(st.text("ab", min_size=1, max_size=6), min_size=1))
@example(text="abbabaa", stops=["abab"])
@example(text="aabaa", stops=["b", "aaa"])
def test_matcher_holds_the_longest_tail_that_could_begin_a_stop(
    text: str, stops: list[str]
) -> None:
    shown, taken, stopped = expected(list(text), stops)
    matcher = StopMatcher(stops)
    assert "".join(map(matcher.feed, text[:taken])) == shown
    assert matcher.stopped == stopped
    assert shown + matcher.flush() == (shown if stopped else text)

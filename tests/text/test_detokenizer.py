"""Ids to text: as transformers decodes them at once, and no character ever taken back."""

from __future__ import annotations

import codecs
import re

import pytest
from hypothesis import given, strategies as st
from transformers import PreTrainedTokenizerFast

from mlxq.worker.chat import Tokenizer
from mlxq.worker.detokenizer import REPLACEMENT, PieceDetokenizer, WindowDetokenizer
from tests.text.samples import ALL, reference, sample

TEXTS = [
    "hello",
    " the ab",
    "  aab\n",
    "日本 é",
    "👩\u200d👩\u200d👧",
    "a\u0301 🏳️\u200d🌈 ",
    "नमस्ते",
    "\x00\x7f",
]
BYTE_TOKEN = re.compile(r"<0x(..)>")


def deltas(kind: str, ids: list[int]) -> tuple[list[str], str]:
    """The text that each id releases, and what the flush adds."""
    detokenizer = sample(kind)[0].detokenizer()
    return [detokenizer.feed(token) for token in ids], detokenizer.flush()


def ids_of(kind: str, max_size: int = 40) -> st.SearchStrategy[list[int]]:
    """Any ids: of whole and split characters, of special tokens, and of no token at all."""
    return st.lists(st.integers(0, len(sample(kind)[1]) + 2), max_size=max_size)


def utf8_of(kind: str, ids: list[int]) -> bytes:
    """The bytes that SentencePiece-style ids stand for, special tokens left out."""
    inner = sample(kind)[1]
    tokens = inner.convert_ids_to_tokens([token for token in ids if token < len(inner)])
    return b"".join(
        bytes.fromhex(byte[1])
        if (byte := BYTE_TOKEN.fullmatch(token))
        else token.replace("▁", " ").encode()
        for token in tokens
        if token not in inner.all_special_tokens
    )


def test_which_tokenizers_get_the_table() -> None:
    kinds = {kind: type(sample(kind)[0].detokenizer()) for kind in ALL}
    assert {kind for kind, made in kinds.items() if made is PieceDetokenizer} == {
        "byte_level",
        "llama",
        "gemma",
    }
    assert set(kinds.values()) == {PieceDetokenizer, WindowDetokenizer}


def test_a_tokenizer_that_decodes_in_a_way_of_its_own_gets_no_table() -> None:
    class Loud(PreTrainedTokenizerFast):  # type: ignore[misc]
        def _decode(self, token_ids: list[int], **options: bool) -> str:
            return str(super()._decode(token_ids, **options)).upper()

    _, inner = sample("byte_level")
    detokenizer = Tokenizer(Loud(tokenizer_object=inner.backend_tokenizer)).detokenizer()
    ids = inner.encode("hello the é")
    assert "".join(map(detokenizer.feed, ids)) + detokenizer.flush() == "HELLO THE É"


@pytest.mark.parametrize("kind", ALL)
@given(text=st.lists(st.sampled_from(TEXTS)).map("".join) | st.text())
def test_text_equals_decoding_at_once(kind: str, text: str) -> None:
    ids = sample(kind)[0].encode(text)
    shown, rest = deltas(kind, ids)
    assert "".join(shown) + rest == reference(kind, ids)


@pytest.mark.parametrize("kind", ["byte_level", "metaspace", "wordpiece", "words_alone"])
@given(data=st.data())
def test_any_ids_equal_decoding_at_once(kind: str, data: st.DataObject) -> None:
    ids = data.draw(ids_of(kind))
    shown, rest = deltas(kind, ids)
    assert "".join(shown) + rest == reference(kind, ids)


@given(ids=ids_of("byte_level"))
def test_byte_level_holds_back_no_more_than_one_unfinished_character(ids: list[int]) -> None:
    shown, _ = deltas("byte_level", ids)
    for count in range(len(ids) + 1):
        text, whole = "".join(shown[:count]), reference("byte_level", ids[:count])
        # Two where Python takes the first two bytes of a surrogate for half a character.
        assert whole in (text, text + REPLACEMENT, text + REPLACEMENT * 2)


@pytest.mark.parametrize("kind", ["llama", "gemma"])
@given(data=st.data())
def test_byte_tokens_give_all_whole_characters_at_once(kind: str, data: st.DataObject) -> None:
    ids = data.draw(ids_of(kind))
    shown, rest = deltas(kind, ids)
    for count in range(len(ids) + 1):
        whole = codecs.getincrementaldecoder("utf-8")("replace").decode(utf8_of(kind, ids[:count]))
        assert "".join(shown[:count]) == (whole.removeprefix(" ") if kind == "llama" else whole)
    whole = utf8_of(kind, ids).decode("utf-8", "replace")
    assert "".join(shown) + rest == (whole.removeprefix(" ") if kind == "llama" else whole)


@pytest.mark.parametrize("kind", ["llama", "gemma"])
@given(data=st.data())
def test_byte_tokens_that_are_utf8_equal_decoding_at_once(kind: str, data: st.DataObject) -> None:
    inner = sample(kind)[1]
    characters = st.characters(exclude_categories=["Cs"]).map(
        lambda char: inner.convert_tokens_to_ids([f"<0x{byte:02X}>" for byte in char.encode()])
    )
    pieces = st.integers(0, 2) | st.integers(259, len(inner) - 1)
    groups = data.draw(st.lists(characters | pieces.map(lambda token: [token]), max_size=30))
    ids = [token for group in groups for token in group]
    shown, rest = deltas(kind, ids)
    assert "".join(shown) + rest == reference(kind, ids)


@given(text=st.text(st.characters(exclude_categories=["Cs"], exclude_characters=REPLACEMENT)))
def test_python_tokenizer_gives_each_character_with_its_last_byte(text: str) -> None:
    ids = [byte + 3 for byte in text.encode()]  # ids 0 to 2 are special
    shown, rest = deltas("byte_ids", ids)
    expected = [part for char in text for part in [""] * (len(char.encode()) - 1) + [char]]
    assert (shown, rest) == (expected, "")


@pytest.mark.parametrize(
    ("kind", "tokens", "shown", "rest"),
    [
        # Four bytes of one emoji, the last two of them ids of their own.
        ("byte_level", ["ðŁ", "ĳ", "©"], ["", "", "👩"], ""),
        ("byte_level", ["ðŁĳ"], [""], "\ufffd"),
        ("byte_level", ["ðŁĳ", "h", "©"], ["", "\ufffdh", "\ufffd"], ""),
        ("byte_level", ["a", "<|im_end|>", "Ġthe"], ["a", "", " the"], ""),
        # A special token between two halves of a character does not part them.
        ("byte_level", ["æĹ", "<|im_end|>", "¥"], ["", "", "日"], ""),
        ("byte_level", ["<think>", "漢字", "caf\u00e9"], ["<think>", "漢字", "caf"], "\ufffd"),
        ("llama", ["▁the", "▁hello"], ["the", " hello"], ""),
        ("llama", ["<s>", "▁", "▁the"], ["", "", " the"], ""),
        ("llama", ["<0x20>", "<0x20>"], ["", " "], ""),
        ("gemma", ["▁the", "▁hello"], [" the", " hello"], ""),
        ("gemma", ["<0xF0>", "<0x9F>", "<0x91>", "<0xA9>"], ["", "", "", "👩"], ""),
        ("gemma", ["<0xE6>", "<0x97>", "the"], ["", "", "\ufffdthe"], ""),
        # transformers makes U+FFFD of the whole run here, the shown "a" included.
        ("gemma", ["<0x61>", "<0xE6>"], ["a", ""], "\ufffd"),
        ("metaspace", ["▁the", "▁hello", "ab"], ["the", " hello", "ab"], ""),
        ("metaspace_bytes", ["a", "<0xC3>", "<0xA9>", "b"], ["a", "", "é", "b"], ""),
        ("wordpiece", ["do", "n't", "the", "##ab", ","], ["do", "n't", " the", "ab", ","], ""),
    ],
)
def test_golden(kind: str, tokens: list[str], shown: list[str], rest: str) -> None:
    ids = sample(kind)[1].convert_tokens_to_ids(tokens)
    assert deltas(kind, ids) == (shown, rest)


@given(ids=st.lists(st.integers(0, 9)))
def test_window_stays_short_on_ids_without_text(ids: list[int]) -> None:
    longest = 0

    def decode(window: list[int]) -> str:
        nonlocal longest
        longest = max(longest, len(window))
        return "".join("xyz\ufffd"[token] for token in window if token < 4)

    detokenizer = WindowDetokenizer(decode)
    text = "".join(map(detokenizer.feed, ids)) + detokenizer.flush()
    assert longest <= 2 * WindowDetokenizer.MAX_HELD
    assert text.replace(REPLACEMENT, "") == decode(ids).replace(REPLACEMENT, "")

"""Token ids to text, one id at a time, never taking a character back.

`PieceDetokenizer` serves byte-level BPE and Llama-style SentencePiece tokenizers, which nearly all
language models have: there an id stands for fixed UTF-8 bytes, so the text is one incremental
UTF-8 decoding. `WindowDetokenizer` serves the rest by decoding the last few ids again.
`tokenizers.decoders.DecodeStream` fits neither: it raises when byte tokens turn out not to be
UTF-8, and loses characters of byte-level output that is not.
"""

from __future__ import annotations

import codecs
import json
import re
from collections.abc import Callable
from typing import Any, Final, Protocol

REPLACEMENT: Final = "\ufffd"

_BYTE_TOKEN = re.compile(r"<0x([0-9A-Fa-f]{2})>")
_utf8_decoder = codecs.getincrementaldecoder("utf-8")


class Detokenizer(Protocol):
    """The text of one output. What `feed` gives depends on the ids so far and nothing else."""

    def feed(self, token: int) -> str:
        """The text that `token` completes: whole characters only, often none."""

    def flush(self) -> str:
        """At the end of the output: U+FFFD if it stops inside a character, else nothing."""


class Pieces(dict[int, bytes]):
    """UTF-8 bytes by token id, found on first use; shared by all outputs of one model.

    leading_space   whether the decoder drops one space at the start of a text

    Raises ValueError if the decoder of `backend` (a `tokenizers.Tokenizer`) is of another kind.
    """

    def __init__(self, backend: Any) -> None:
        super().__init__()
        self._token_of = backend.id_to_token
        added = backend.get_added_tokens_decoder()
        self._special = {token for token, entry in added.items() if entry.special}
        self._to_bytes, self.leading_space = _reading_of(backend.decoder)

    def __missing__(self, token: int) -> bytes:
        text = None if token in self._special else self._token_of(token)
        # Models pad their vocabulary: such ids have no token, and no text.
        piece = b"" if text is None else self._to_bytes(text)
        self[token] = piece
        return piece


class PieceDetokenizer:
    """Decodes the bytes of the ids as UTF-8.

    What cannot be UTF-8 becomes U+FFFD as in `bytes.decode`, at once. Here alone the text differs
    from the tokenizer's own for byte tokens: that spoils a whole run of them, shown text included.
    """

    def __init__(self, pieces: Pieces) -> None:
        self._pieces = pieces
        self._decode = _utf8_decoder("replace").decode
        self._at_start = pieces.leading_space

    def feed(self, token: int) -> str:
        text = self._decode(self._pieces[token])
        if self._at_start and text:
            self._at_start = False
            return text.removeprefix(" ")
        return text

    def flush(self) -> str:
        return self._decode(b"", True)


class WindowDetokenizer:
    """Decodes the ids not shown yet behind the last ones shown, which give them their context.

    `decode` gives the text of some ids, special tokens left out.
    """

    MAX_HELD: Final = 8  # four ids for the bytes of a character, and some without text

    def __init__(self, decode: Callable[[list[int]], str]) -> None:
        self._decode = decode
        self._context: list[int] = []
        self._held: list[int] = []

    def feed(self, token: int) -> str:
        self._held.append(token)
        full = len(self._held) == self.MAX_HELD
        text = self._held_text()
        if text and (full or not text.endswith(REPLACEMENT)):
            self._context, self._held = self._held, []
            return text
        if full:
            del self._held[0]  # the context stays: the first ids of a text may read differently
        return ""

    def flush(self) -> str:
        text = self._held_text()
        self._held = []
        return text

    def _held_text(self) -> str:
        shown = self._decode(self._context)
        return self._decode(self._context + self._held)[len(shown) :]


def _reading_of(decoder: Any) -> tuple[Callable[[str], bytes], bool]:
    """How a `tokenizers` decoder reads a token, and whether it drops a leading space."""
    match _steps(json.loads(decoder.__getstate__())) if decoder else []:
        case [{"type": "ByteLevel"}]:
            return _byte_level, False
        case [
            {"type": "Replace", "pattern": {"String": mark}, "content": space},
            {"type": "ByteFallback"},
            {"type": "Fuse"},
            *last,
        ] if last in ([], [{"type": "Strip", "content": " ", "start": 1, "stop": 0}]):

            def byte_fallback(token: str) -> bytes:
                byte = _BYTE_TOKEN.fullmatch(token)
                return bytes.fromhex(byte[1]) if byte else token.replace(mark, space).encode()

            return byte_fallback, bool(last)
    raise ValueError("not a decoder of fixed bytes for each token")


def _steps(decoder: dict[str, Any]) -> list[dict[str, Any]]:
    """A decoder's steps in order, nested sequences laid out."""
    if decoder["type"] == "Sequence":
        return [step for inner in decoder["decoders"] for step in _steps(inner)]
    return [decoder]


def _byte_alphabet() -> dict[str, int]:
    """GPT-2's printable stand-ins for the 256 bytes (openai/gpt-2, encoder.py)."""
    printable = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    others = [byte for byte in range(256) if byte not in printable]
    return {chr(byte): byte for byte in printable} | {
        chr(0x100 + rank): byte for rank, byte in enumerate(others)
    }


_ALPHABET = _byte_alphabet()


def _byte_level(token: str) -> bytes:
    try:
        return bytes(_ALPHABET[char] for char in token)
    except KeyError:
        return token.encode()  # an added token outside the alphabet stands for itself

"""Values of any shape out of bytes, so that one fuzzer of bytes reaches every decoder."""

from __future__ import annotations

from typing import Any, Final

# What decoders may meet, near misses included. A fuzzer finds its way to them by one byte.
KNOWN: Final[tuple[bytes, ...]] = (
    b"", b"0", b"1", b"2", b"3", b"17", b"-1", b"+1", b" 1", b"1.5", b"nan", b"inf", b"1e9",
    b"9" * 19, b"9" * 20, b"9" * 5_000, "\u0661".encode(), b"\xff\xfe", b"\x00",
    b"[/b]", b"\x1b[2J", b"1-1", b"1-2", b"1-3", b"2-2", b"2-3", b"0-0", b"1-", b"-1-1", b"1-1-1",
    b"18446744073709551615-18446744073709551615",
    b"queued", b"running", b"done", b"failed", b"ok", b"dup", b"full", b"bad_id", b"too_large",
    b"aborted", b"finished", b"unknown",
    b'{"type":"started","attempt":1,"worker":"w","model":"synthetic-1","prompt_tokens":1}',
    b'{"type":"started","attempt":1,"worker":"w","model":"another","prompt_tokens":1}',
    b'{"type":"resumed","attempt":2,"worker":"w","model":"synthetic-1","tokens":1}',
    b'{"type":"token","text":"a","ids":[64]}',
    b'{"type":"token","text":" baba","ids":[256]}',
    b'{"type":"token","text":"","ids":[]}',
    b'{"type":"token","text":"a","ids":[4096,2147483647]}',
    b'{"type":"token","text":"a","ids":[-1,18446744073709551616]}',
    b'{"type":"token","text":"a","ids":[64],"logprobs":' + b"[" * 2_000 + b"]" * 2_000 + b"}",
    b'{"type":"requeued","reason":"drain"}',
    b'{"type":"done","finish_reason":"stop","attempts":1}',
    b'{"type":"failed","code":"internal","message":"m","attempts":1}',
    b'{"type":"news","of":"tomorrow"}',
    b'{"id":"1-1","type":"token","text":"a","ids":[64]}',
    b'{"id":"1-2","type":"token","text":"a","ids":[64]}',
    b'{"id":"1-3","type":"done","finish_reason":"stop","attempts":1}',
    b'{"id":"2-1","type":"token","text":"a","ids":[64]}',
    b"[]", b"{}", b"null", b"1", b'"\\ud800"', b"{", b"[" * 100_000,
)  # fmt: skip


class Draw:
    """Reads choices off `data`; at its end everything is 0, b"" or None."""

    def __init__(self, data: bytes) -> None:
        self._data = data
        self._at = 0

    @property
    def is_empty(self) -> bool:
        return self._at >= len(self._data)

    def below(self, limit: int) -> int:
        """One of 0 … limit-1."""
        if self.is_empty:
            return 0
        self._at += 1
        return self._data[self._at - 1] % limit

    def text(self) -> bytes:
        """A known text, two of them joined, or raw bytes."""
        kind = self.below(8)
        if kind == 0:
            size = self.below(32)
            self._at += size
            return self._data[self._at - size : self._at]
        if kind == 1:
            return self._known() + self._known()
        return self._known()

    def _known(self) -> bytes:
        return KNOWN[self.below(len(KNOWN))]

    def reply(self, depth: int = 3) -> Any:
        """Any reply that Redis can give: a number, a text, nothing, or a list of replies."""
        kind = self.below(6)
        if kind == 0:
            return None
        if kind == 1:
            return self.below(256) - 8
        if kind == 2:
            return 2**63 - 1
        if kind == 3 and depth:
            return [self.reply(depth - 1) for _ in range(self.below(8))]
        return self.text()

    def fields(self, names: tuple[str, ...]) -> dict[bytes, bytes]:
        """A hash with some of these fields, and at times one more."""
        found = {name.encode(): self.text() for name in names if self.below(4)}
        if self.below(4) == 1:
            found[self.text()] = self.text()
        return found

    def entries(
        self, most: int, names: tuple[str, ...] = ("e",)
    ) -> list[tuple[bytes, dict[bytes, bytes]]]:
        """Stream entries: their ids are always two numbers, but in no order."""
        return [self._entry(names) for _ in range(self.below(most + 1))]

    def _entry(self, names: tuple[str, ...]) -> tuple[bytes, dict[bytes, bytes]]:
        numbers = (self.below(4), self.below(6))
        entry_id = b"%d-%d" % numbers if self.below(16) else b"9" * 19 + b"-" + b"9" * 19
        return entry_id, self.fields(names)

"""Text to token ids: raw prompts and chat templates; and the detokenizer that leads back."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final

from mlxq.protocol.errors import BadRequest
from mlxq.protocol.jobs import Message, text_of
from mlxq.worker.detokenizer import Detokenizer, PieceDetokenizer, Pieces, WindowDetokenizer

_PROBE: Final = "What is asked"
_CHECKED_IDS: Final = 2_000


class Tokenizer:
    """A model's tokenizer and chat template, around one of transformers.

    Lives on the loop thread alone: fast tokenizers are not thread-safe.

    longest_token   characters of the longest token: a text of n characters has n / longest_token
                    ids at least
    """

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer
        self._pieces = self._checked_pieces()
        self._token_texts: dict[int, str] = {}
        self._content_in_parts = self._reads_only_parts()
        self.longest_token = max(map(len, tokenizer.get_vocab()))

    @classmethod
    def load(cls, path: str, *, trust_remote_code: bool = False) -> Tokenizer:
        """The tokenizer in a model's folder. Code in the folder runs only if it is trusted."""
        from transformers import AutoTokenizer  # takes a second, which --help need not pay

        tokenizer = AutoTokenizer.from_pretrained(
            path, local_files_only=True, trust_remote_code=trust_remote_code
        )
        # Where older multimodal models keep it, for their processor.
        template = Path(path) / "chat_template.json"
        if tokenizer.chat_template is None and template.is_file():
            tokenizer.chat_template = json.loads(template.read_text())["chat_template"]
        return cls(tokenizer)

    def encode(self, text: str) -> list[int]:
        """A raw prompt, with the special tokens that the tokenizer puts around a text (BOS)."""
        return self._encode(text, add_special_tokens=True)

    def encode_continuation(self, text: str) -> list[int]:
        """Output of another model: no special tokens are added, and none is read in the text."""
        return self._encode(text, add_special_tokens=False, split_special_tokens=True)

    def encode_rendered(self, text: str) -> list[int]:
        """What `apply_template` gave: it holds its special tokens (BOS) already."""
        return self._encode(text, add_special_tokens=False)

    def render(self, messages: Sequence[Message]) -> list[int]:
        """Chat messages as the model learned to read them, up to where its answer begins.

        Raises BadRequest as `apply_template` does.
        """
        return self.encode_rendered(self.apply_template(messages))

    def apply_template(self, messages: Sequence[Message]) -> str:
        """`render` without the tokenising.

        A developer message becomes a system message where the template has no such role.
        Raises BadRequest if the model has no template, or the template refuses the messages.
        """
        try:
            template: str = self._tokenizer.get_chat_template()
        except ValueError:
            raise BadRequest(
                "the model has no chat template: give prompt or prompt_token_ids"
            ) from None
        developer = "developer" if "developer" in template else "system"
        conversation = [self._as_dict(message, developer) for message in messages]
        try:
            return self._apply(conversation)
        except Exception as error:
            # A template is the model maker's program; all it can fail on is what it was given.
            raise BadRequest(f"the chat template refuses the messages: {error}") from None

    def detokenizer(self) -> Detokenizer:
        """A fresh one, for one output."""
        if self._pieces is None:
            return WindowDetokenizer(self._decode)
        return PieceDetokenizer(self._pieces)

    def token_text(self, token: int) -> str:
        """One id by itself: a special token by its name, part of a character as U+FFFD."""
        text = self._token_texts.get(token)
        if text is None:
            piece = b"" if self._pieces is None else self._pieces[token]
            text = piece.decode("utf-8", "replace") or self._decode([token], special=True)
            self._token_texts[token] = text
        return text

    def _encode(self, text: str, **options: bool) -> list[int]:
        # Through transformers this is a batch of one, for which the GIL is released; `encode` of
        # the tokenizers library holds it, and would stop the engine and the lease for a long text.
        ids: list[int] = self._tokenizer.encode(text, verbose=False, **options)
        return ids

    def _decode(self, ids: Sequence[int], *, special: bool = False) -> str:
        text: str = self._tokenizer.decode(
            ids, skip_special_tokens=not special, clean_up_tokenization_spaces=False
        )
        return text

    def _apply(self, conversation: list[dict[str, Any]]) -> str:
        text: str = self._tokenizer.apply_chat_template(
            conversation, tokenize=False, add_generation_prompt=True
        )
        return text

    def _as_dict(self, message: Message, developer: str) -> dict[str, Any]:
        role = developer if message.role == "developer" else message.role
        text = text_of(message.content)
        content = _parts(text) if self._content_in_parts else text
        name = {} if message.name is None else {"name": message.name}
        return {"role": role, "content": content, **name}

    def _reads_only_parts(self) -> bool:
        """Whether the template loses a content that is one text: some multimodal ones do."""

        def shows(content: str | list[dict[str, str]]) -> bool:
            try:
                return _PROBE in self._apply([{"role": "user", "content": content}])
            except Exception:
                return False

        return not shows(_PROBE) and shows(_parts(_PROBE))

    def _checked_pieces(self) -> Pieces | None:
        """The table of pieces, if there can be one and it agrees with the tokenizer itself."""
        try:
            pieces = Pieces(self._tokenizer.backend_tokenizer)
        except (AttributeError, ValueError):
            return None
        size = len(self._tokenizer)
        ids = [i for i in range(0, size, size // _CHECKED_IDS + 1) if _is_utf8(pieces[i])]
        detokenizer = PieceDetokenizer(pieces)
        return pieces if "".join(map(detokenizer.feed, ids)) == self._decode(ids) else None


def _parts(text: str) -> list[dict[str, str]]:
    return [{"type": "text", "text": text}]


def _is_utf8(piece: bytes) -> bool:
    try:
        piece.decode()
    except UnicodeDecodeError:
        return False
    return True

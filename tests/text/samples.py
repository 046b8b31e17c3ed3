"""Small tokenizers of every kind a model may bring, built in place, with chat templates."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any, Final

from tokenizers import (
    AddedToken,
    Tokenizer as Backend,
    decoders,
    models,
    normalizers,
    pre_tokenizers,
    processors,
)
from transformers import ByT5Tokenizer, PreTrainedTokenizerFast

from mlxq.worker.chat import Tokenizer

CHATML: Final = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
# Writes its own BOS; like Llama 2's, it wants user and assistant in turns.
TURNS: Final = (
    "{{ bos_token }}{% for m in messages %}"
    "{% if (m.role == 'user') != (loop.index0 % 2 == 0) %}"
    "{{ raise_exception('roles must alternate user/assistant') }}{% endif %}"
    "[{{ m.role }}] {{ m.content }} {% endfor %}"
)

# Tokens of several lengths that begin, end and contain each other: stop strings cross them.
WORDS: Final = ["ab", "ba", "aa", "bb", "aab", "bab", "th", "the", "xy", "zzz", "lo", "hello"]
MERGES: Final = [
    *[("a", "b"), ("b", "a"), ("a", "a"), ("b", "b"), ("aa", "b"), ("b", "ab"), ("t", "h")],
    *[("th", "e"), ("x", "y"), ("z", "z"), ("zz", "z"), ("l", "o"), ("h", "e"), ("he", "l")],
    ("hel", "lo"),
]
PIECES: Final = [*WORDS, "zz", "he", "hel", "日本", "é", "👩", "\u200d", "\ufffd"]


def byte_level() -> Any:
    """GPT-2, Llama 3, Qwen, SmolLM2: bytes in printable disguise; ids may split a character."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    split = "ðŁĳ"  # the first three bytes of many emoji
    tokens = [*alphabet, *WORDS, "zz", "he", "hel", "Ġthe", "æĹ", "ðŁ", split]
    merges = [*MERGES, ("Ġ", "the"), ("æ", "Ĺ"), ("ð", "Ł"), ("ðŁ", "ĳ")]
    backend = Backend(models.BPE(vocab=_numbered(tokens), merges=merges))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens(["<|im_start|>", "<|im_end|>"])
    backend.add_tokens([AddedToken("<think>"), AddedToken("漢字"), AddedToken("caf\u00e9")])
    return _wrap(backend, eos_token="<|im_end|>", chat_template=CHATML)


def llama() -> Any:
    """Llama 2, Mistral: SentencePiece with byte fallback; one leading space is dropped."""
    return _sentencepiece(
        [normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")],
        [decoders.Strip(content=" ", left=1, right=0)],
    )


def gemma() -> Any:
    """Gemma: the same without the rule of the leading space."""
    return _sentencepiece([normalizers.Replace(" ", "▁")], [])


def metaspace() -> Any:
    """T5: the mark of a space is dropped from the first token of a text."""
    pieces = [*"abehlotxyz▁", *PIECES, "▁the", "▁hello", "▁▁"]
    scores = [("<unk>", -9.0), *((piece, -float(5 - len(piece))) for piece in pieces)]
    backend = Backend(models.Unigram(scores, unk_id=0))
    backend.pre_tokenizer = pre_tokenizers.Metaspace()
    backend.decoder = decoders.Metaspace()
    backend.add_special_tokens(["<unk>", "</s>"])
    return _wrap(backend, eos_token="</s>")


def metaspace_bytes() -> Any:
    """The same with byte fallback: characters in parts, and no table of pieces for them."""
    scores = [("<unk>", -9.0), *((piece, -1.0) for piece in "abehlotxyz▁")]
    scores += [(f"<0x{byte:02X}>", -5.0) for byte in range(256)]
    backend = Backend(models.Unigram(scores, unk_id=0, byte_fallback=True))
    backend.pre_tokenizer = pre_tokenizers.Metaspace()
    backend.decoder = decoders.Sequence([decoders.ByteFallback(), decoders.Metaspace()])
    return _wrap(backend, unk_token="<unk>")


def wordpiece() -> Any:
    """BERT: spaces come back between words, and not before some punctuation."""
    inside = [f"##{piece}" for piece in ("ab", "the", "a", "b", "lo", "é")]
    tokens = ["[UNK]", "[CLS]", "[SEP]", *"ab.,?'", *WORDS, *inside, "n't", "do", "not", "日本"]
    backend = Backend(models.WordPiece(vocab=_numbered(tokens), unk_token="[UNK]"))
    backend.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    backend.decoder = decoders.WordPiece(cleanup=True)
    backend.add_special_tokens(["[UNK]", "[CLS]", "[SEP]"])
    return _wrap(backend, unk_token="[UNK]")


def words_alone() -> Any:
    """No decoder at all: ids are joined by spaces."""
    tokens = ["[UNK]", *WORDS]
    return _wrap(Backend(models.WordLevel(vocab=_numbered(tokens), unk_token="[UNK]")))


def byte_ids() -> Any:
    """ByT5: written in Python, without a tokenizers backend; an id is a byte."""
    return ByT5Tokenizer()


ALL: Final[dict[str, Callable[[], Any]]] = {
    make.__name__: make
    for make in (
        *(byte_level, llama, gemma, metaspace, metaspace_bytes),
        *(wordpiece, words_alone, byte_ids),
    )
}


@cache
def sample(kind: str) -> tuple[Tokenizer, Any]:
    """The tokenizer under test, and the one of transformers inside it as the reference."""
    inner = ALL[kind]()
    return Tokenizer(inner), inner


def reference(kind: str, ids: list[int]) -> str:
    """The text of ids as transformers decodes them at once."""
    text: str = sample(kind)[1].decode(
        ids, skip_special_tokens=True, clean_up_tokenization_spaces=False
    )
    return text


def _sentencepiece(normal: list[Any], last: list[Any]) -> Any:
    singles = sorted({*"▁abehlotxyz\n日本é👩"})
    byte_tokens = [f"<0x{byte:02X}>" for byte in range(256)]
    tokens = ["<unk>", "<s>", "</s>", *byte_tokens, *singles, *PIECES, "▁the", "▁hello"]
    merges = [*MERGES, ("▁", "the"), ("▁", "hello"), ("日", "本")]
    backend = Backend(
        models.BPE(
            vocab=_numbered(tokens),
            merges=merges,
            unk_token="<unk>",
            fuse_unk=True,
            byte_fallback=True,
        )
    )
    backend.normalizer = normalizers.Sequence(normal)
    backend.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), *last]
    )
    backend.add_special_tokens(["<unk>", "<s>", "</s>"])
    backend.post_processor = processors.TemplateProcessing(
        single="<s> $A", pair="<s> $A $B", special_tokens=[("<s>", backend.token_to_id("<s>"))]
    )
    return _wrap(backend, bos_token="<s>", eos_token="</s>", unk_token="<unk>", chat_template=TURNS)


def _wrap(backend: Backend, **options: str) -> Any:
    return PreTrainedTokenizerFast(tokenizer_object=backend, **options)


def _numbered(tokens: list[str]) -> dict[str, int]:
    return {token: number for number, token in enumerate(dict.fromkeys(tokens))}

"""The same on the tokenizer of the demo model, with 49,152 ids."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given, strategies as st
from transformers import AutoTokenizer

from mlxq.protocol.errors import ContextOverflow
from mlxq.protocol.jobs import Message
from mlxq.worker.admission import Admission
from mlxq.worker.chat import Tokenizer
from mlxq.worker.detokenizer import PieceDetokenizer
from mlxq.worker.engine.request import ModelInfo
from mlxq.worker.output import OutputStage

pytestmark = pytest.mark.model


@pytest.fixture(scope="module")
def folder() -> str:
    from ops.lib.model import demo_model  # importable from the repository's root only

    return str(demo_model())


@pytest.fixture(scope="module")
def tokenizer(folder: str) -> Tokenizer:
    return Tokenizer.load(folder)


@pytest.fixture(scope="module")
def inner(folder: str) -> Any:
    return AutoTokenizer.from_pretrained(folder)


@given(ids=st.lists(st.integers(0, 49_151), max_size=60))
def test_any_ids_equal_decoding_at_once(tokenizer: Tokenizer, inner: Any, ids: list[int]) -> None:
    stage = OutputStage(tokenizer, [])
    for token in ids:
        stage.feed([token])
    stage.flush()
    assert stage.text == inner.decode(
        ids, skip_special_tokens=True, clean_up_tokenization_spaces=False
    )


# Its vocabulary lacks the bytes of some control characters and of the higher planes.
TEXT = st.characters(exclude_categories=["Cc", "Cs"], max_codepoint=0x1FFFF)


@given(text=st.text(TEXT))
def test_texts_come_back(tokenizer: Tokenizer, text: str) -> None:
    stage = OutputStage(tokenizer, [])
    assert stage.feed(tokenizer.encode_continuation(text)).text == text


def test_golden(tokenizer: Tokenizer) -> None:
    assert isinstance(tokenizer.detokenizer(), PieceDetokenizer)
    question = Message(role="user", content="What is the capital of France?")
    assert tokenizer.apply_template([question]) == (
        "<|im_start|>system\n"
        "You are a helpful AI assistant named SmolLM, trained by Hugging Face<|im_end|>\n"
        "<|im_start|>user\nWhat is the capital of France?<|im_end|>\n"
        "<|im_start|>assistant\n"
    )
    ids = tokenizer.render([question])
    assert (ids[0], ids.count(1), ids.count(2)) == (1, 3, 2)  # <|im_start|> is 1, <|im_end|> 2

    stage = OutputStage(tokenizer, ["\n\nUser:", " is Paris"])
    emitted = stage.feed(tokenizer.encode("The capital of France is Paris.\n\nUser: more"))
    assert (emitted.text, emitted.stopped) == ("The capital of France", True)


def test_ten_megabytes_are_refused(tokenizer: Tokenizer) -> None:
    info = ModelInfo("demo", "demo", "demo", 49_152, 8_192, frozenset({2}))
    spec = json.dumps({"prompt": "word " * 2_000_000}).encode()
    with pytest.raises(
        ContextOverflow, match="10000000 characters does not fit the context of 8192"
    ):
        Admission(tokenizer, info).admit(spec, "job")

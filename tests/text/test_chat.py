"""Text to ids: special tokens where they belong, templates, and readable refusals."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, strategies as st

from mlxq.protocol.errors import BadRequest
from mlxq.protocol.jobs import Message, Role, TextPart
from mlxq.worker.chat import Tokenizer
from mlxq.worker.output import OutputStage
from tests.text.samples import ALL, sample

PARTS_ONLY = (
    "{% for m in messages %}{% for part in m.content %}{% if part.type == 'text' %}"
    "{{ m.role }}:{{ part.text }};{% endif %}{% endfor %}{% endfor %}"
)


def chat(*turns: tuple[Role, str]) -> list[Message]:
    return [Message(role=role, content=content) for role, content in turns]


def with_template(template: str | dict[str, str], kind: str = "byte_level") -> Tokenizer:
    inner: Any = ALL[kind]()
    inner.chat_template = template
    return Tokenizer(inner)


def test_raw_prompts_get_the_special_tokens_of_the_tokenizer() -> None:
    tokenizer, inner = sample("llama")
    assert inner.convert_ids_to_tokens(tokenizer.encode("the")) == ["<s>", "▁the"]
    tokenizer, inner = sample("byte_level")
    assert inner.convert_ids_to_tokens(tokenizer.encode("ab the")) == ["ab", "Ġthe"]
    assert inner.convert_ids_to_tokens(tokenizer.encode("a<|im_end|>")) == ["a", "<|im_end|>"]


def test_continuations_have_no_special_tokens() -> None:
    tokenizer, inner = sample("llama")
    assert inner.convert_ids_to_tokens(tokenizer.encode_continuation("the")) == ["▁the"]
    tokenizer, inner = sample("byte_level")
    ids = tokenizer.encode_continuation("a<|im_end|>")
    assert not set(ids) & set(inner.all_special_ids)
    assert inner.decode(ids) == "a<|im_end|>"
    # The other kinds of text are read as before.
    assert inner.convert_ids_to_tokens(tokenizer.encode("a<|im_end|>")) == ["a", "<|im_end|>"]


@pytest.mark.parametrize("kind", ["byte_level", "llama", "gemma"])
@given(text=st.text(st.characters(exclude_categories=["Cs"], exclude_characters="▁")))
def test_continuations_give_the_same_text_again(kind: str, text: str) -> None:
    tokenizer, _ = sample(kind)
    stage = OutputStage(tokenizer, [])
    assert stage.feed(tokenizer.encode_continuation(text)).text == text


def test_messages_go_through_the_template_up_to_the_answer() -> None:
    tokenizer, inner = sample("byte_level")
    ids = tokenizer.render(chat(("system", "ab"), ("user", "hello the")))
    assert inner.decode(ids) == (
        "<|im_start|>system\nab<|im_end|>\n<|im_start|>user\nhello the<|im_end|>\n"
        "<|im_start|>assistant\n"
    )
    tokens = inner.convert_ids_to_tokens(ids)
    assert (tokens.count("<|im_start|>"), tokens.count("<|im_end|>")) == (3, 2)


def test_bos_is_not_doubled() -> None:
    tokenizer, inner = sample("llama")
    ids = tokenizer.render(chat(("user", "the")))
    assert inner.bos_token_id == 1
    assert (ids[0], ids.count(1)) == (1, 1)


def test_text_parts_are_one_text() -> None:
    tokenizer, _ = sample("byte_level")
    parts = Message(role="user", content=[TextPart("hello"), TextPart(" the")])
    assert tokenizer.render([parts]) == tokenizer.render(chat(("user", "hello the")))


def test_templates_that_read_only_parts_get_parts() -> None:
    tokenizer = with_template(PARTS_ONLY)
    assert tokenizer.apply_template(chat(("system", "ab"), ("user", "hi"))) == "system:ab;user:hi;"


def test_names_reach_the_template() -> None:
    tokenizer = with_template("{% for m in messages %}{{ m.name }}={{ m.content }};{% endfor %}")
    messages = [Message(role="user", content="a", name="Ann"), Message(role="user", content="b")]
    assert tokenizer.apply_template(messages) == "Ann=a;=b;"


def test_developer_is_system_where_the_template_does_not_know_it() -> None:
    messages = chat(("developer", "ab"), ("user", "hi"))
    tokenizer, _ = sample("byte_level")
    assert tokenizer.apply_template(messages).startswith("<|im_start|>system\nab<|im_end|>")
    tokenizer = with_template(
        "{% for m in messages %}{% if m.role == 'developer' %}<{{ m.content }}>{% endif %}"
        "{% endfor %}"
    )
    assert tokenizer.apply_template(messages) == "<ab>"


def test_of_several_templates_the_default_is_taken() -> None:
    tokenizer = with_template({"default": "{{ messages[0].content }}", "tool_use": "tools"})
    assert tokenizer.apply_template(chat(("user", "hi"))) == "hi"


@pytest.mark.parametrize(
    ("template", "reason"),
    [
        ("{{ raise_exception('no system role here') }}", "no system role here"),
        ("{{ messages[0].content + 1 }}", "can only concatenate str"),
        ("{{ messages[7].content }}", "no element 7"),
        ("{{ messages[0].content.__class__.__mro__ }}", "unsafe"),
        ("{% for m in %}", "Expected an expression"),
        ({"tool_use": "a", "rag": "b"}, "no chat template"),
    ],
)
def test_an_error_of_the_template_is_a_bad_request(
    template: str | dict[str, str], reason: str
) -> None:
    with pytest.raises(BadRequest, match=reason):
        with_template(template).render(chat(("user", "hi")))


def test_roles_that_must_alternate() -> None:
    tokenizer, _ = sample("llama")
    with pytest.raises(BadRequest, match="roles must alternate user/assistant"):
        tokenizer.render(chat(("user", "a"), ("user", "b")))


def test_a_model_without_a_template() -> None:
    tokenizer, _ = sample("metaspace")
    with pytest.raises(BadRequest, match="no chat template: give prompt or prompt_token_ids"):
        tokenizer.render(chat(("user", "a")))


def test_longest_token() -> None:
    assert sample("byte_level")[0].longest_token == len("<|im_start|>")


def test_load_reads_a_folder(tmp_path: Path) -> None:
    made, inner = sample("llama")
    inner.save_pretrained(tmp_path)
    loaded = Tokenizer.load(str(tmp_path))
    text = "the hello 日本 é"
    assert loaded.encode(text) == made.encode(text)
    assert loaded.render(chat(("user", text))) == made.render(chat(("user", text)))
    assert loaded.longest_token == made.longest_token
    stage = OutputStage(loaded, ["日本"])
    assert stage.feed(loaded.encode(text)).text == "the hello "


def test_load_finds_the_template_beside_a_processor(tmp_path: Path) -> None:
    _, bare = sample("metaspace")
    bare.save_pretrained(tmp_path)
    template = {"chat_template": "{{ messages[0].role }}: {{ messages[0].content }}"}
    (tmp_path / "chat_template.json").write_text(json.dumps(template))
    tokenizer = Tokenizer.load(str(tmp_path))
    assert tokenizer.apply_template(chat(("user", "the hello"))) == "user: the hello"

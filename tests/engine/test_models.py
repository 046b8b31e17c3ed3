"""What is read from a model folder, and how a bad one is refused."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import mlx.core as mx
import pytest
from transformers import AutoTokenizer

from mlxq.worker.engine.fingerprint import fingerprint
from mlxq.worker.engine.models import NO_LIMIT, ModelError, context_length, eos_ids, load_model
from tests.engine import tiny as made
from tests.engine.tiny import make_tiny_model


@pytest.fixture
def folder(tiny: Path, tmp_path: Path) -> Path:
    """A copy of the tiny model that a test may spoil."""
    return Path(shutil.copytree(tiny, tmp_path / "copy"))


def edit(path: Path, **entries: Any) -> None:
    """Sets entries of a JSON file; None removes one."""
    value = json.loads(path.read_text()) if path.exists() else {}
    value |= entries
    path.write_text(json.dumps({key: item for key, item in value.items() if item is not None}))


def test_info_of_a_folder(tiny: Path) -> None:
    info = load_model(str(tiny)).info
    assert info.name == tiny.name
    assert info.path == str(tiny.resolve())
    assert info.vocab_size == made.VOCAB_SIZE
    assert info.context_length == 512
    assert info.eos_ids == {made.EOS_ID, made.END_ID}
    assert info.fingerprint == fingerprint(tiny)


def test_the_tokenizer_of_the_folder_works_offline(tiny: Path) -> None:
    tokenizer = AutoTokenizer.from_pretrained(tiny)
    text = "the capital of französisch 😀\n"
    assert tokenizer.decode(tokenizer.encode(text), skip_special_tokens=True) == text
    assert tokenizer.encode(text)[0] == made.BOS_ID
    chat = tokenizer.apply_chat_template(
        [{"role": "user", "content": "Hi"}], add_generation_prompt=True, tokenize=False
    )
    assert chat == "<|bos|><|start|>user\nHi<|end|>\n<|start|>assistant\n"
    ids = tokenizer.encode(chat, add_special_tokens=False)
    assert ids.count(made.BOS_ID) == 1 and ids.count(made.START_ID) == 2


def test_eos_ids_are_gathered_from_all_files(folder: Path) -> None:
    edit(folder / "generation_config.json", eos_token_id=7)
    edit(folder / "config.json", eos_token_id=[8, 9], text_config={"eos_token_id": 10})
    edit(folder / "tokenizer_config.json", eos_token={"content": made.START})
    assert eos_ids(folder) == {7, 8, 9, 10, made.START_ID}


def test_eos_token_is_found_in_either_list(folder: Path) -> None:
    (folder / "generation_config.json").unlink()
    edit(folder / "config.json", eos_token_id=None)
    edit(folder / "tokenizer.json", added_tokens=None)
    assert eos_ids(folder) == frozenset()
    edit(folder / "tokenizer_config.json", added_tokens_decoder={"42": {"content": made.EOS}})
    assert eos_ids(folder) == {42}


def test_context_length(folder: Path) -> None:
    tokenizer_config = folder / "tokenizer_config.json"
    assert context_length(folder, {"max_position_embeddings": 64}) == 64
    assert context_length(folder, {"text_config": {"max_position_embeddings": 65}}) == 65
    assert context_length(folder, {"n_positions": 66}) == 66
    assert context_length(folder, {}) == 512, "from the tokenizer"
    edit(tokenizer_config, model_max_length=1e30)
    assert context_length(folder, {}) == NO_LIMIT
    tokenizer_config.unlink()
    assert context_length(folder, {}) == NO_LIMIT


def test_fingerprint_is_equal_for_equal_files_only(tiny: Path, folder: Path) -> None:
    assert fingerprint(folder) == fingerprint(tiny)
    edit(folder / "tokenizer_config.json", padding_side="left")
    assert fingerprint(folder) == fingerprint(tiny)
    edit(folder / "tokenizer.json", version="2.0")
    assert fingerprint(folder) != fingerprint(tiny)


def rewrite(path: Path, names: list[str], **scaled: float) -> None:
    """Writes the named tensors of a weight file in this order, some of them scaled."""
    weights = mx.load(str(path))
    assert isinstance(weights, dict)
    chosen = {name: weights[name] * scaled.get(name, 1.0) for name in names}
    mx.eval(chosen)
    mx.save_safetensors(str(path), chosen, metadata={"format": "mlx"})


def tensor_names(path: Path) -> list[str]:
    return sorted(dict(mx.load(str(path))))  # type: ignore[arg-type]


@pytest.mark.parametrize("tensor", ["lm_head.weight", "model.layers.1.mlp.up_proj.weight"])
def test_fingerprint_tells_a_fine_tune_from_its_base(tiny: Path, folder: Path, tensor: str) -> None:
    path = folder / "model.safetensors"
    rewrite(path, tensor_names(path), **{tensor: 1.001})
    assert fingerprint(folder) != fingerprint(tiny)


def test_fingerprint_ignores_how_tensors_are_spread_over_files(tiny: Path, folder: Path) -> None:
    whole, first, second = (
        folder / f"{name}.safetensors" for name in ("model", "model-00001", "model-00002")
    )
    names = tensor_names(whole)[::-1]
    shutil.copy(whole, first)
    whole.rename(second)
    rewrite(first, names[:5])
    rewrite(second, names[5:])
    assert fingerprint(folder) == fingerprint(tiny)
    second.unlink()
    assert fingerprint(folder) != fingerprint(tiny)


def test_two_folders_with_the_same_arguments_hold_the_same_model(
    tiny: Path, tmp_path: Path
) -> None:
    assert fingerprint(make_tiny_model(tmp_path / "again")) == fingerprint(tiny)
    assert fingerprint(make_tiny_model(tmp_path / "other", seed=1)) != fingerprint(tiny)


def refused(source: Path | str) -> str:
    with pytest.raises(ModelError) as caught:
        load_model(str(source))
    message = str(caught.value)
    assert "\n" not in message
    return message


def test_refusals_are_one_clear_line(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def offline(name: str, **options: Any) -> str:
        raise OSError("cannot reach\nthe hub")

    monkeypatch.setattr("mlxq.worker.engine.models.snapshot_download", offline)
    assert refused("/no/such/folder") == "/no/such/folder is no folder"
    assert "cannot reach the hub" in refused("someone/some-model")
    assert "has no config.json" in refused(folder.parent)
    edit(folder / "config.json", model_type="unheard-of")
    assert "unheard-of not supported" in refused(folder)
    edit(folder / "config.json", model_type="llama", num_hidden_layers=3)
    assert "Missing" in refused(folder)


def test_a_hub_name_is_fetched(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[str] = []

    def fetch(name: str, **options: Any) -> str:
        asked.append(name)
        assert not any(pattern.endswith(".py") for pattern in options["allow_patterns"])
        return str(folder)

    monkeypatch.setattr("mlxq.worker.engine.models.snapshot_download", fetch)
    info = load_model("someone/tiny-model").info
    assert asked == ["someone/tiny-model"]
    assert (info.name, info.path) == ("someone/tiny-model", str(folder))


def test_code_of_a_model_is_never_run(folder: Path) -> None:
    (folder / "evil.py").write_text("raise SystemExit('ran')")
    edit(folder / "config.json", model_file="evil.py")
    assert "custom module" in refused(folder)

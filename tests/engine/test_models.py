"""What is read from a model folder, and how a bad one is refused."""

from __future__ import annotations

import gc
import json
import shutil
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx_lm.utils
import mlx_vlm.utils
import pytest
import structlog
from mlx.utils import tree_flatten
from mlx_lm.tuner.utils import linear_to_lora_layers
from mlx_vlm.trainer.peft.utils import apply_lora_layers, get_peft_model
from transformers import AutoTokenizer

from mlxq.worker.engine import library
from mlxq.worker.engine.fingerprint import fingerprint
from mlxq.worker.engine.library import libraries, load_network
from mlxq.worker.engine.load import load_batch
from mlxq.worker.engine.models import (
    NO_LIMIT,
    ModelError,
    Source,
    context_length,
    eos_ids,
    load_model,
)
from mlxq.worker.engine.network import Network
from mlxq.worker.engine.thread import EngineThread
from tests.engine import tiny as made
from tests.engine.architectures import MULTIMODAL, config_of
from tests.engine.rig import prompt_of
from tests.engine.tiny import make_tiny_model, write_network


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


def refused(source: Path | str | Source) -> str:
    with pytest.raises(ModelError) as caught:
        load_model(source if isinstance(source, Source) else str(source))
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


def test_a_revision_is_of_the_hub(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[str | None] = []

    def fetch(name: str, *, revision: str | None, **options: Any) -> str:
        asked.append(revision)
        return str(folder)

    monkeypatch.setattr("mlxq.worker.engine.models.snapshot_download", fetch)
    load_model("someone/tiny-model")
    load_model(Source("someone/tiny-model", revision="v2"))
    assert asked == [None, "v2"]
    assert "is a folder" in refused(Source(str(folder), revision="v2"))


def test_code_of_a_model_runs_only_if_trusted(folder: Path) -> None:
    (folder / "own.py").write_text("from mlx_lm.models.llama import Model, ModelArgs")
    edit(folder / "config.json", model_file="own.py", model_type="own")
    assert "custom module" in refused(folder)
    assert load_model(Source(str(folder), trust_remote_code=True)).info.vocab_size == 300


@pytest.mark.parametrize(
    ("config", "expected"),
    [
        ({"model_type": "llama"}, ["mlx-vlm", "mlx-lm"]),
        ({"model_type": "mistral"}, ["mlx-vlm", "mlx-lm"]),
        ({"model_type": "gptj"}, ["mlx-lm"]),
        ({"model_type": "lfm2_moe"}, ["mlx-lm"]),
        ({"model_type": "gemma3_text"}, ["mlx-lm"]),
        ({"model_type": "gemma3", "text_config": {}}, ["mlx-vlm", "mlx-lm"]),
        ({"model_type": "gemma3", "text_config": {"rope_theta": 1e4}}, ["mlx-lm"]),
        ({"model_type": "llama", "model_file": "own.py"}, ["mlx-lm"]),
        ({"model_type": "../evil"}, ["mlx-lm"]),
        ({}, ["mlx-lm"]),
    ],
)
def test_which_library(config: dict[str, Any], expected: list[str]) -> None:
    assert libraries(config) == expected


def test_what_one_library_cannot_load_the_other_may(tmp_path: Path) -> None:
    """mlx-vlm reads Gemma 3n only with its towers, and some have been left out."""
    folder = write_network(tmp_path, config_of("gemma3n"))
    config = json.loads((folder / "config.json").read_text())
    assert libraries(config)[0] == "mlx-vlm"
    network, library = load_network(folder, config)
    assert library == "mlx-lm" and network.vocab_size == 300


def last_logits(network: Network, prompt: list[int]) -> mx.array:
    return network(mx.array([prompt]), network.make_cache())[0, -1]


@pytest.mark.parametrize("model_type", sorted(MULTIMODAL))
def test_of_a_multimodal_model_the_language_part_is_loaded(tmp_path: Path, model_type: str) -> None:
    folder = write_network(tmp_path, config_of(model_type))
    whole = mlx_vlm.utils.load_model(folder)
    prompt = prompt_of(11)
    expected = whole.language_model(mx.array([prompt])).logits[0, -1]
    network = load_model(str(folder)).network
    assert mx.allclose(last_logits(network, prompt), expected, atol=1e-4)
    names = {name for name, _ in tree_flatten(network.model.parameters())}
    assert not any("vision" in name for name in names)


@pytest.mark.parametrize("model_type", ["llama", "qwen3_moe", "gpt_oss", "gemma3_text"])
def test_a_quantised_model_is_what_mlx_lm_made_of_it(tmp_path: Path, model_type: str) -> None:
    wide = {"hidden_size": 64, "intermediate_size": 64, "moe_intermediate_size": 64}
    plain = write_network(tmp_path / "plain", config_of(model_type) | wide)
    model, config = mlx_lm.utils.load_model(plain)
    model, config = mlx_lm.utils.quantize_model(model, config, 32, 4)
    mlx_lm.utils.save_model(tmp_path / "small", model)
    mlx_lm.utils.save_config(config, tmp_path / "small" / "config.json")
    prompt = prompt_of(9)
    got = last_logits(load_model(str(tmp_path / "small")).network, prompt)
    assert mx.allclose(got, model(mx.array([prompt]))[0, -1], atol=1e-4)


def train(folder: Path, adapter: Path, library: str) -> None:
    """Writes an adapter with random weights, as the library's own training saves one."""
    adapter.mkdir()
    parameters: dict[str, Any] = {"rank": 2, "scale": 4.0, "dropout": 0.0}
    if library == "mlx-lm":
        model, _ = mlx_lm.utils.load_model(folder)
        linear_to_lora_layers(model, 2, parameters)
        config = {"fine_tune_type": "lora", "num_layers": 2, "lora_parameters": parameters}
    else:
        model = get_peft_model(mlx_vlm.utils.load_model(folder), rank=2, alpha=8.0, verbose=False)
        config = model._vlm_adapter_config
    weights = {
        name: mx.random.normal(array.shape, key=mx.random.key(number))
        for number, (name, array) in enumerate(tree_flatten(model.parameters()))
        if "lora" in name
    }
    mx.save_safetensors(str(adapter / "adapters.safetensors"), weights)
    (adapter / "adapter_config.json").write_text(json.dumps(config))


@pytest.mark.parametrize("library", ["mlx-lm", "mlx-vlm"])
def test_an_adapter_of_either_library_is_applied(tiny: Path, tmp_path: Path, library: str) -> None:
    adapter = tmp_path / "tuned"
    train(tiny, adapter, library)
    base, loaded = load_model(str(tiny)), load_model(Source(str(tiny), adapter=str(adapter)))
    prompt = prompt_of(9)
    if library == "mlx-lm":
        model = mlx_lm.utils.load_adapters(mlx_lm.utils.load_model(tiny)[0], str(adapter))
        expected = model(mx.array([prompt]))[0, -1]
    else:
        model = apply_lora_layers(mlx_vlm.utils.load_model(tiny), adapter)
        model.eval()
        expected = model(mx.array([prompt])).logits[0, -1]
    got = last_logits(loaded.network, prompt)
    assert mx.allclose(got, expected, atol=1e-4)
    assert not mx.allclose(got, last_logits(base.network, prompt), atol=0.1)
    assert loaded.info.name == "tiny+tuned"
    assert loaded.info.fingerprint != base.info.fingerprint


@pytest.mark.parametrize("library", ["mlx-lm", "mlx-vlm"])
def test_an_adapter_of_another_model_is_refused(tiny: Path, tmp_path: Path, library: str) -> None:
    train(make_tiny_model(tmp_path / "other", layers=3), tmp_path / "tuned", library)
    assert "cannot load" in refused(Source(str(tiny), adapter=str(tmp_path / "tuned")))
    assert "no adapter_config.json" in refused(Source(str(tiny), adapter=str(tiny)))


def test_memory_returns_when_the_engine_ends(tmp_path: Path) -> None:
    folder = make_tiny_model(tmp_path / "large", hidden_size=512)
    weights_bytes = (folder / "model.safetensors").stat().st_size
    gc.collect()
    before = mx.get_active_memory()
    engine = EngineThread(
        lambda: load_batch(str(folder)), on_outputs=lambda outputs: None, on_dead=print
    )
    engine.start()
    engine.info.result(60.0)
    assert mx.get_active_memory() - before > 0.9 * weights_bytes > 1e6
    engine.stop()
    assert engine.join(60.0)
    assert mx.get_active_memory() - before < 0.02 * weights_bytes


def test_how_far_a_load_is_shows_now_and_then(
    tiny: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(library, "PART_BYTES", 0)
    monkeypatch.setattr(library, "SAY_INTERVAL_S", 0.0)
    with structlog.testing.capture_logs() as logs:
        load_model(str(tiny))
    told = [log["percent"] for log in logs if log["event"] == "model_loading"]
    assert told == sorted(told) and told[-1] == 100
    assert capsys.readouterr().err == ""
    monkeypatch.setattr("sys.stderr.isatty", lambda: True)
    with structlog.testing.capture_logs() as logs:
        load_model(str(tiny))
    assert not any(log["event"] == "model_loading" for log in logs)
    assert "loading" in capsys.readouterr().err

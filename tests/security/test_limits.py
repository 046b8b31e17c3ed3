"""Limits hold for whoever writes the bytes, and no job makes a worker open anything."""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, get_type_hints

import pytest

from mlxq.protocol.errors import BadRequest
from mlxq.protocol.jobs import MAX_MESSAGES, MAX_STOPS, Job, decode_job, encode_job
from mlxq.protocol.scripts import script
from mlxq.worker import cli
from mlxq.worker.admission import Admission
from mlxq.worker.chat import Tokenizer
from mlxq.worker.config import Config
from mlxq.worker.engine import models
from mlxq.worker.engine.models import ModelError, load_model
from mlxq.worker.engine.request import ModelInfo
from ops.lib.bootstrap import ROOT
from tests.worker.fakes import FakeBatch
from tests.worker.harness import Submitter, running

Load = Callable[[], FakeBatch]
USER = {"role": "user", "content": "Hi"}
OPENED: list[str] = []
watching = False


def _watch(event: str, arguments: tuple[Any, ...]) -> None:
    if watching and event in ("open", "socket.connect", "socket.getaddrinfo", "subprocess.Popen"):
        OPENED.append(f"{event} {arguments!r:.200}")


sys.addaudithook(_watch)  # for the life of the process: there is no way to take one out


@contextmanager
def opening_nothing() -> Iterator[None]:
    """Asserts that no file, connection or process is opened meanwhile."""
    global watching
    OPENED.clear()
    watching = True
    try:
        yield
    finally:
        watching = False
    assert OPENED == []


@pytest.fixture
def admission(tokenizer: Tokenizer, info: ModelInfo) -> Admission:
    made = Admission(tokenizer, info)
    made.admit(json.dumps({"messages": [USER]}).encode(), "warm")  # templates are compiled once
    return made


REFUSED: dict[str, dict[str, Any]] = {
    "messages": {"messages": [USER] * (MAX_MESSAGES + 1)},
    "no message": {"messages": []},
    "stops": {"prompt": "a", "stop": ["x"] * (MAX_STOPS + 1)},
    "long stop": {"prompt": "a", "stop": "x" * 257},
    "empty stop": {"prompt": "a", "stop": ""},
    "max_tokens": {"prompt": "a", "max_tokens": 2**31},
    "token id": {"prompt_token_ids": [2**31]},
    "negative id": {"prompt_token_ids": [-1]},
    "id of no token": {"prompt_token_ids": [10**6]},
    "bias on no token": {"prompt": "a", "logit_bias": {"1000000": 1}},
    "too long": {"prompt_token_ids": [1] * 100_000},
    "too long a text": {"prompt": "word " * 2_000_000},
    "numbers as text": {"prompt": "a", "max_tokens": "5"},
    "a boolean": {"prompt": "a", "top_k": True},
    "two prompts": {"prompt": "a", "messages": [USER]},
    "unknown field": {"prompt": "a", "n": 1},
    "unknown in a message": {"messages": [{**USER, "audio": {}}]},
    "another template": {"messages": [USER], "chat_template": "{{ 1 }}"},
    "remote code": {"prompt": "a", "trust_remote_code": True},
}


async def test_the_worker_checks_what_a_raw_submitter_wrote(
    submitter: Submitter, server: Any, queue: str, load: Load
) -> None:
    """ENQUEUE takes any bytes; each of these fails alone, with one reason, and a good job runs."""
    async with running(load, redis_url=server.url, queue=queue, max_batch=4):
        await submitter.enqueue("good", prompt="Hi", max_tokens=5)
        for number, job in enumerate(REFUSED.values()):
            await submitter.enqueue(f"b{number}", **job, call={"max_bytes": 2**24})
        for number, name in enumerate(REFUSED):
            failed = await submitter.terminal(f"b{number}")
            assert failed["type"] == "failed", name
            assert failed["code"] in ("bad_request", "context_overflow"), name
            assert 5 < len(failed["message"]) < 600 and "\n" not in failed["message"], name
        assert (await submitter.terminal("good"))["type"] == "done"


MEDIA = ["image_url", "input_image", "image", "input_audio", "video_url", "file", "input_file"]
PLACES = ["http://127.0.0.1:9/a.png", "https://example.com/a", "file:///etc/passwd", "/etc/passwd"]


@pytest.mark.parametrize("kind", MEDIA)
def test_parts_that_are_not_text_are_refused_by_name(kind: str) -> None:
    part = {"type": kind, kind: {"url": PLACES[2]}}
    job = {"messages": [USER, {"role": "user", "content": [{"type": "text", "text": "a"}, part]}]}
    with pytest.raises(BadRequest) as refused:
        decode_job(json.dumps(job))
    assert str(refused.value) == (
        f"Invalid value '{kind}' - at `$.messages[1].content[1].type`: "
        "only text parts are supported"
    )


@pytest.mark.parametrize("place", PLACES)
def test_an_address_in_a_text_is_text(admission: Admission, place: str) -> None:
    """In no field does a URL or a path make the worker open a file or a connection."""
    message = {"role": "user", "content": place, "name": place}
    jobs: list[dict[str, Any]] = [
        {"prompt": place},
        {"prompt": f"<img src='{place}'> ![x]({place})", "stop": [place]},
        {"messages": [message, {"role": "user", "content": [{"type": "text", "text": place}]}]},
    ]
    with opening_nothing():
        for job in jobs:
            assert admission.admit(json.dumps(job).encode(), "a").prompt
        for field in ("image", "image_url", "images", "file", "model", "prompt_url", "media"):
            with pytest.raises(BadRequest, match=f"unknown field `{field}`"):
                admission.admit(json.dumps({"prompt": "a", field: place}).encode(), "a")


def test_a_template_cannot_be_reached_through_a_message(admission: Admission) -> None:
    """What a user writes is data of the chat template, not part of its program."""
    attack = "{{ ''.__class__.__mro__[1].__subclasses__() }}{% include '/etc/passwd' %}"
    job = {"messages": [{"role": "user", "content": attack, "name": attack}]}
    with opening_nothing():
        assert admission.admit(json.dumps(job).encode(), "a").prompt


def test_the_producer_and_the_worker_read_alike() -> None:
    """What a Producer refuses is what `decode_job` refuses: encode ends with it."""
    with pytest.raises(BadRequest):
        encode_job(Job(messages=[], prompt=None))
    assert decode_job(encode_job(Job(prompt="a"))) == Job(prompt="a")


CODE = "open({marker!r}, 'w').close()\n"


def plant_code(folder: Path, name: str) -> Path:
    """A Python file in a model's folder, and the file that would exist if it were run."""
    marker = folder / "was-run"
    (folder / name).write_text(CODE.format(marker=str(marker)))
    return marker


def change(path: Path, **fields: Any) -> None:
    path.write_text(json.dumps({**json.loads(path.read_text()), **fields}))


def copy(model: Path, folder: Path) -> Path:
    for path in model.iterdir():
        (folder / path.name).write_bytes(path.read_bytes())
    return folder


def test_code_in_a_models_folder_is_not_run_for_the_network(
    tiny_model: Path, tmp_path: Path
) -> None:
    folder = copy(tiny_model, tmp_path)
    marker = plant_code(folder, "evil.py")
    change(folder / "config.json", model_file="evil.py", auto_map={"AutoModel": "evil.Model"})
    with pytest.raises(ModelError, match="trust_remote_code"):
        load_model(str(folder))
    assert not marker.exists()


def test_code_in_a_models_folder_is_not_run_for_the_tokenizer(
    tiny_model: Path, tmp_path: Path
) -> None:
    folder = copy(tiny_model, tmp_path)
    marker = plant_code(folder, "evil.py")
    auto_map = {"AutoTokenizer": ["evil.Evil", "evil.Evil"], "AutoConfig": "evil.Config"}
    change(folder / "tokenizer_config.json", auto_map=auto_map, tokenizer_class="Evil")
    change(folder / "config.json", auto_map=auto_map)
    try:
        Tokenizer.load(str(folder))
    except (ValueError, OSError):
        pass  # refusing is right as well
    assert not marker.exists()


def test_nothing_but_the_flag_turns_remote_code_on() -> None:
    sources = [path for name in ("worker", "producer", "protocol", "ops") for path in
               (ROOT / name).rglob("*.py")]  # fmt: skip
    assert len(sources) > 50
    for path in sources:
        assert not re.search(r"trust_remote_code(: bool)?\s*=\s*True", path.read_text()), path
    assert not Config("model").trust_remote_code
    assert not models.Source("model").trust_remote_code
    flag = get_type_hints(cli.worker, include_extras=True)["trust_remote_code"].__metadata__[0]
    assert flag.envvar is None


def test_the_hub_gives_neither_code_nor_pickles() -> None:
    """Weights come as safetensors; a pickle could run code when it is read."""
    fetched = models._FILES
    assert not any(re.search(r"\.(py|bin|pt|pth|pkl|ckpt)$", pattern) for pattern in fetched)
    assert "*" not in fetched


def test_the_page_tells_the_limits_that_there_are() -> None:
    page = (ROOT / "ops" / "SECURITY.md").read_text()
    assert f"{MAX_MESSAGES:,}; {MAX_STOPS} of 256 characters" in page
    assert "MAX_SPEC_BYTES = 16 * 2 ^ 20" in script("take").source and "16 MiB in any case" in page

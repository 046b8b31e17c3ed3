"""What the prefix cache gives back is what reading the ids would have given, whatever happens."""

from __future__ import annotations

import os
import random
import shutil
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import mlx.core as mx
import pytest
from mlx_vlm import apc

from mlxq.worker.engine import caches, prefix_cache, prefix_folder, prefix_store
from mlxq.worker.engine.models import LoadedModel, load_model
from mlxq.worker.engine.network import Network
from mlxq.worker.engine.prefix_cache import Hit, PrefixCache
from mlxq.worker.engine.prefix_memory import BLOCK_IDS, CHECKPOINT_IDS
from mlxq.worker.engine.row_cache import CacheOptions, quantised
from tests.engine.architectures import ARCHITECTURES, SHARED
from tests.engine.rig import Rig, prompt_of, request
from tests.engine.tiny import write_network

MEMORY_BYTES = 32 << 20

# Architectures by what their caches are made of; the last is of mlx-lm, and so are its caches.
KINDS = {
    "plain": "llama",
    "rotating": "gpt_oss",
    "recurrent": "lfm2",
    "composite": "falcon_h1",
    "mlx-lm": "olmo_hybrid",
}


@pytest.fixture(scope="session")
def models(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], LoadedModel]:
    """Loads each model once."""
    loaded: dict[str, LoadedModel] = {}

    def load(kind: str) -> LoadedModel:
        if kind not in loaded:
            name = KINDS.get(kind, "llama")
            settings = SHARED | {"model_type": name} | ARCHITECTURES[name]
            if kind == "wide":
                settings |= {"head_dim": 32}
            folder = tmp_path_factory.mktemp("models") / kind
            loaded[kind] = load_model(str(write_network(folder, settings)))
        return loaded[kind]

    return load


@pytest.fixture(scope="session")
def networks(models: Callable[[str], LoadedModel]) -> Callable[[str], Network]:
    return lambda kind: models(kind).network


@pytest.fixture
def plain(networks: Callable[[str], Network]) -> Network:
    return networks("plain")


def read(network: Network, ids: list[int], cache: list[Any]) -> int:
    """Reads ids; the next one, greedily."""
    logits = network(mx.array([ids]), cache)[0, -1]
    return int(mx.argmax(logits))


def go_on(network: Network, ids: list[int], cache: list[Any], count: int) -> list[int]:
    output = [read(network, ids, cache)]
    while len(output) < count:
        output.append(read(network, output[-1:], cache))
    return output


def cold(network: Network, prompt: list[int], count: int = 4) -> list[int]:
    return go_on(network, prompt, network.make_cache(), count)


def serve(
    network: Network, prefixes: PrefixCache, prompt: list[int], salt: str = "", count: int = 4
) -> tuple[list[int], int]:
    """As the batch does: the output, and how many ids needed no reading."""
    hit = prefixes.take(prompt, salt) or Hit(network.make_cache(), 0)
    at = hit.length
    for stop in prefixes.checkpoints(prompt, at, salt):
        network(mx.array([prompt[at:stop]]), hit.cache)
        prefixes.put(prompt[:stop], hit.cache, salt)
        at = stop
    output = go_on(network, prompt[at:], hit.cache, count)
    prefixes.put(prompt + output[:-1], hit.cache, salt)
    return output, hit.length


def of(network: Network, **options: Any) -> PrefixCache:
    return PrefixCache.of(network, "model", **{"memory_bytes": MEMORY_BYTES} | options)


def files(folder: Path) -> list[Path]:
    return sorted(folder.glob("*/*.safetensors"))


@pytest.mark.parametrize("kind", KINDS)
def test_warm_equals_cold(networks: Callable[[str], Network], kind: str) -> None:
    """Repeated, cut, continued and diverging prompts, each beside what an empty cache gives."""
    network = networks(kind)
    prefixes = of(network)
    shared = prompt_of(150)
    answer = cold(network, shared)
    prompts = [
        shared,
        shared,
        shared + answer + prompt_of(9, 1),
        shared[:130],
        shared[:128],
        shared[:70] + prompt_of(40, 2),
        shared[:70] + prompt_of(40, 3),
        shared[:70] + prompt_of(40, 4),
        shared[1:],
        shared[:65],
        shared[:3],
        shared + prompt_of(400, 5),
        shared + prompt_of(400, 5) + prompt_of(30, 6),
    ]
    reused = []
    for prompt in prompts:
        output, length = serve(network, prefixes, prompt)
        assert output == cold(network, prompt)
        assert length < len(prompt)
        reused.append(length)
    assert reused[0] == reused[8] == reused[10] == 0
    assert reused[1] == reused[3] == 128, "the repetition, and the beginning of a longer one"
    assert reused[2] >= 128, "the next turn of a chat"
    assert reused[7] == 64, "what two prompts before it had in common"
    assert reused[12] >= 512
    stats = prefixes.stats()
    assert stats.lookups == len(prompts)
    assert stats.hits == sum(length > 0 for length in reused)
    assert stats.reused_ids == sum(reused)
    assert 0 < stats.kv_bytes <= MEMORY_BYTES


@pytest.mark.parametrize("kind", ["plain", "rotating", "composite"])
def test_twelve_prompts_through_the_batch(models: Callable[[str], LoadedModel], kind: str) -> None:
    """Bug 8: prompts that share a prefix, at once, once more, and then the next turn of each."""
    loaded = models(kind)
    prefixes = of(loaded.network)
    shared = prompt_of(100)
    prompts = {f"{n}": shared[: 30 + 6 * n] + prompt_of(n % 5, n) for n in range(11)}
    prompts["same"] = prompts["3"]
    for turn in range(3):
        rig = Rig(loaded, max_batch=4, prefill_step=48, prefix_cache=prefixes)
        rig.admit(*(request(name, prompt, max_tokens=4) for name, prompt in prompts.items()))
        rig.finish()
        for name, prompt in prompts.items():
            assert rig.ids[name] == cold(loaded.network, prompt), (turn, name)
            assert 0 <= rig.cached[name] < len(prompt)
        if turn > 0:
            step = BLOCK_IDS if kind == "plain" else CHECKPOINT_IDS
            found = [rig.cached[name] for name in prompts if len(prompts[name]) > step + 9]
            assert found and min(found) >= step
            prompts = {
                name: prompt + rig.ids[name] + prompt_of(5, 9) for name, prompt in prompts.items()
            }


@pytest.mark.parametrize("kind", ["plain", "rotating"])
@pytest.mark.parametrize("length", [1, 2, 63, 64, 65, 128, 129])
def test_an_exact_repetition_leaves_an_id_to_read(
    networks: Callable[[str], Network], tmp_path: Path, kind: str, length: int
) -> None:
    network = networks(kind)
    prompt = prompt_of(length)
    prefixes = of(network, disk=tmp_path, disk_bytes=1 << 24)
    first, _ = serve(network, prefixes, prompt)
    second, reused = serve(network, prefixes, prompt)
    step = BLOCK_IDS if kind == "plain" else CHECKPOINT_IDS
    assert (second, reused) == (first, (length - 1) // step * step)
    prefixes.close()
    # From disk the same.
    prefixes = of(network, disk=tmp_path, disk_bytes=1 << 24)
    assert serve(network, prefixes, prompt) == (second, reused)
    prefixes.close()


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("length", [32, 33, 34, 65, 66, 129])
def test_an_exact_repetition_through_the_batch(
    models: Callable[[str], LoadedModel], kind: str, length: int
) -> None:
    """Also where the checkpoint to keep is at the end of the prefill."""
    loaded = models(kind)
    rig = Rig(loaded, prefill_step=512, prefix_cache=of(loaded.network))
    for name in ("first", "again"):
        rig.admit(request(name, prompt_of(length), max_tokens=4))
        rig.finish()
    step = BLOCK_IDS if kind == "plain" else CHECKPOINT_IDS
    assert rig.cached["again"] == (length - 1) // step * step
    assert rig.ids["again"] == rig.ids["first"] == cold(loaded.network, prompt_of(length))


@pytest.mark.parametrize("kind", KINDS)
def test_a_hit_is_a_copy(networks: Callable[[str], Network], kind: str) -> None:
    """Rows that took the same prefix go on apart, and leave it as it was."""
    network = networks(kind)
    prefixes = of(network)
    shared = prompt_of(140)
    serve(network, prefixes, shared)
    tails = [prompt_of(7, salt) for salt in range(3)]
    hits = [prefixes.take(shared + tail) for tail in tails]
    outputs: list[list[int]] = []
    for hit, tail in zip(hits, tails, strict=True):
        assert hit is not None
        outputs.append([read(network, (shared + tail)[hit.length :], hit.cache)])
    for _ in range(30):
        for hit, output in zip(hits, outputs, strict=True):
            assert hit is not None
            output.append(read(network, output[-1:], hit.cache))
    for tail, output in zip(tails, outputs, strict=True):
        assert output == cold(network, shared + tail, 31)
    assert serve(network, prefixes, shared)[0] == cold(network, shared)


@pytest.mark.parametrize("kind", ["plain", "composite"])
def test_rows_that_read_the_same_at_once(networks: Callable[[str], Network], kind: str) -> None:
    """All take before any puts; then each puts what the others did."""
    network = networks(kind)
    prefixes = of(network)
    prompt = prompt_of(100)
    rows = [network.make_cache() for _ in range(3)]
    assert [prefixes.take(prompt) for _ in rows] == [None] * 3
    for cache in rows:
        read(network, prompt[:96], cache)
        prefixes.put(prompt[:96], cache)
    held = prefixes.stats().kv_bytes
    output, reused = serve(network, prefixes, prompt)
    assert (output, reused) == (cold(network, prompt), 64 if kind == "plain" else 96)
    one = of(network)
    cache = network.make_cache()
    read(network, prompt[:96], cache)
    one.put(prompt[:96], cache)
    assert held == one.stats().kv_bytes, "kept once"


@pytest.mark.parametrize("kind", KINDS)
def test_salts_share_nothing(networks: Callable[[str], Network], kind: str) -> None:
    network = networks(kind)
    prefixes = of(network)
    prompt = prompt_of(100)
    serve(network, prefixes, prompt, "a")
    assert prefixes.take(prompt, "b") is None
    assert prefixes.take(prompt) is None
    hit = prefixes.take(prompt, "a")
    assert hit is not None and hit.length >= BLOCK_IDS


@pytest.mark.parametrize("kind", ["plain", "rotating"])
def test_salts_share_nothing_on_disk(
    networks: Callable[[str], Network], tmp_path: Path, kind: str
) -> None:
    network = networks(kind)
    prefixes = of(network, memory_bytes=0, disk=tmp_path, disk_bytes=1 << 24)
    prompt = prompt_of(300)
    serve(network, prefixes, prompt[:129], "a")
    serve(network, prefixes, prompt[:257], "b")
    prefixes.drain()
    for salt, length in (("a", 128), ("b", 256)):
        hit = prefixes.take(prompt, salt)
        assert hit is not None and length <= hit.length < length + 9
    assert prefixes.take(prompt) is None
    prefixes.close()


@pytest.mark.parametrize("kind", ["plain", "rotating"])
def test_eviction_stays_under_the_bound(networks: Callable[[str], Network], kind: str) -> None:
    network = networks(kind)
    bound = 150_000
    prefixes = of(network, memory_bytes=bound)
    dice = random.Random(1)
    seen: list[list[int]] = []
    for number in range(20):
        again = seen and dice.random() < 0.4
        begin = dice.choice(seen)[: dice.randrange(1, 200)] if again else []
        prompt = begin + prompt_of(dice.randrange(1, 180), number)
        output, _ = serve(network, prefixes, prompt, count=2)
        assert output == cold(network, prompt, 2)
        assert prefixes.stats().kv_bytes <= bound
        assert serve(network, prefixes, prompt, count=2)[0] == output
        seen.append(prompt)
    assert prefixes.stats().kv_bytes > bound // 2, "it is used, not only kept"
    assert prefixes.stats().hits >= 10


def test_of_a_row_too_large_its_beginning_is_kept(plain: Network) -> None:
    prefixes = of(plain, memory_bytes=150_000)
    prompt = prompt_of(700)
    serve(plain, prefixes, prompt)
    output, reused = serve(plain, prefixes, prompt)
    assert output == cold(plain, prompt)
    assert 300 < reused < 600


@pytest.mark.parametrize("kind", ["plain", "rotating"])
def test_a_row_that_brings_nothing_new_need_not_be_copied(
    networks: Callable[[str], Network], kind: str
) -> None:
    network = networks(kind)
    prefixes = of(network)
    prompt = prompt_of(128)
    cache = network.make_cache()
    read(network, prompt, cache)
    assert prefixes.wants(prompt) and not prefixes.wants(prompt[:31])
    prefixes.put(prompt, cache)
    assert not prefixes.wants(prompt)
    assert prefixes.wants(prompt, "other salt")
    assert prefixes.wants(prompt + prompt_of(64, 1))
    assert prefixes.wants(prompt + [5]) == (kind == "rotating")


def test_room_is_made_only_for_what_is_not_there(plain: Network) -> None:
    prefixes = of(plain, memory_bytes=150_000)
    serve(plain, prefixes, prompt_of(128, 1))
    chat = prompt_of(192)
    for turn in range(4):
        output, _ = serve(plain, prefixes, chat)
        chat = chat + output + prompt_of(20, turn)
    hit = prefixes.take(prompt_of(128, 1) + [5])
    assert hit is not None and hit.length == 128, "there was room for both"


def test_of_a_row_the_end_is_forgotten_first(plain: Network) -> None:
    """And no more than what another needs: 9 blocks fit, the rows have 6 and 5."""
    prefixes = of(plain, memory_bytes=150_000)
    first, second = prompt_of(384, 1), prompt_of(320, 2)
    serve(plain, prefixes, first, count=1)
    serve(plain, prefixes, second, count=1)
    for prompt, length in ((second, 320), (first, 256)):
        hit = prefixes.take(prompt + [5])
        assert hit is not None and hit.length == length


@pytest.mark.parametrize("kind", KINDS)
def test_a_restart_with_the_same_folder(
    networks: Callable[[str], Network], tmp_path: Path, kind: str
) -> None:
    network = networks(kind)
    prompt = prompt_of(300)
    for _ in range(2):
        prefixes = of(network, disk=tmp_path, disk_bytes=1 << 26)
        serve(network, prefixes, prompt)
        prefixes.close()
    for memory_bytes in (0, MEMORY_BYTES):
        prefixes = of(network, disk=tmp_path, disk_bytes=1 << 26, memory_bytes=memory_bytes)
        assert prefixes.stats().disk_bytes == sum(file.stat().st_size for file in files(tmp_path))
        for longer in (prompt, prompt + prompt_of(40, 1), prompt[:290]):
            output, reused = serve(network, prefixes, longer)
            assert output == cold(network, longer)
            assert reused >= 256
        prefixes.close()


@pytest.mark.parametrize("kind", ["plain", "rotating"])
def test_what_comes_back_is_what_was_kept(
    networks: Callable[[str], Network], tmp_path: Path, kind: str
) -> None:
    """To the bit, in bfloat16, from memory as from disk."""
    network = networks(kind)
    prompt = prompt_of(128)
    row = network.make_cache()
    read(network, prompt, row)
    for layer in row:
        layer.keys, layer.values = (a.astype(mx.bfloat16) for a in (layer.keys, layer.values))
    for memory_bytes in (MEMORY_BYTES, 0):
        prefixes = of(network, memory_bytes=memory_bytes, disk=tmp_path, disk_bytes=1 << 24)
        prefixes.put(prompt, row)
        prefixes.drain()
        hit = prefixes.take(prompt + [5])
        assert hit is not None and hit.length == 128
        for kept, layer in zip(hit.cache, row, strict=True):
            assert kept.offset == 128
            for given, back in zip(layer.state, kept.state, strict=True):
                assert back.dtype == mx.bfloat16 and mx.array_equal(given, back)
        prefixes.close()


def test_the_folder_holds_other_models_apart(plain: Network, tmp_path: Path) -> None:
    prompt = prompt_of(100)
    prefixes = of(plain, disk=tmp_path, disk_bytes=1 << 24)
    serve(plain, prefixes, prompt)
    prefixes.close()
    for other in (
        PrefixCache.of(plain, "other", memory_bytes=1, disk=tmp_path, disk_bytes=1 << 24),
        of(plain, options=CacheOptions(max_kv_size=64), disk=tmp_path, disk_bytes=1 << 24),
    ):
        assert other.take(prompt) is None
        other.close()


def _flip(file: Path) -> None:
    content = bytearray(file.read_bytes())
    content[len(content) // 2] ^= 1
    file.write_bytes(content)


def _flip_id(file: Path) -> None:
    content = file.read_bytes()
    at = content.index(b"token_ids") + 16
    file.write_bytes(content[:at] + b"9" + content[at + 1 :])


def _to_folder(file: Path) -> None:
    file.unlink()
    file.mkdir()


DAMAGES: dict[str, Callable[[Path], object]] = {
    "bit": _flip,
    "id": _flip_id,
    "cut": lambda file: file.write_bytes(file.read_bytes()[:-40]),
    "empty": lambda file: file.write_bytes(b""),
    "longer": lambda file: file.write_bytes(file.read_bytes() + b"0"),
    "json": lambda file: file.write_bytes((2).to_bytes(8, "little") + b"[]" + bytes(40)),
    "noise": lambda file: file.write_bytes(random.Random(0).randbytes(5000)),
    "gone": lambda file: file.unlink(),
    "folder": _to_folder,
}


@pytest.mark.parametrize("kind", ["plain", "rotating"])
@pytest.mark.parametrize("damage", DAMAGES)
@pytest.mark.parametrize("when", ["running", "stopped"])
def test_a_damaged_file_is_no_hit(
    networks: Callable[[str], Network], tmp_path: Path, kind: str, damage: str, when: str
) -> None:
    network = networks(kind)
    prompt = prompt_of(150)
    prefixes = of(network, memory_bytes=0, disk=tmp_path, disk_bytes=1 << 24)
    output, _ = serve(network, prefixes, prompt)
    prefixes.drain()
    if when == "stopped":
        prefixes.close()
    assert files(tmp_path)
    for file in files(tmp_path):
        DAMAGES[damage](file)
    if when == "stopped":
        prefixes = of(network, memory_bytes=0, disk=tmp_path, disk_bytes=1 << 24)
    assert serve(network, prefixes, prompt) == (output, 0)
    if damage != "folder":
        prefixes.drain()
        assert serve(network, prefixes, prompt) == (output, 128), "written anew"
    prefixes.close()


def test_a_file_of_another_model_is_no_hit(plain: Network, tmp_path: Path) -> None:
    """Someone copied a folder: the ids are the same, keys and values are not."""
    prompt = prompt_of(100)
    other = PrefixCache.of(plain, "other", memory_bytes=0, disk=tmp_path, disk_bytes=1 << 24)
    serve(plain, other, prompt)
    other.close()
    (file,) = files(tmp_path)
    prefixes = of(plain, memory_bytes=0, disk=tmp_path, disk_bytes=1 << 24)
    prefixes.close()
    (mine,) = (folder for folder in tmp_path.iterdir() if folder.name.startswith("model"))
    shutil.copy(file, mine / file.name)
    prefixes = of(plain, memory_bytes=0, disk=tmp_path, disk_bytes=1 << 24)
    assert prefixes.take(prompt) is None
    assert not (mine / file.name).exists()
    prefixes.close()


@pytest.mark.parametrize("kind", ["plain", "rotating"])
def test_the_bound_of_the_folder(
    networks: Callable[[str], Network], tmp_path: Path, kind: str
) -> None:
    """It holds for all models together, across restarts; what was used last stays."""
    network = networks(kind)
    bound = 250_000
    for name in ("one", "two"):
        prefixes = PrefixCache.of(network, name, memory_bytes=0, disk=tmp_path, disk_bytes=bound)
        for number in range(8):
            prompt = prompt_of(130, number)
            serve(network, prefixes, prompt)
            prefixes.drain()
            assert sum(file.stat().st_size for file in files(tmp_path)) <= bound
            assert prefixes.stats().disk_bytes <= bound
        assert serve(network, prefixes, prompt) == (cold(network, prompt), 128)
        prefixes.close()
    assert any("two" in str(file) for file in files(tmp_path))
    assert not any("one" in str(file) for file in files(tmp_path)), "used longest ago"


def test_of_a_chat_the_end_leaves_the_disk_first(plain: Network, tmp_path: Path) -> None:
    """Its turns are files of their own; without the first the others are of no use."""
    prefixes = of(plain, disk=tmp_path, disk_bytes=1 << 24)
    chat: list[int] = []
    for turn in range(4):
        chat = chat + prompt_of(64, turn)
        serve(plain, prefixes, chat + [5])
        prefixes.drain()
    by_use = sorted(files(tmp_path), key=lambda file: file.stat().st_mtime, reverse=True)
    assert len(by_use) == 4
    prefixes.close()
    for kept in (3, 2):
        by_use.pop().unlink()
        prefixes = of(plain, disk=tmp_path, disk_bytes=1 << 24)
        hit = prefixes.take(chat + [5])
        assert hit is not None and hit.length == 64 * kept
        prefixes.close()


def test_long_rows_are_in_several_files(
    plain: Network, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(prefix_store, "FILE_BYTES", 35_000)
    prompt = prompt_of(400)
    prefixes = of(plain, memory_bytes=0, disk=tmp_path, disk_bytes=1 << 24)
    serve(plain, prefixes, prompt)
    prefixes.drain()
    assert len(files(tmp_path)) == 3
    assert serve(plain, prefixes, prompt) == (cold(plain, prompt), 384)
    assert serve(plain, prefixes, prompt[:300]) == (cold(plain, prompt[:300]), 256)
    prefixes.close()


@pytest.mark.parametrize("fault", ["full", "unwritable", "queue"])
def test_what_cannot_be_written_is_not(
    plain: Network, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, fault: str
) -> None:
    prefixes = of(plain, memory_bytes=0, disk=tmp_path, disk_bytes=1 << 24)
    prompt = prompt_of(100)
    if fault == "full":
        monkeypatch.setattr(prefix_folder, "FREE_BYTES", 1 << 60)
    elif fault == "queue":
        assert prefixes._disk is not None
        # Another file waits already.
        prefixes._disk.queue_max_bytes = prefixes._disk._pending_bytes = 10
    else:
        monkeypatch.setattr(Path, "replace", _no_space)
    for _ in range(2):
        assert serve(plain, prefixes, prompt) == (cold(plain, prompt), 0)
        prefixes.drain()
    assert not files(tmp_path) and not list(tmp_path.glob("*/*.part"))
    assert prefixes.stats().disk_bytes == 0
    prefixes.close()


def _no_space(*_: object) -> None:
    raise OSError(28, "No space left on device")


def test_a_folder_that_cannot_be_used(plain: Network, tmp_path: Path) -> None:
    """The worker runs without a disk tier: a file in its place, or another worker has it."""
    blocked = tmp_path / "file"
    blocked.write_text("")
    prompt = prompt_of(100)
    first = of(plain, disk=tmp_path / "folder", disk_bytes=1 << 24)
    for folder in (blocked, tmp_path / "folder"):
        prefixes = of(plain, disk=folder, disk_bytes=1 << 24)
        serve(plain, prefixes, prompt)
        assert serve(plain, prefixes, prompt) == (cold(plain, prompt), 64)
        assert prefixes.stats().disk_bytes == 0
        prefixes.close()
    first.close()
    again = of(plain, disk=tmp_path / "folder", disk_bytes=1 << 24)
    serve(plain, again, prompt)
    again.drain()
    assert again.stats().disk_bytes > 0
    again.close()


def test_the_writer_ends(plain: Network, tmp_path: Path) -> None:
    before = threading.active_count()
    prefixes = of(plain, disk=tmp_path, disk_bytes=1 << 24)
    serve(plain, prefixes, prompt_of(100))
    assert threading.active_count() == before + 1
    prefixes.close()
    assert threading.active_count() == before
    assert files(tmp_path), "what waited was written"
    assert prefixes.take(prompt_of(100)) is None
    prefixes.put(prompt_of(100), plain.make_cache())


@pytest.mark.parametrize("kind", ["plain", "rotating"])
def test_variables_of_the_library_change_nothing(
    networks: Callable[[str], Network],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    kind: str,
) -> None:
    network = networks(kind)
    for name, value in {
        "APC_ENABLED": "0",
        "APC_HASH": "fast",
        "APC_BLOCK_SIZE": "7",
        "APC_NUM_BLOCKS": "1",
        "APC_MEMORY_MAX_GB": "0",
        "APC_MEMORY_RESERVE_GB": "1000000",
        "APC_CHECKPOINT_ENTRIES": "0",
        "APC_EXACT_CACHE_ENTRIES": "0",
        "APC_CHECKPOINT_GUARD_TOKENS": "50",
        "APC_CHECKPOINT_INTERVAL_TOKENS": "1",
        "APC_EXACT_MIN_TOKENS": "100000",
        "APC_DISK_MIN_FREE_RAM_GB": "1000000",
        "APC_DISK_QUEUE_MAX_GB": "0",
        "APC_DISK_SHARD_MAX_BLOCKS": "1",
        "APC_MAX_POOL_TENSORS": "1",
        "APC_LAYER_MAJOR_MEMORY_MIN_TOKENS": "1",
    }.items():
        monkeypatch.setenv(name, value)
    # Nor does what else runs on the machine.
    monkeypatch.setattr(apc, "_free_ram_bytes", lambda: 0)
    prompt = prompt_of(150)
    prefixes = of(network, disk=tmp_path, disk_bytes=1 << 24)
    assert os.environ["APC_HASH"] == "sha256"
    serve(network, prefixes, prompt)
    assert serve(network, prefixes, prompt) == (cold(network, prompt), 128)
    prefixes.close()
    assert len(files(tmp_path)) == (1 if kind == "plain" else 2)
    prefixes = of(network, disk=tmp_path, disk_bytes=1 << 24)
    assert serve(network, prefixes, prompt)[1] == 128
    prefixes.close()


def test_a_cache_that_does_not_hold_the_ids_is_refused(plain: Network) -> None:
    prefixes = of(plain)
    prompt = prompt_of(100)
    cache = plain.make_cache()
    read(plain, prompt, cache)
    prefixes.put(prompt + [7], cache)
    prefixes.put(prompt[:-1], cache)
    two = plain.make_cache()
    plain(mx.array([prompt, prompt]), two)
    prefixes.put(prompt, two)
    # Padding that is still to be taken out of a batch.
    prefixes.put(prompt, [layer.merge([layer, layer]) for layer in cache])
    prefixes.put(prompt, cache[:1])
    assert prefixes.stats().kv_bytes == 0
    prefixes.put(prompt, cache)
    assert prefixes.stats().kv_bytes > 0


@pytest.mark.parametrize("in_place", [True, False])
def test_rows_of_a_batch_are_kept(plain: Network, in_place: bool) -> None:
    """A short and a long row beside each other: no padding of the batch gets into the cache."""
    prompts = [prompt_of(70), prompt_of(150, 1)]
    rows = [plain.make_cache() for _ in prompts]
    for prompt, cache in zip(prompts, rows, strict=True):
        read(plain, prompt, cache)
    batch = caches.merge(rows)
    drawn = [3, 4]
    plain(mx.array(drawn)[:, None], batch)
    prefixes = of(plain)
    for index, row in enumerate(caches.extract(batch, [0, 1])):
        prompt = prompts[index]
        held = prompt + drawn[index : index + 1]
        if in_place:
            prefixes.put(held, batch, place=index)
        else:
            prefixes.put(held, row)
        output, reused = serve(plain, prefixes, prompt)
        assert output == cold(plain, prompt)
        assert reused == (len(prompt) - 1) // BLOCK_IDS * BLOCK_IDS


def test_a_prompt_that_is_still_read_is_shared(models: Callable[[str], LoadedModel]) -> None:
    """Its blocks are kept chunk by chunk, for those that begin with it and arrive meanwhile."""
    loaded = models("plain")
    rig = Rig(loaded, prefill_step=80, prefix_cache=of(loaded.network))
    prompt = prompt_of(300)
    rig.admit(request("first", prompt))
    rig.step(2)
    rig.admit(request("second", [*prompt[:250], 5], priority=0))
    rig.finish()
    assert rig.cached == {"first": 0, "second": 128}
    for name, ids in (("first", prompt), ("second", [*prompt[:250], 5])):
        assert rig.ids[name] == cold(loaded.network, ids, 16)


def test_quantised_rows_are_not_kept(networks: Callable[[str], Network]) -> None:
    """What was rounded is not what reading gives."""
    network = networks("wide")
    prefixes = of(network)
    prompt = prompt_of(100)
    cache = network.make_cache()
    read(network, prompt, cache)
    prefixes.put(prompt, quantised(cache, 8))
    assert prefixes.take(prompt) is None


def test_checkpoints_learn_what_prompts_share(networks: Callable[[str], Network]) -> None:
    """A system prompt ends where no checkpoint is; the third to begin with it finds one."""
    network = networks("recurrent")
    prefixes = of(network)
    system = prompt_of(200)
    reused = [serve(network, prefixes, system + prompt_of(50, salt))[1] for salt in range(4)]
    assert reused == [0, 0, 192, 192]
    assert prefixes.checkpoints(prompt_of(3000, 9)) == [512, 1024, 2048, 2976]
    assert prefixes.checkpoints(prompt_of(3000, 9), 1024) == [2048, 2976]
    assert prefixes.checkpoints(prompt_of(32, 9)) == []


class _Odd:
    """A layer nobody knows."""


def test_a_model_that_cannot_be_restored_keeps_nothing() -> None:
    class Strange:
        def make_cache(self) -> list[Any]:
            return [_Odd()]

    prefixes = PrefixCache.of(Strange(), "model", memory_bytes=MEMORY_BYTES)
    assert not prefixes.enabled
    assert prefixes.take(prompt_of(100)) is None
    assert prefixes.checkpoints(prompt_of(100)) == []
    prefixes.put(prompt_of(100), [_Odd()])
    assert prefixes.stats() == prefix_cache.PrefixStats(lookups=0)
    prefixes.close()


def test_switched_off(plain: Network) -> None:
    prefixes = of(plain, memory_bytes=0)
    assert not prefixes.enabled
    assert serve(plain, prefixes, prompt_of(100))[1] == 0

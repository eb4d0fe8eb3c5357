"""Checkpoints by their name on the Hugging Face Hub: in its local cache, or downloaded into it by huggingface_hub."""

from __future__ import annotations

import json
import os
import re
from pathlib import Path

from mmjax.errors import UserError

HUB_ID = re.compile(r"\w[\w.-]*/[\w.-]+")  # owner/name
WANTED = ("*.json", "*.safetensors", "*.jinja", "*.txt", "*.model")  # no pickled weights, which are never loaded
INDEX, SINGLE = "model.safetensors.index.json", "model.safetensors"


def checkpoint_folder(named: str | Path) -> Path:
    """Find the folder that a name stands for: a folder here, or a repository of the Hugging Face Hub, `owner/name`.

    A folder that exists always wins, and so does a path into one. The repository's newest commit that is in the local
    cache is taken as it is; where it is missing or not whole, it is downloaded. Raises UserError where that cannot be.
    A name that can be no repository's is given back: whoever reads it says that there is no such folder.
    """
    path = Path(named).expanduser()
    if path.exists() or not HUB_ID.fullmatch(str(named)) or path.parent.is_dir():
        return path
    cache = cache_folder()
    cached = _cached(cache, str(named))
    return cached if cached and is_whole(cached) else _download(cache, str(named))


def cache_folder() -> Path:
    """The cache that huggingface_hub and transformers use: `HF_HUB_CACHE`, else `HF_HOME/hub`."""
    if given := os.environ.get("HF_HUB_CACHE"):
        return Path(given).expanduser()
    home = os.environ.get("HF_HOME")
    general = os.environ.get("XDG_CACHE_HOME") or "~/.cache"
    return Path(home or f"{general}/huggingface").expanduser() / "hub"


def is_whole(folder: Path) -> bool:
    """Return whether a folder has a config.json and every file of the safetensors that it says."""
    if not (folder / "config.json").is_file():
        return False
    if not (folder / INDEX).is_file():
        return (folder / SINGLE).is_file()
    try:
        names = set(json.loads((folder / INDEX).read_text())["weight_map"].values())
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return False
    return all((folder / name).is_file() for name in names)


def _cached(cache: Path, name: str) -> Path | None:
    """The snapshot of a repository's main branch, where the cache has one."""
    stored = cache / f"models--{name.replace('/', '--')}"
    try:
        commit = (stored / "refs" / "main").read_text().strip()
    except OSError:
        return None
    snapshot = stored / "snapshots" / commit
    return snapshot if snapshot.is_dir() else None


def _download(cache: Path, name: str) -> Path:
    where = f"{name} is no folder here, and the Hugging Face cache {cache} does not hold it whole"
    remedy = f"fetch it where there is a network (hf download {name}) and copy that cache, or name its folder"
    if os.environ.get("HF_HUB_OFFLINE", "").lower() in ("1", "true", "yes", "on"):
        raise UserError(f"{where}; HF_HUB_OFFLINE forbids to download it: {remedy}")
    try:
        from huggingface_hub import snapshot_download
    except ImportError:
        raise UserError(f'{where}; pip install "mmjax[hub]" to have it downloaded, or {remedy}') from None
    try:
        folder = Path(snapshot_download(name, cache_dir=cache, allow_patterns=list(WANTED)))
    except Exception as error:  # of the network, of the disk, of the Hub itself: there are many
        reason = (str(error).strip() or type(error).__name__).splitlines()[0]
        raise UserError(f"{where}; it cannot be downloaded ({reason}): {remedy}") from None
    if not is_whole(folder):
        raise UserError(f"{name} of the Hugging Face Hub has no safetensors; pickled weights are never loaded")
    return folder

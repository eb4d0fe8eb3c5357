"""Checkpoints and data sets by their name on the Hugging Face Hub: in its local cache, or downloaded into it."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Callable, Sequence
from pathlib import Path, PurePath, PurePosixPath
from types import ModuleType
from typing import Any, Literal, TypeVar

from mmjax.disk import user_cache
from mmjax.errors import UserError

HUB_ID = re.compile(r"\w[\w.-]*/[\w.-]+")  # owner/name
# no pickled weights, which are never loaded
WANTED = ("*.json", "*.safetensors", "*.jinja", "*.txt", "*.model")
SINGLE = "model.safetensors"
DIFFUSERS_SINGLE = "diffusion_pytorch_model.safetensors"
# Of a diffusers repository what generators and their VAEs are made of: no text encoders, no
# half-precision variants.
GENERATOR_PARTS = (".", "transformer", "unet", "vae")
GENERATOR_WANTED = (
    "*.json",
    DIFFUSERS_SINGLE,
    f"*/{DIFFUSERS_SINGLE}",
    "*diffusion_pytorch_model-*-of-*.safetensors",
)
DATASET_URL = re.compile(r"hf://datasets/(\w[\w.-]*/[\w.-]+)/([^/].*)")  # a file, or a pattern
PARQUET, JSON = (".parquet",), (".json", ".jsonl")  # what files of data end with
# no records
DESCRIPTIONS = ("dataset_infos.json", "dataset_info.json", "dataset_dict.json", "state.json")
SPLIT_WORDS = {  # by which the Hub knows the split of a file, in its name or else in its folder's
    "train": {"train", "training"},
    "validation": {"validation", "valid", "val", "dev"},
    "test": {"test", "testing", "eval", "evaluation"},
}
SHARD = re.compile(r"(.*)-\d{5}-of-(\d{5})\.\w+")

Repository = Literal["models", "datasets"]
T = TypeVar("T")


def checkpoint_folder(named: str | Path) -> Path:
    """Find the folder that a name stands for: a folder here, or a repository of the Hugging Face Hub, `owner/name`.

    A folder that exists always wins, and so does a path into one. The repository's newest commit
    that is in the local cache is taken as it is; where it is missing or not whole, it is
    downloaded. Raises UserError where that cannot be. A name that can be no repository's is given
    back: whoever reads it says that there is no such folder.
    """
    return _folder_of(named, is_whole, WANTED)


def generator_folder(named: str | Path) -> Path:
    """Find the diffusers folder that a name stands for, as `checkpoint_folder` does of transformers' folders."""
    return _folder_of(named, _is_whole_generator, GENERATOR_WANTED)


def _folder_of(
    named: str | Path, is_whole: Callable[[Path], bool], patterns: Sequence[str]
) -> Path:
    if not _is_id(named):
        return Path(named).expanduser()
    cached = _cached("models", str(named))
    if cached and is_whole(cached):
        return cached
    folder = _download("models", str(named), str(named), allow_patterns=list(patterns))
    if not is_whole(folder):
        raise UserError(
            f"{named} of the Hugging Face Hub has no safetensors; pickled weights are never loaded"
        )
    return folder


def would_download(named: str) -> bool:
    """Return whether a name is a repository's, and no checkpoint that the local cache has whole."""
    return _is_id(named) and not ((cached := _cached("models", named)) and is_whole(cached))


def is_dataset(path: str) -> bool:
    """Return whether a path of data is a repository's name, `owner/name`: nothing of that name is here."""
    return _is_id(path) and not path.endswith(PARQUET + JSON)


def dataset_files(
    name: str, split: str, endings: Sequence[str], key: str, stream: bool = False
) -> list[str]:
    """List the files of a split of a data set on the Hub, all in one folder; those in the local cache as they are.

    endings: `PARQUET` or `JSON`. A file is of the split that its name or its folder's says; where
    none says any, all are of "train". Where the cache has no such files, or not every shard of
    them, the repository is downloaded; with `stream` the URLs of its newest commit are listed
    instead. Raises UserError, naming the config's `key`, where that cannot be, and where the files
    lie in several folders.
    """
    folder = str(_cached("datasets", name) or "")
    files = _split_files(folder, split, endings) if folder else []
    if not files or _missing_shards(files):
        if stream:
            folder, listed = _files_on_hub(name, f"{key}={name}")
            files = _files_of_split(listed, split, endings)
        else:
            filters = (
                {"allow_patterns": ["*.parquet"]}
                if endings == PARQUET
                else {"ignore_patterns": ["*.parquet"]}
            )
            folder = str(_download("datasets", name, f"{key}={name}", **filters))
            files = _split_files(folder, split, endings)
    if not files:
        raise UserError(
            f"{key}={name}: the data set has no {split} files that end with {' or '.join(endings)}"
        )
    folders = sorted({file.parent.as_posix() for file in files})
    if len(folders) > 1:
        raise UserError(
            f"{key}={name}: the data set has {split} files in {len(folders)} folders ({', '.join(folders[:5])}); name "
            f"those that are meant: hf://datasets/{name}/{folders[0]}/*{endings[0]}"
        )
    return [f"{folder}/{file}" for file in files]


def cached_path(path: str) -> str:
    """Find a `hf://datasets/` URL's file, or pattern of files, in the local cache; else give the path back."""
    if (named := DATASET_URL.fullmatch(path)) is None or (
        folder := _cached("datasets", named[1])
    ) is None:
        return path
    files = list(folder.glob(named[2]))
    return str(folder / named[2]) if files and not _missing_shards(files) else path


def dataset_name(path: str) -> str:
    """Return the name of the data set on the Hub that a path of data is in; empty for other paths."""
    if url := DATASET_URL.fullmatch(path):
        return url[1]
    return path if is_dataset(path) else ""


def repository_name(folder: Path) -> str:
    """Return the name of the repository whose snapshot in the cache a folder is; empty for other folders."""
    stored = folder.parent.parent.name
    kind, _, name = stored.partition("--")
    return name.replace("--", "/") if kind == "models" and folder.parent.name == "snapshots" else ""


def check_push(name: str) -> None:
    """Check that a folder can be pushed. Raises UserError where `name` is no repository's, or nobody is logged in."""
    if not HUB_ID.fullmatch(name):
        raise UserError(f"--push {name}: name a repository of the Hugging Face Hub, owner/name")
    _call_for_push(f"--push {name}", lambda hub: hub.HfApi().whoami())


def push(folder: Path, name: str, private: bool) -> str:
    """Push a folder as one commit to a model's repository, which is made where there is none; return its URL."""

    def upload(hub: ModuleType) -> str:
        api = hub.HfApi()
        api.create_repo(name, private=private, exist_ok=True)
        return str(api.upload_folder(repo_id=name, folder_path=folder))

    return _call_for_push(f"{folder} is written, and was not pushed to {name}", upload)


def repository_of(folder: str) -> str:
    """Find the folder of the cache that holds the bytes to which a data set's snapshot links; empty for others."""
    parts = Path(os.path.abspath(folder)).parts
    stored = (
        i
        for i in range(len(parts) - 1)
        if parts[i].startswith("datasets--") and parts[i + 1] == "snapshots"
    )
    return next((os.path.join(*parts[: i + 1]) for i in stored), "")


def cache_folder() -> Path:
    """The cache that huggingface_hub and transformers use: `HF_HUB_CACHE`, else `HF_HOME/hub`."""
    if cache := os.environ.get("HF_HUB_CACHE"):
        return Path(cache).expanduser()
    hf_home = os.environ.get("HF_HOME")
    return (Path(hf_home).expanduser() if hf_home else user_cache("huggingface")) / "hub"


def is_whole(folder: Path, single: str = SINGLE) -> bool:
    """Return whether a folder has a config.json and every file of the safetensors that it says."""
    index = folder / f"{single}.index.json"
    if not (folder / "config.json").is_file():
        return False
    if not index.is_file():
        return (folder / single).is_file()
    try:
        names = set(json.loads(index.read_text())["weight_map"].values())
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return False
    return all((folder / name).is_file() for name in names)


def _is_whole_generator(folder: Path) -> bool:
    parts = [folder / part for part in GENERATOR_PARTS if (folder / part / "config.json").is_file()]
    return bool(parts) and all(is_whole(part, DIFFUSERS_SINGLE) for part in parts)


def _is_id(named: str | Path) -> bool:
    """Return whether a name can only be a repository's: neither it nor its first folder is here."""
    path = Path(named).expanduser()
    return bool(HUB_ID.fullmatch(str(named))) and not path.exists() and not path.parent.is_dir()


def _split_files(folder: str, split: str, endings: Sequence[str]) -> list[PurePosixPath]:
    """List the files of a snapshot that are of a split, relative to it and sorted."""
    files = (path.relative_to(folder) for path in Path(folder).rglob("*"))
    return _files_of_split([PurePosixPath(path) for path in files], split, endings)


def _files_of_split(
    files: Sequence[PurePosixPath], split: str, endings: Sequence[str]
) -> list[PurePosixPath]:
    data = sorted(
        path
        for path in files
        if path.name.endswith(tuple(endings)) and path.name not in DESCRIPTIONS
    )
    splits = {path: _split_of(path) for path in data}
    named = any(splits.values())
    return [path for path in data if (splits[path] or ("" if named else "train")) == split]


def _split_of(path: PurePosixPath) -> str:
    """Read the split from the words of a file's name, else of its folders' names; empty where they say none."""
    for text in (path.name, str(path.parent)):
        words = set(re.split(r"[^a-z]+", text.lower()))
        if named := [split for split, known in SPLIT_WORDS.items() if words & known]:
            return named[0]
    return ""


def _missing_shards(files: Sequence[PurePath]) -> bool:
    """Return whether some of `train-00000-of-00005.parquet` and its like are not there."""
    shards = [match for file in files if (match := SHARD.fullmatch(str(file)))]
    counts = {(match[1], int(match[2])): 0 for match in shards}
    for match in shards:
        counts[match[1], int(match[2])] += 1
    return any(present < shards_of_set for (_, shards_of_set), present in counts.items())


def _cached(kind: Repository, name: str) -> Path | None:
    """The snapshot of a repository's main branch, where the cache has one."""
    stored = cache_folder() / f"{kind}--{name.replace('/', '--')}"
    try:
        commit = (stored / "refs" / "main").read_text().strip()
    except OSError:
        return None
    snapshot = stored / "snapshots" / commit
    return snapshot if snapshot.is_dir() else None


def _download(kind: Repository, name: str, where: str, **patterns: Any) -> Path:
    """Download a repository into the cache. where: what an error begins with. patterns: huggingface_hub's own."""

    def download(hub: ModuleType) -> Path:
        repo_type = kind.removesuffix("s")
        return Path(
            hub.snapshot_download(name, repo_type=repo_type, cache_dir=cache_folder(), **patterns)
        )

    return _ask_hub(kind, name, where, download)


def _files_on_hub(name: str, where: str) -> tuple[str, list[PurePosixPath]]:
    """Return the URL of a data set's newest commit, and the files there."""

    def ask(hub: ModuleType) -> tuple[str, list[PurePosixPath]]:
        commit = hub.HfApi().dataset_info(name).sha
        files = hub.HfApi().list_repo_files(name, repo_type="dataset", revision=commit)
        return f"hf://datasets/{name}@{commit}", [PurePosixPath(file) for file in files]

    return _ask_hub("datasets", name, where, ask)


def _ask_hub(kind: Repository, name: str, where: str, ask: Callable[[ModuleType], T]) -> T:
    """Call `ask` with huggingface_hub. Raises UserError, which begins with `where`, for whatever goes wrong."""
    what, cache = {"models": "folder", "datasets": "file"}[kind], cache_folder()
    missing = (
        f"{where} is no {what} here, and the Hugging Face cache {cache} does not hold it whole"
    )
    command = f"hf download {'' if kind == 'models' else '--repo-type dataset '}{name}"
    remedy = (
        f"fetch it where there is a network ({command}) and copy that cache, or name its {what}"
    )
    if os.environ.get("HF_HUB_OFFLINE", "").lower() in ("1", "true", "yes", "on"):
        raise UserError(f"{missing}; HF_HUB_OFFLINE forbids to download it: {remedy}")
    return _call_hub(
        ask,
        f'{missing}; pip install "mmjax[hub]" to have it downloaded, or {remedy}',
        lambda reason: f"{missing}; it cannot be downloaded ({reason}): {remedy}",
    )


def _call_hub(
    call: Callable[[ModuleType], T], uninstalled: str, describe: Callable[[str], str]
) -> T:
    """Call `call` with huggingface_hub.

    Raises UserError: `uninstalled` where the library is missing, and what `describe` makes of the
    reason where the call fails.
    """
    try:
        import huggingface_hub
    except ImportError:
        raise UserError(uninstalled) from None
    try:
        return call(huggingface_hub)
    except Exception as error:  # of the network, of the disk, of the Hub itself: there are many
        reason = (str(error).strip() or type(error).__name__).splitlines()[0]
        raise UserError(describe(reason)) from None


def _call_for_push(where: str, call: Callable[[ModuleType], T]) -> T:
    return _call_hub(
        call,
        f'{where}: pip install "mmjax[hub]"',
        lambda reason: (
            f"{where}: {reason}; log in with hf auth login, or set HF_TOKEN, and see that the network is there"
        ),
    )

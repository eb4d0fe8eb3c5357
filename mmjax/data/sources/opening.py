"""Open the sources that a config names."""

from __future__ import annotations

import inspect
import os
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

from mmjax.config import (
    ArrayRecordSource,
    ChatFormat,
    Config,
    CsvSource,
    DataConfig,
    DatasetInfoSource,
    EmbeddedSource,
    FileSource,
    FunctionSource,
    LlavaSource,
    ManifestSource,
    MessagesSource,
    ModelConfig,
    ParquetSource,
    QuestionsSource,
    WebDatasetSource,
)
from mmjax.config.loading import resolve, resolve_callbacks
from mmjax.data.sample import BadSample, Files, Medium, Source, Split
from mmjax.data.sources.answers import FORMS, parse_answers, with_loss
from mmjax.data.sources.array_records import INDEX, ArrayRecords
from mmjax.data.sources.chat_files import ChatFiles
from mmjax.data.sources.chat_records import (
    Record,
    parse_chat,
    parse_manifest_line,
    parse_question_record,
)
from mmjax.data.sources.chat_source import ChatSource
from mmjax.data.sources.csv_tables import TABLES, to_parquet
from mmjax.data.sources.dataset_info import DATASET_INFO, DatasetInfo, read_entries
from mmjax.data.sources.energon import list_shards
from mmjax.data.sources.json_records import JsonRecords
from mmjax.data.sources.parquet import COLUMNS, ParquetRecords
from mmjax.data.sources.parquet_files import column_names
from mmjax.data.sources.webdataset import WebDatasetRecords
from mmjax.data.storage.archives import ARCHIVES, COMPRESSED, MediaFolder
from mmjax.data.storage.files import Conversations, drop_ignored, is_url, list_files
from mmjax.data.storage.spool import Spool
from mmjax.data.text.chat import Chat
from mmjax.data.text.load_chat import load_chat
from mmjax.data.toy.dataset import EmbeddedDataset
from mmjax.disk import user_cache
from mmjax.errors import UserError
from mmjax.hub import JSON, PARQUET, cached_path, dataset_files, is_dataset

ReadRecord = Callable[[Mapping[str, Any]], Record]

KEYS = {  # of a JSON record, by which its file is known
    **{form.key: form.source for form in FORMS.values()},
    "conversations": LlavaSource,
    "messages": MessagesSource,
    "audio_filepath": ManifestSource,
    "question": QuestionsSource,
}


def split_data_set(path: str) -> tuple[str, str]:
    """Split `FOLDER/dataset_info.json#NAME` into file and data set; the latter is empty for other paths."""
    file, _, entry = path.partition("#")
    return (file, entry) if os.path.basename(file) == DATASET_INFO else (path, "")


def source_of(path: str, option: str, cache: Path, **folders: str) -> FileSource:
    """Choose the source that a file's name or first record says. folders: `images`, `audio`, `videos`, where given.

    path: of a dataset_info.json with several data sets, `#` and the name of one behind it. Raises
    UserError, naming `option`, where neither says what it is.
    """
    file, entry = split_data_set(path)
    if os.path.basename(file) == DATASET_INFO:
        names = list(read_entries(Path(file), f"{option} {file}"))
        if not entry and len(names) != 1:
            raise UserError(
                f"{option} {file}: name one of its data sets behind it, {file}#NAME: {', '.join(names)}"
            )
        return DatasetInfoSource(file, entry or names[0])
    if os.path.isfile(os.path.join(path, INDEX)):
        return ArrayRecordSource(path)
    paths = list_shards(path, option)
    if paths[0].endswith(".tar"):
        return WebDatasetSource(path)
    if paths[0].endswith((".parquet", *TABLES)):
        return _columns_source(
            path, to_parquet(paths[:1], cache)[0], option, folders.get("images", "")
        )
    records = JsonRecords(paths, cache)
    try:
        first: Any = records[0] if len(records) else {}
    except BadSample as error:
        raise UserError(f"{option} {path}: its first record {error}") from None
    kind = next((kind for key, kind in KEYS.items() if key in first), None)
    if kind is None:
        raise UserError(
            f"{option} {path}: its first record has none of {', '.join(KEYS)}; name what it is in a config's "
            "data.sources and score that"
        )
    kind_folders = {
        name: folder
        for name, folder in folders.items()
        if folder and name in kind.__dataclass_fields__
    }
    return kind(path, **kind_folders)


def _columns_source(path: str, first: str, option: str, images: str) -> ParquetSource:
    """Choose the columns of Parquet or CSV by their names. first: the first file, as Parquet."""
    names = column_names(first)
    columns = {what: _first(known, names) for what, known in COLUMNS.items()}
    answers = next((kind for kind, form in FORMS.items() if {*form.columns} <= {*names}), "one")
    if answers != "one":
        columns |= {"messages": "", "question": "", "answer": "", "answers": answers}
    elif columns["messages"]:
        columns |= {"question": "", "answer": ""}
    elif not (columns["question"] and columns["answer"]):
        raise UserError(
            f"{option} {path}: has the columns {', '.join(names)}; expected messages, or question and answer"
        )
    if path.endswith(TABLES):
        return CsvSource(path, **columns, media=images)
    return ParquetSource(path, **columns)


def _first(known: Sequence[str], names: Sequence[str]) -> str:
    return next((name for name in known if name in names), "")


# where a record has them
TURNS = {"llava": "conversations", "sharegpt": "conversations", "messages": "messages"}
FOLDERS: Mapping[Medium, str] = {
    "image": "images",
    "audio": "audio",
    "video": "videos",
}  # where a source says that media are

SPLITS: tuple[Split, ...] = ("train", "validation", "test")


def cache_folder(data: DataConfig) -> Path:
    """Return the folder that caches what is learned of files."""
    return Path(data.cache).expanduser() if data.cache else user_cache() / "data"


def part_name(source: str, split: Split) -> str:
    """Name a split of a source for a person: by the source alone where it is train, which most sources have alone."""
    return source if split == "train" else f"{source} {split}"


def path_of(source: FileSource, split: Split) -> str:
    """Return the path of a split's files; empty where the source has none for it."""
    return source.path if split == "train" else str(getattr(source, split))


def open_conversations(
    source: FileSource,
    split: Split,
    cache: Path,
    key: str,
    window_space: float = DataConfig.window_space,
) -> Conversations:
    """Open the records of a source's split. No media is read.

    key: of the source in the config, for messages. window_space: as in `DataConfig`. Raises
    UserError where files or folders are missing or broken, or hold no records.
    """
    where = f"{key}.{'path' if split == 'train' else split}"
    if not (path := path_of(source, split)):
        raise UserError(f"{where} is empty: the source has no {split} files; name some")
    try:
        cache.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UserError(
            f"data.cache={cache}: {error.strerror}; name a folder that you may write"
        ) from None
    files = _Files(
        path=cached_path(os.path.expanduser(path)),
        split=split,
        cache=cache,
        key=key,
        ignore=getattr(source, "ignore", ()),
        spool=Spool(cache / "window", round(window_space * 1e9)),
    )
    opened = OPENERS.get(source.kind, _open_json)(source, files)
    if not len(opened):
        raise UserError(f"{where}={path}: holds no records")
    return opened


class _Files(NamedTuple):
    """Say where a source's files are, and what their key is called in messages."""

    path: str
    split: Split
    cache: Path
    key: str  # of the source in the config
    ignore: Sequence[str]  # patterns of files that are left out
    spool: Spool

    @property
    def where(self) -> str:
        """Return the key of the split's path."""
        return f"{self.key}.{'path' if self.split == 'train' else self.split}"

    def listed(self, kind: str, streamed: bool = False) -> tuple[list[str], str]:
        """List the files, of a data set on the Hub those of this kind; also return what names of media start from."""
        if is_dataset(self.path):
            paths = dataset_files(self.path, self.split, kind, self.where, streamed)
            paths = drop_ignored(paths, self.ignore, self.where)
            return paths, paths[0]
        return drop_ignored(list_files(self.path, self.where), self.ignore, self.where), self.path


def _open_array_records(source: ArrayRecordSource, files: _Files) -> Conversations:
    return ArrayRecords(files.path, files.cache)


def _open_dataset_info(source: DatasetInfoSource, files: _Files) -> Conversations:
    entry = source.entry if files.split == "train" else files.path
    info = DatasetInfo.read(source.path, entry, files.key, source.outside)
    folder = MediaFolder(info.folder, source.outside, files.cache, f"{files.key}.outside")
    return ChatFiles(
        info.files,
        files.cache,
        dict.fromkeys(FOLDERS, folder),
        read=info.record,
        reading=info.reading,
        samples=info.samples,
    )


def _open_webdataset(source: WebDatasetSource, files: _Files) -> Conversations:
    return WebDatasetRecords(
        files.path,
        source,
        files.split,
        cache=files.cache,
        where=files.where,
        spool=files.spool,
    )


def _open_parquet(source: ParquetSource, files: _Files) -> Conversations:
    paths, path = files.listed(PARQUET, streamed=source.window > 0)
    kind = "csv" if paths[0].endswith(TABLES) else "parquet"
    if source.kind != kind:
        raise UserError(f"{files.where}={path}: is read by the kind {kind}: {files.key}={kind}")
    folder = _media_folder(source, "media", path, files.cache, files.key)
    return ParquetRecords(paths, source, folder, files.key, files.spool)


def _open_json(source: FileSource, files: _Files) -> Conversations:
    paths, path = files.listed(JSON)
    read, reading = RECORDS[source.kind](source)
    folders = {
        medium: _media_folder(source, name, path, files.cache, files.key)
        for medium, name in FOLDERS.items()
    }
    return ChatFiles(paths, files.cache, folders, read, reading)


def _manifest(source: ManifestSource) -> tuple[ReadRecord, str]:
    return partial(parse_manifest_line, prompt=source.prompt), f"clips {source.prompt}"


def _questions(source: QuestionsSource) -> tuple[ReadRecord, str]:
    keys = {"question": source.question, "answer": source.answer}
    return partial(parse_question_record, **keys), f"questions {keys}{_videos(source)}"


def _answers(source: FileSource) -> tuple[ReadRecord, str]:
    return partial(parse_answers, kind=source.kind), source.kind + _videos(source)


def _turns(source: FileSource) -> tuple[ReadRecord, str]:
    turns = TURNS[source.kind]
    return partial(parse_chat, turns=turns), turns + _videos(source)


def _videos(source: FileSource) -> str:
    return f" videos={source.videos}" if source.videos else ""


# By the kind of a source of JSON records, how a record is read, and what cached facts depend on.
RECORDS: Mapping[str, Callable[[Any], tuple[ReadRecord, str]]] = {
    **dict.fromkeys(TURNS, _turns),
    **{form.source.kind: _answers for form in FORMS.values()},
    "manifest": _manifest,
    "questions": _questions,
}
# By the kind of a source, what opens its files; JSON records: `_open_json`.
OPENERS: Mapping[str, Callable[[Any, _Files], Conversations]] = {
    "arrayrecord": _open_array_records,
    "dataset_info": _open_dataset_info,
    "webdataset": _open_webdataset,
    "parquet": _open_parquet,
    "csv": _open_parquet,
}


def _media_folder(source: Any, name: str, path: str, cache: Path, key: str) -> MediaFolder:
    """Return where media are looked for: the folder under this key of the source, or that of its file."""
    root = os.path.expanduser(getattr(source, name, ""))
    archive = os.path.isfile(root) and root.endswith((*ARCHIVES, *COMPRESSED))
    if root and not is_url(root) and not os.path.isdir(root) and not archive:
        raise UserError(
            f"{key}.{name}={root}: there is no such folder or archive ({', '.join(ARCHIVES)})"
        )
    return MediaFolder(root or _parent(path), source.outside, cache, f"{key}.outside")


def _parent(path: str) -> str:
    """Return the folder of a file, or of the first pattern in its path."""
    # For data/*/a-[0-9].jsonl the first pattern begins behind data/, so its folder is data.
    plain = min((path.find(mark) for mark in "*?[" if mark in path), default=len(path))
    folder = path[:plain].rpartition("/")[0]
    return folder or ("/" if path.startswith("/") else ".")


REQUIRED = ("__len__", "fingerprint", "facts", "sample", "item")  # of a Source


def open_sources(config: Config, split: Split, config_folder: Path) -> dict[str, Source]:
    """Open the sources of one split, by name, in the config's order.

    A function source is called with its arguments and the split, and must return a `Source`. Raises
    UserError where it can't be called so, or returns something else, and where there are no
    sources. A source of files that has none for the split is left out.
    """
    if not config.data.sources:
        raise UserError(
            "data.sources is empty; name at least one, such as data.sources.digits=embedded"
        )
    sources = {
        name: source
        for name, source in config.data.sources.items()
        if not isinstance(source, FileSource) or path_of(source, split)
    }
    chat = _chat(config, sources)
    return {
        name: _open(name, source, split, config, config_folder, chat)
        for name, source in sources.items()
    }


def look_again(sources: Mapping[str, Source]) -> None:
    """Look up what has changed in the sources' files since they were read last."""
    for source in sources.values():
        if isinstance(source, ChatSource):
            source.read_headers()
            source.count_tokens()


def records_of(sources: Mapping[str, Source]) -> dict[str, str]:
    """Hash the records of each source, without what the headers of their media say."""
    return {
        n: (s.conversations if isinstance(s, ChatSource) else s).fingerprint()
        for n, s in sources.items()
    }


def contents_of(sources: Mapping[str, Source]) -> dict[str, str]:
    """Hash what the conversations of each source say, whatever their files are called and when they were written."""
    return {
        name: source.content() for name, source in sources.items() if isinstance(source, ChatSource)
    }


def check_records(sources: Mapping[str, Source], expected: Mapping[str, str]) -> None:
    """Raise UserError where sources have other records than those expected, by `records_of`; watch their media."""
    for name, digest in records_of(sources).items():
        if isinstance(sources[name], ChatSource):
            sources[name].watched = True
        if digest != expected[name]:
            raise UserError(
                f"data.sources.{name}: its files have changed since the run opened them, or processes see other ones; "
                "restore them and go on with --resume, or train on what they have now with --resume --new-data"
            )


def files_of(source: Source) -> Files:
    """List the files that a source's samples are in, where it can tell by `files()`; else one without a name."""
    return source.files() if hasattr(source, "files") else [("", len(source))]


def notes_of(sources: Mapping[str, Source]) -> list[str]:
    """Return notes for the user on how conversations become tokens, and on keys of records that nothing reads."""
    chats = {name: source for name, source in sources.items() if isinstance(source, ChatSource)}
    notes = dict.fromkeys(note for source in chats.values() for note in source.chat.notes)
    return [
        *notes,
        *(
            line
            for name, source in chats.items()
            for line in describe_unread(name, source.unread_keys)
        ),
    ]


def describe_unread(name: str, counts: Mapping[str, int]) -> list[str]:
    """Say which keys of a source's records nothing reads; nothing where there are none."""
    if not counts:
        return []
    keys = ", ".join(
        f"`{key}` in {count:,} record{'s' * (count != 1)}" for key, count in counts.items()
    )
    return [f"ignored keys of {name}: {keys}"]


def _chat(config: Config, sources: Mapping[str, Any]) -> Chat | None:
    """Load the tokenizer and template, if there are conversations."""
    names = [name for name, source in sources.items() if isinstance(source, FileSource)]
    if not names:
        return None
    if config.data.chat is None:
        raise UserError(
            f"data.sources.{names[0]} has conversations, but data.chat does not say how they become tokens; name "
            "the folder of the checkpoint whose tokenizer and chat template to use: data.chat.folder=FOLDER"
        )
    return with_loss(chat_for(config.data.chat, config.model), config.loss)


def chat_for(
    form: ChatFormat, model: ModelConfig, load: Callable[[ChatFormat], Chat] = load_chat
) -> Chat:
    """Load the tokenizer and template of this model's conversations. Raises UserError where it has not so many tokens.

    load: `load_prompt_chat` where nothing is trained.
    """
    chat = load(form)
    if (tokens := len(chat.tokenizer)) > (vocab := model.llm.vocab):
        raise UserError(
            f"data.chat.folder={form.folder}: its tokenizer has {tokens} tokens, model.llm.vocab={vocab}; "
            "use the model's own tokenizer"
        )
    return chat


def _open(
    name: str,
    source: EmbeddedSource | FunctionSource | FileSource,
    split: Split,
    config: Config,
    config_folder: Path,
    chat: Chat | None,
) -> Source:
    if isinstance(source, EmbeddedSource):
        return EmbeddedDataset(source, split, config.seed)
    if isinstance(source, FileSource):
        cache = cache_folder(config.data)
        reopen = partial(
            open_conversations,
            source,
            split,
            cache,
            f"data.sources.{name}",
            window_space=config.data.window_space,
        )
        functions = resolve_callbacks(config.model, config_folder)
        modules = config.model.item_modules
        return ChatSource(
            reopen, chat, modules, cache, functions=functions, limits=config.data.limits
        )
    make = resolve(source.function, config_folder)
    arguments = {"split": split, **source.arguments}
    try:
        inspect.signature(make).bind(**arguments)
    except TypeError as error:
        names = ", ".join(arguments)
        raise UserError(
            f"data.sources.{name}: {source.function} cannot be called with {names}: {error}"
        ) from None
    opened = make(**arguments)
    if missing := [method for method in REQUIRED if not hasattr(opened, method)]:
        returned = type(opened).__name__
        raise UserError(
            f"data.sources.{name}: {source.function} returned {returned}, which has no {missing[0]}()"
        )
    return opened

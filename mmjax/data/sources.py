"""Opens the sources that a config names."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

from mmjax.config import ChatFormat, Config, EmbeddedSource, FileSource, FunctionSource, ModelConfig
from mmjax.config_files import resolve, resolve_callbacks
from mmjax.data.chat import Chat, load_chat
from mmjax.data.chat_source import ChatSource
from mmjax.data.embedded import EmbeddedDataset
from mmjax.data.file_sources import Split, cache_folder, open_conversations, path_of
from mmjax.data.sample import Source
from mmjax.data.segments import Files
from mmjax.errors import UserError

REQUIRED = ("__len__", "fingerprint", "facts", "sample", "item")  # of a Source


def open_sources(config: Config, split: Split, config_folder: Path) -> dict[str, Source]:
    """The sources of one split, by name, in the config's order.

    A function source is called with its arguments and the split, and must return a `Source`. Raises UserError where it
    can't be called so, or returns something else, and where there are no sources. A source of files that has none for
    the split is left out.
    """
    if not config.data.sources:
        raise UserError("data.sources is empty; name at least one, such as data.sources.digits=embedded")
    there = {
        name: source
        for name, source in config.data.sources.items()
        if not isinstance(source, FileSource) or path_of(source, split)
    }
    chat = _chat(config, there)
    return {name: _open(name, source, split, config, config_folder, chat) for name, source in there.items()}


def look_again(sources: Mapping[str, Source]) -> None:
    """See what has changed in the sources' files since they were read last."""
    for source in sources.values():
        if isinstance(source, ChatSource):
            source.read_headers()
            source.count_tokens()


def files_of(source: Source) -> Files:
    """The files that a source's samples are in, where it can tell by `files()`; else one without a name."""
    return source.files() if hasattr(source, "files") else [("", len(source))]


def notes_of(sources: Mapping[str, Source]) -> list[str]:
    """Return notes for the user on how conversations become tokens."""
    return list(dict.fromkeys(note for s in sources.values() if isinstance(s, ChatSource) for note in s.chat.notes))


def _chat(config: Config, sources: Mapping[str, Any]) -> Chat | None:
    """The tokenizer and template, if there are conversations."""
    of_files = [name for name, source in sources.items() if isinstance(source, FileSource)]
    if not of_files:
        return None
    if config.data.chat is None:
        raise UserError(
            f"data.sources.{of_files[0]} has conversations, but data.chat does not say how they become tokens; name "
            "the folder of the checkpoint whose tokenizer and chat template to use: data.chat.folder=FOLDER"
        )
    return chat_for(config.data.chat, config.model)


def chat_for(form: ChatFormat, model: ModelConfig, load: Callable[[ChatFormat], Chat] = load_chat) -> Chat:
    """The tokenizer and template of this model's conversations. Raises UserError where it has not so many tokens.

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
        reopen = partial(open_conversations, source, split, cache, f"data.sources.{name}")
        functions = resolve_callbacks(config.model, config_folder)
        return ChatSource(reopen, chat, config.model.encoders, cache, functions)
    make, arguments = resolve(source.function, config_folder), {"split": split, **source.arguments}
    try:
        inspect.signature(make).bind(**arguments)
    except TypeError as error:
        given = ", ".join(arguments)
        raise UserError(f"data.sources.{name}: {source.function} cannot be called with {given}: {error}") from None
    opened = make(**arguments)
    if missing := [method for method in REQUIRED if not hasattr(opened, method)]:
        made = type(opened).__name__
        raise UserError(f"data.sources.{name}: {source.function} returned {made}, which has no {missing[0]}()")
    return opened

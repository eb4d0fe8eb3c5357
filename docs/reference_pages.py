"""Hooks of MkDocs: pages of the site that are made from the code, and links to files outside docs/.

`mkdocs.yml` names this file. Nothing that it makes is committed, so nothing can be out of date.
"""

from __future__ import annotations

import contextlib
import dataclasses
import importlib
import inspect
import io
import os
import posixpath
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any, get_args, get_origin

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

from mmjax.cli import COMMANDS
from mmjax.config import Config
from mmjax.config.codec import (
    defaults,
    expected,
    field_hints,
    join,
    required,
    text_of,
    union_members,
)
from mmjax.config.meanings import field_comments

ROOT = Path(__file__).parent.parent
LINK = re.compile(r"\]\((?!\w+:|#)([^)#\s]+)([^)\s]*)\)")
BORROWED = {  # pages whose source lies outside docs/
    "README.md": "index.md",
    "tests/README.md": "tests.md",
    "CONTRIBUTING.md": "contributing.md",
    "CHANGELOG.md": "changelog.md",
}


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add the pages that are made here."""
    pages = {page: (ROOT / source).read_text() for source, page in BORROWED.items()}
    pages |= {"reference/config.md": config_page(), "reference/commands.md": commands_page()}
    for page, text in pages.items():
        files.append(File.generated(config, page, content=text))
    return files


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Direct links to files of the repository outside docs/ to copies of them; a folder's link becomes plain text."""
    sources = {page: source for source, page in BORROWED.items()}
    place = sources.get(page.file.src_uri) or posixpath.join("docs", page.file.src_uri)

    def link(match: re.Match[str]) -> str:
        path = posixpath.normpath(posixpath.join(posixpath.dirname(place), match[1]))
        target = BORROWED.get(path) or path.removeprefix("docs/")
        if target == path and (ROOT / path).is_dir():
            return "]"
        if target == path and (ROOT / path).is_file():
            target = f"source/{path}.txt"  # browsers show a .txt, and save a .py
            if files.get_file_from_path(target) is None:
                files.append(File.generated(config, target, content=(ROOT / path).read_text()))
        return (
            f"]({posixpath.relpath(target, posixpath.dirname(page.file.src_uri) or '.')}{match[2]})"
        )

    return LINK.sub(link, markdown)


# ------------------------------------------------------------------------------------------------------------
# config

CONFIG_HEAD = """# Config reference

Every key that a config can have, with its type, its default and its meaning. Keys are written as on the command line:
`python -m mmjax.train CONFIG training.steps=300`. `NAME` is a name of your choice; where a key takes one of several
kinds, naming the kind takes it with its defaults. `python -m mmjax.train CONFIG --show` prints the keys of one config,
with their values.
"""


def config_page() -> str:
    """Describe every key of every section, as the dataclasses of mmjax.config say."""
    places: dict[type, list[str]] = {}
    for cls, where in sections(Config, ""):
        places.setdefault(cls, []).append(where)
    return "\n".join([CONFIG_HEAD, *(section(cls, found) for cls, found in places.items())])


def sections(cls: type, where: str) -> Iterator[tuple[type, str]]:
    """Yield every dataclass that a config can hold, with the key at which it stands."""
    yield cls, where
    for name, hint in field_hints(cls).items():
        for member, key in members(hint, join(where, name)):
            yield from sections(member, key)


def members(hint: Any, key: str) -> Iterator[tuple[type, str]]:
    """Yield the dataclasses that the value of a key may be, with the key of each; entries of a dict are NAME."""
    for member in union_members(hint):
        if dataclasses.is_dataclass(member):
            yield member, f"{key}={member.kind}" if hasattr(member, "kind") else key
        elif get_origin(member) is dict:
            yield from members(get_args(member)[1], join(key, "NAME"))


def section(cls: type, places: list[str]) -> str:
    """Describe the keys of one dataclass in a table."""
    keys = ", ".join(f"`{place}`" for place in dict.fromkeys(places) if place)
    text = [f"## {cls.__name__}", inspect.getdoc(cls) or "", keys and f"At {keys}."]
    table = ["| key | value | default | meaning |", "|---|---|---|---|"]
    tree = defaults(cls, "")
    for name, hint in field_hints(cls).items():
        nested = [
            f"[{member.__name__}](#{member.__name__.lower()})" for member, _ in members(hint, name)
        ]
        kinds = ", ".join(dict.fromkeys(nested))
        value = (
            f"by name: {kinds}" if kinds and get_origin(hint) is dict else kinds or expected(hint)
        )
        cells = [
            f"`{name}`",
            value,
            default(name, hint, cls, tree),
            field_comments(cls).get(name, ""),
        ]
        table.append(f"| {' | '.join(cell.replace('|', chr(92) + '|') for cell in cells)} |")
    return (
        "\n\n".join(filter(None, [*text, "\n".join(table) if len(table) > 2 else "Has no keys."]))
        + "\n"
    )


def default(name: str, hint: Any, cls: type, tree: dict[str, Any]) -> str:
    """Format the default of a key; that of a section is its kind, or nothing."""
    if name in required(cls):
        return "required"
    value = tree[name]
    if isinstance(value, dict):
        return f"`{value['kind']}`" if "kind" in value else "" if value else "`{}`"
    return f"`{text_of(hint, value)}`" if value != "" else "empty"


# ----------------------------------------------------------------------------------------------------------
# commands


def commands_page() -> str:
    """Show the help of every command, and of every benchmark."""
    os.environ["COLUMNS"] = "100"
    text = [
        "# Commands\n\nWhat `--help` prints. `mmjax COMMAND` and `python -m mmjax.COMMAND` are the same.\n"
    ]
    for name in COMMANDS:
        text.append(f"## {name}\n\n```text\n{help_of(name)}```\n")
    for name in re.findall(r"^ {4}([a-z][\w-]*)(?= |$)", help_of("bench"), re.M):
        text.append(f"### bench {name}\n\n```text\n{help_of('bench', name)}```\n")
    return "\n".join(text)


def help_of(command: str, *words: str) -> str:
    """Return what a command prints for --help."""
    with contextlib.redirect_stdout(io.StringIO()) as out, contextlib.suppress(SystemExit):
        importlib.import_module(f"mmjax.{command}").main([*words, "--help"])
    return out.getvalue()

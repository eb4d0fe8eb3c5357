"""Read YAML and JSON files without executing anything of them: configs, as lines `key=value`, and other data.

Tags, which name classes, are refused, and so are anchors, aliases and merge keys, by which a few
lines become gigabytes. A config's values are read as the command line reads them and not as YAML
1.1 would: `1e-4` is a number, `no` a text.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import yaml

from mmjax.config.codec import join
from mmjax.errors import UserError

NULLS = ("", "~", "null")


class PlainLoader(yaml.SafeLoader):
    """Refuses what is not plain data, and a key that is there twice."""

    def compose_node(self, parent: yaml.Node | None, index: Any) -> yaml.Node | None:
        event = self.peek_event()
        if event.anchor or getattr(event, "tag", None):
            raise _fault(
                "anchors (&), aliases (*) and tags (!) are not read: write the value out, and a text that begins with "
                "such a sign in quotes",
                event,
            )
        node = super().compose_node(parent, index)
        lines: dict[str, int] = {}
        for key, _ in node.value if isinstance(node, yaml.MappingNode) else ():
            name = key.value
            if not isinstance(key, yaml.ScalarNode) or name == "<<" or "=" in name:
                raise _fault(
                    "a key is one name; merge keys (<<) are not read: write their values out", key
                )
            if name in lines:
                raise _fault(f"{name} is in line {lines[name]} too; leave one of them out", key)
            lines[name] = _line(key)
        return node


def _line(node: Any) -> int:
    return node.start_mark.line + 1


def _fault(problem: str, at: Any) -> yaml.MarkedYAMLError:
    return yaml.MarkedYAMLError(problem=problem, problem_mark=at.start_mark)


def read_yaml(path: Path, read: Callable[[PlainLoader], Any] = PlainLoader.get_single_data) -> Any:
    """Read a YAML or JSON file. Raises UserError with the line where it is neither, and OSError."""
    try:
        text = path.read_text()
        # JSON may be indented by tabs, and has none inside texts
        return read(PlainLoader(text.replace("\t", " ") if path.suffix == ".json" else text))
    except yaml.MarkedYAMLError as error:
        problem = " ".join(filter(None, (error.context, error.problem)))
        raise UserError(f"{path}:{error.problem_mark.line + 1}: {problem}") from None
    except (yaml.YAMLError, ValueError, RecursionError) as error:
        raise UserError(f"{path} is not YAML: {' '.join(str(error).split())}") from None


class ConfigLine(NamedTuple):
    """Hold a value of a config's file as an override `a.b=value`, and its place `file:line`."""

    text: str
    place: str


def config_lines(path: Path) -> list[ConfigLine]:
    """Read the values of a YAML or JSON file, a section's kind before its fields. Raises UserError as `read_yaml`."""
    node = read_yaml(path, PlainLoader.get_single_node)
    if not isinstance(node, yaml.MappingNode):
        raise UserError(f"{path}:1: has no keys; write them as name: value, a line each")
    return [ConfigLine(text, f"{path}:{line}") for text, line in _values(node, "")]


def _values(node: yaml.MappingNode, where: str) -> Iterator[tuple[str, int]]:
    for name, value in sorted(node.value, key=lambda entry: entry[0].value != "kind"):
        key = where if name.value == "kind" else join(where, name.value)
        if isinstance(value, yaml.MappingNode) and value.value:
            yield from _values(value, key)
        else:
            yield f"{key}={_text(value)}", _line(name)


def _text(node: yaml.Node) -> str:
    """Format a value as an override has it."""
    if isinstance(node, yaml.SequenceNode):
        return json.dumps([_text(item) for item in node.value])
    if isinstance(node, yaml.MappingNode):
        return "{}"
    if node.style is None:
        return "null" if node.value in NULLS else node.value
    # in quotes; JSON writes a character beyond 16 bits as two
    return json.dumps(node.value.encode("utf-16", "surrogatepass").decode("utf-16", "replace"))

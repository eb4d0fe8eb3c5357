"""Reading a checkpoint's JSON: a field that is missing is an error, or the family's documented default."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from mmjax.errors import UserError

_NEEDED = object()


@dataclass(frozen=True)
class Fields:
    """One object of a JSON file. `where` names it in messages: the file, and the key inside."""

    of: Mapping[str, Any]
    where: str

    def get(self, name: str, kinds: type | tuple[type, ...], default: Any = _NEEDED) -> Any:
        """A field of one of these types; JSON's null is a field that is missing.

        Raises UserError where it has another type, or is missing and there is no default.
        """
        value = self.of.get(name)
        if value is None:
            if default is _NEEDED:
                raise UserError(f"{self.where} has no {name!r}")
            return default
        kinds = kinds if isinstance(kinds, tuple) else (kinds,)
        if float in kinds and isinstance(value, int) and not isinstance(value, bool):
            return float(value)
        if not isinstance(value, kinds) or (isinstance(value, bool) and bool not in kinds):
            expected = " or ".join(k.__name__ for k in kinds)
            raise UserError(f"{self.where}: {name}={value!r} is no {expected}")
        return value

    def inner(self, name: str) -> Fields:
        """A field that is an object. Raises UserError where it is none."""
        return Fields(self.get(name, dict), f"{self.where}: {name}")

    def refuse(self, name: str, *known: Any) -> None:
        """Raises UserError where a field is there and has none of these values, for which alone this is right."""
        value = self.of.get(name)
        if value is not None and value not in known:
            supported = ", ".join(map(repr, known)) or "to leave it out"
            raise UserError(f"{self.where}: {name}={value!r} is not supported; known: {supported}")

    def choice(self, name: str, known: Mapping[str, Any], default: Any = _NEEDED) -> Any:
        """Map a field's text to its value in `known`. Raises UserError for a text that is not there."""
        value = self.get(name, str, default)
        if value not in known:
            raise UserError(f"{self.where}: {name}={value!r} is not supported; known: {', '.join(known)}")
        return known[value]

"""Settings as text: what people write on a command line or in a file, by the types of the fields; and what the docstrings say of each."""

from __future__ import annotations

import re
import types
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal, Union, get_args, get_origin

import yaml

from halfstep.errors import ConfigError

WORDS = {"true": True, "yes": True, "on": True, "false": False, "no": False, "off": False}


def options_of(hint: Any) -> tuple[Any, ...]:
    """The types that a field's type allows: those of a union, or itself."""
    return get_args(hint) if get_origin(hint) in (Union, types.UnionType) else (hint,)


def choices_of(hint: Any) -> list[str]:
    """The words that a field's type names."""
    return [choice for option in options_of(hint) if get_origin(option) is Literal for choice in get_args(option)]


def read(hint: Any, value: Any) -> Any:
    """A text as a value of the type `hint`; as it is where it cannot be one, or is no text. `null` is None where that is allowed."""
    if not isinstance(value, str):
        return value
    options, word = options_of(hint), value.strip()
    if value in choices_of(hint):
        return value
    if type(None) in options and word in ("null", "None", "~", ""):
        return None
    if bool in options and word.lower() in WORDS:
        return WORDS[word.lower()]
    if int in options or float in options:
        return _number(word, value)
    if list[str] in options and (str not in options or word.startswith("[") or "," in word):
        return _list(word, value)
    return value


def read_all(hints: Mapping[str, Any], settings: Mapping[str, Any]) -> dict[str, Any]:
    """`settings` with texts read by the types of their fields; what is no field is left as it is."""
    return {name: read(hints[name], value) if name in hints else value for name, value in settings.items()}


def _number(word: str, value: str) -> Any:
    for kind in (int, float):
        try:
            return kind(word)
        except ValueError:
            continue
    return value


def _list(word: str, value: str) -> Any:
    if not word.startswith("["):
        return [part.strip() for part in word.split(",") if part.strip()]
    try:
        return yaml.safe_load(word)
    except yaml.YAMLError:
        return value


def read_file(path: Path) -> dict[str, Any]:
    """The settings in a YAML or JSON file. Raises ConfigError when it cannot be read or holds none."""
    try:
        data = yaml.safe_load(path.read_text())
    except OSError as error:
        raise ConfigError(f"the configuration {path} cannot be read: {error.strerror}", "Name a YAML file.") from error
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise ConfigError(f"the configuration {path} is not YAML: {error}", "Write one `name: value` per line.") from error
    if not isinstance(data, dict):
        raise ConfigError(f"the configuration {path} holds no settings", "Write one `name: value` per line.")
    return {str(k): v for k, v in data.items()}


def told(kind: type) -> dict[str, str]:
    """What the docstring of a dataclass says of each field, under its `Args:`."""
    result: dict[str, str] = {}
    name, under = "", (kind.__doc__ or "").partition("Args:\n")[2]
    for line in under.splitlines():
        if found := re.match(r" {8}(\w+): (.*)", line):
            name, result[found[1]] = found[1], found[2]
        elif name and line.strip():
            result[name] += f" {line.strip()}"
    return result

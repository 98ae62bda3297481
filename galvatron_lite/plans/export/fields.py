"""The table of fields of each tool, by which settings are written to its file and read from it."""

from __future__ import annotations

import json
import re
import shlex
import tomllib
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml

from galvatron_lite.errors import FileFormatError, InputError
from galvatron_lite.files import parse_data
from galvatron_lite.model.graph import Recompute
from galvatron_lite.plans.export.settings import Settings, World

Values = Mapping[str, Any]
"""The values of a file by dotted keys."""
_OFF = (None, False, 0, "", "none", "no", "null", "None", "-1", -1)


@dataclass(frozen=True, slots=True)
class Field:
    """A field of a settings file."""

    key: str  # dotted: ``zero_optimization.stage``
    write: Callable[[Settings], Any]  # gives its value; None: left out
    read: Callable[[Any], Mapping[str, Any]]  # gives the settings that a value states, by the names of ``filled``


@dataclass(frozen=True, slots=True, kw_only=True)
class Tool:
    """Software that a plan is written for."""

    name: str
    software: str  # name and version that the fields are of
    fields: tuple[Field, ...]
    parse: Callable[[str, str], dict[str, Any]]  # gives the values of a file from its text and name
    dump: Callable[[Values], str]  # gives the text
    settings: Callable[[dict[str, Any], World], Settings]  # completes what the fields state
    assumed: Mapping[str, Any] = field(default_factory=dict)  # values that its costs assume
    refused: Mapping[str, str] = field(default_factory=dict)  # keys that change costs and are not priced: remedy
    checked: Mapping[str, str] = field(default_factory=dict)  # keys that the model determines: ``blocks``, ``sequence``
    hints: Mapping[str, str] = field(default_factory=dict)  # how else a choice can be set in the tool, by its name
    by_hand: Callable[[Settings], Iterator[str]] = lambda _: iter(())  # what the user's own code must do
    comments: bool = True  # whether the file format has comments


@dataclass(frozen=True, slots=True)
class Reading:
    """The content of a settings file."""

    settings: Settings
    read: tuple[str, ...]  # keys that the settings are made of
    ignored: tuple[str, ...]  # keys that are not used
    notes: tuple[str, ...]  # where the file differs from what is priced


def same(key: str, name: str, words: Mapping[Any, Any] | None = None, *, plain: Any = None) -> Field:
    """A field for one choice.

    Args:
        key: in the file.
        name: of the field of ``Settings`` or ``Strategy``.
        words: the tool's value for each of ours; by default the same.
        plain: our value at which nothing is written.
    """

    def write(settings: Settings) -> Any:
        value = getattr(settings, name) if hasattr(settings, name) else getattr(settings.strategy, name)
        return None if value == plain else value if words is None else words.get(value)

    def read(value: Any) -> dict[str, Any]:
        if words is None:
            return {name: _number(value)}
        matching = [choice for choice, word in words.items() if str(word).lower() == str(value).lower()]
        if not matching:
            raise ValueError(f"Give one of {', '.join(map(str, words.values()))}.")
        return {name: matching[0]}

    return Field(key, write, read)


def fixed(key: str, value: Any) -> Field:
    """A field that states nothing of a plan; ``value``: fixed, or a function of the settings."""
    return Field(key, value if callable(value) else lambda _: value, lambda _: {})


def _number(value: Any) -> int:
    if value == "auto":
        raise ValueError("auto is settled when training starts: give the number it becomes.")
    if isinstance(value, bool) or not re.fullmatch(r"-?\d+", str(value)):
        raise ValueError("Give a whole number.")
    return int(value)


RECOMPUTE_WORDS = {Recompute.NONE: None, Recompute.SELECTIVE: "selective", Recompute.FULL: "full"}
"""Recomputation, as most tools name it."""


def write(target: Tool, settings: Settings, *, priced: bool) -> dict[str, Any]:
    """The values of a file; ``priced``: include what the costs of this software assume."""
    values = {item.key: item.write(settings) for item in target.fields}
    assumed = target.assumed if priced else {}
    return {key: value for key, value in {**values, **assumed}.items() if value is not None}


def read(target: Tool, values: Values, world: World, sequence: int = 0) -> Reading:
    """Read the values of a file as settings.

    Args:
        target: the software.
        values: of its file.
        world: what they are read for.
        sequence: tokens a sample of the model; 0: not checked.

    Raises:
        InputError: a value that cannot be used, or that changes costs in a way that is not priced; names it.
    """
    keys, stated = {item.key for item in target.fields}, dict[str, Any]()
    for item in (item for item in target.fields if item.key in values):
        name, value = f"{world.file}, {item.key}", values[item.key]
        if isinstance(value, str) and "$" in value:
            raise InputError(name, value, "Write the number that the shell puts there.")
        try:
            stated |= item.read(value)
        except (ValueError, TypeError) as error:
            raise InputError(name, value, str(error)) from error
    for key, remedy in target.refused.items():
        if values.get(key) not in _OFF:
            raise InputError(f"{world.file}, {key}", values[key], f"It changes costs and is not priced: {remedy}")
    sizes = {"blocks": world.blocks, "sequence": sequence}
    for key, name in target.checked.items():
        if sizes[name] and str(values.get(key, sizes[name])) not in (str(sizes[name]), ""):
            raise InputError(f"{world.file}, {key}", values[key], f"The model that is priced has {sizes[name]}.")
    used = {*keys, *target.assumed, *target.refused, *target.checked}
    notes = (
        f"{key} is {values.get(key, 'not set')}: priced as {value}"
        for key, value in target.assumed.items()
        if str(values.get(key)).lower() != str(value).lower()
    )
    read_keys = tuple(key for key in values if key in keys)
    ignored = tuple(key for key in values if key not in used)
    return Reading(target.settings(stated, world), read_keys, ignored, tuple(notes))


def commented(lines: Collection[str]) -> str:
    """Lines as comments that begin with ``#``; unprintable characters are escaped."""
    escaped = ("".join(char if char.isprintable() else repr(char)[1:-1] for char in line) for line in lines)
    return "".join(f"# {line}\n" for line in escaped)


def nested(values: Values) -> dict[str, Any]:
    """Turn values by dotted keys into nested mappings."""
    data: dict[str, Any] = {}
    for key, value in values.items():
        *path, last = key.split(".")
        inner = data
        for name in path:
            inner = inner.setdefault(name, {})
        inner[last] = value
    return data


def flat(data: Any, file: str, prefix: str = "") -> dict[str, Any]:
    """Turn nested mappings into values by dotted keys."""
    if not isinstance(data, Mapping):
        raise FileFormatError(file, type(data).__name__, "It must hold a mapping of settings.")
    values: dict[str, Any] = {}
    for key, value in data.items():
        inside = isinstance(value, Mapping) and value
        values |= flat(value, file, f"{prefix}{key}.") if inside else {f"{prefix}{key}": value}
    return values


def parse_yaml(text: str, file: str) -> dict[str, Any]:
    """The values of a YAML or JSON file."""
    return flat(parse_data(Path(file), text), file)


def dump_yaml(values: Values) -> str:
    """Values as YAML."""
    return yaml.safe_dump(nested(values), sort_keys=False)


def dump_json(values: Values) -> str:
    """Values as JSON."""
    return json.dumps(nested(values), indent=2) + "\n"


def parse_toml(text: str, file: str) -> dict[str, Any]:
    """The values of a TOML file."""
    try:
        return flat(tomllib.loads(text), file)
    except tomllib.TOMLDecodeError as error:
        raise FileFormatError(file, "not TOML", str(error)) from error


def parse_flags(text: str, file: str) -> dict[str, Any]:
    """The values of command-line options (``--name value``, ``--name=value``) in a file, or in a shell script.

    Variables that the script sets to plain values are replaced by these.
    """
    try:
        words = shlex.split(text, comments=True)
    except ValueError as error:
        raise FileFormatError(file, "no options", f"It is no list of command-line options: {error}.") from error
    variables = {word.partition("=")[0]: word.partition("=")[2] for word in words if re.fullmatch(r"\w+=[^$()]*", word)}
    values: dict[str, Any] = {}
    name = ""
    for word in words:
        text = re.sub(r"\$\{?(\w+)\}?", lambda match: variables.get(match[1], match[0]), word).rstrip(")")
        if re.match(r"--[A-Za-z]", text) or re.fullmatch(r"[\w.]+:[\w-]+", text):
            name, equals, value = text.removeprefix("--").partition("=" if text.startswith("--") else ":")
            name = name.replace("-", "_") if text.startswith("--") else name
            values[name] = _typed(value) if equals else True
        elif re.match(r"\w+=", text):
            name = ""
        elif name and text:
            values[name] = _typed(text) if values[name] is True else f"{values[name]} {text}"
        if word.endswith(")"):
            name = ""
    return values


def _typed(text: str) -> Any:
    return {"true": True, "false": False}.get(text.lower(), int(text) if re.fullmatch(r"-?\d+", text) else text)

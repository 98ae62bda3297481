"""One table of fields for each tool, by which settings are written to its file and read from it."""

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
"""What a file holds, by dotted keys."""
_OFF = (None, False, 0, "", "none", "no", "null", "None", "-1", -1)


@dataclass(frozen=True, slots=True)
class Field:
    """A setting of a tool."""

    key: str  # its place in the file: ``zero_optimization.stage``
    write: Callable[[Settings], Any]  # its value; None: left out
    read: Callable[[Any], Mapping[str, Any]]  # what its value says, by names of ``filled``


@dataclass(frozen=True, slots=True, kw_only=True)
class Tool:
    """Software that a plan is written for."""

    name: str
    software: str  # name and version that the fields are of
    fields: tuple[Field, ...]
    parse: Callable[[str, str], dict[str, Any]]  # text and name of a file to its values
    dump: Callable[[Values], str]
    settings: Callable[[dict[str, Any], World], Settings]  # from what the fields say
    assumed: Mapping[str, Any] = field(default_factory=dict)  # what its costs take for granted
    refused: Mapping[str, str] = field(default_factory=dict)  # settings that change costs and are not priced: remedy
    checked: Mapping[str, str] = field(
        default_factory=dict
    )  # settings that the model has too: ``blocks``, ``sequence``
    hints: Mapping[str, str] = field(default_factory=dict)  # how else the tool is told of a choice, by its name
    by_hand: Callable[[Settings], Iterator[str]] = lambda _: iter(())  # what the user's own code must do
    comments: bool = True  # whether the format has them


@dataclass(frozen=True, slots=True)
class Reading:
    """What a file says."""

    settings: Settings
    read: tuple[str, ...]  # names of the fields that the plan is made of
    ignored: tuple[str, ...]  # of those that are not looked at
    notes: tuple[str, ...]  # where the file says otherwise than is priced


def same(key: str, name: str, words: Mapping[Any, Any] | None = None, *, plain: Any = None) -> Field:
    """A field that says one choice.

    Args:
        key: in the file.
        name: of ``Settings`` or ``Strategy``.
        words: the tool's value for each of ours; the same if not given.
        plain: ours at which nothing is written.
    """

    def write(settings: Settings) -> Any:
        value = getattr(settings, name) if hasattr(settings, name) else getattr(settings.strategy, name)
        return None if value == plain else value if words is None else words.get(value)

    def read(value: Any) -> dict[str, Any]:
        if words is None:
            return {name: _number(value)}
        matching = [ours for ours, theirs in words.items() if str(theirs).lower() == str(value).lower()]
        if not matching:
            raise ValueError(f"Give one of {', '.join(str(theirs) for theirs in words.values())}.")
        return {name: matching[0]}

    return Field(key, write, read)


def fixed(key: str, value: Any) -> Field:
    """A field that says nothing of a plan; ``value``: of the settings, or the same for all."""
    return Field(key, value if callable(value) else lambda _: value, lambda _: {})


def _number(value: Any) -> int:
    if isinstance(value, bool) or not re.fullmatch(r"-?\d+", str(value)):
        auto = "is settled when training starts: give the number it becomes." if value == "auto" else ""
        raise ValueError(f"auto {auto}" if auto else "Give a whole number.")
    return int(value)


ONCE = {Recompute.NONE: None, Recompute.SELECTIVE: "selective", Recompute.FULL: "full"}
"""Recomputation as most tools call it."""


def write(target: Tool, settings: Settings, *, priced: bool) -> dict[str, Any]:
    """The values of a file; ``priced``: with what the costs of this software take for granted."""
    values = {one.key: one.write(settings) for one in target.fields}
    assumed = target.assumed if priced else {}
    return {key: value for key, value in {**values, **assumed}.items() if value is not None}


def read(target: Tool, values: Values, world: World, sequence: int = 0) -> Reading:
    """What the values of a file say.

    Raises:
        InputError: a value that cannot be used, or that changes costs in a way that is not priced; names it.
    """
    keys, said = {one.key for one in target.fields}, dict[str, Any]()
    for one in target.fields:
        if one.key not in values:
            continue
        if isinstance(values[one.key], str) and "$" in values[one.key]:
            raise InputError(f"{world.file}, {one.key}", values[one.key], "Write the number that the shell puts there.")
        try:
            said |= one.read(values[one.key])
        except (ValueError, TypeError) as error:
            raise InputError(f"{world.file}, {one.key}", values[one.key], str(error)) from error
    for key, remedy in target.refused.items():
        if values.get(key) not in _OFF:
            raise InputError(f"{world.file}, {key}", values[key], f"It changes costs and is not priced: {remedy}")
    has = {"blocks": world.blocks, "sequence": sequence}
    for key, name in target.checked.items():
        if has[name] and str(values.get(key, has[name])) not in (str(has[name]), ""):
            raise InputError(f"{world.file}, {key}", values[key], f"The model that is priced has {has[name]}.")
    beside = {*keys, *target.assumed, *target.refused, *target.checked}
    notes = (
        f"{key} is {values.get(key, 'not set')}: priced as {value}"
        for key, value in target.assumed.items()
        if str(values.get(key)).lower() != str(value).lower()
    )
    return Reading(
        target.settings(said, world), tuple(key for key in values if key in keys),
        tuple(key for key in values if key not in beside), tuple(notes),
    )  # fmt: skip


def commented(lines: Collection[str]) -> str:
    """Lines of a file's head, for formats whose comments begin with ``#``; what does not print is escaped."""
    escaped = ("".join(each if each.isprintable() else repr(each)[1:-1] for each in line) for line in lines)
    return "".join(f"# {line}\n" for line in escaped)


def nested(values: Values) -> dict[str, Any]:
    """Values by dotted keys as mappings in mappings."""
    data: dict[str, Any] = {}
    for key, value in values.items():
        *path, last = key.split(".")
        inner = data
        for name in path:
            inner = inner.setdefault(name, {})
        inner[last] = value
    return data


def flat(data: Any, file: str, prefix: str = "") -> dict[str, Any]:
    """The opposite of ``nested``."""
    if not isinstance(data, Mapping):
        raise FileFormatError(file, type(data).__name__, "It must hold a mapping of settings.")
    values: dict[str, Any] = {}
    for key, value in data.items():
        inside = isinstance(value, Mapping) and value
        values |= flat(value, file, f"{prefix}{key}.") if inside else {f"{prefix}{key}": value}
    return values


def parse_yaml(text: str, file: str) -> dict[str, Any]:
    """Values of a YAML or JSON file."""
    return flat(parse_data(Path(file), text), file)


def dump_yaml(values: Values) -> str:
    """The opposite of ``parse_yaml``."""
    return yaml.safe_dump(nested(values), sort_keys=False)


def dump_json(values: Values) -> str:
    """As JSON."""
    return json.dumps(nested(values), indent=2) + "\n"


def parse_toml(text: str, file: str) -> dict[str, Any]:
    """Values of a TOML file."""
    try:
        return flat(tomllib.loads(text), file)
    except tomllib.TOMLDecodeError as error:
        raise FileFormatError(file, "not TOML", str(error)) from error


def parse_flags(text: str, file: str) -> dict[str, Any]:
    """Values of command-line options, in a file of them or in a shell script: ``--name value``, ``--name=value``.

    Variables that the script sets to plain values are put in.
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

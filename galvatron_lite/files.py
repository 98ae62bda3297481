"""Reading and writing typed values: strict reading with clear errors, atomic writing.

Values are frozen dataclasses; pydantic validates files against their annotations. Files are YAML, or JSON if their name
ends so.
"""

from __future__ import annotations

import json
import os
import tempfile
from collections.abc import Hashable, Iterator, Mapping, Sequence
from functools import cache
from operator import index
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar, cast

from galvatron_lite import limits
from galvatron_lite.errors import FileFormatError
from galvatron_lite.limits import check_plain

if TYPE_CHECKING:
    from pydantic import ConfigDict, TypeAdapter

T = TypeVar("T")

_SHOWN = 80  # characters of an unreadable line that are shown
STRICT = cast("ConfigDict", {"extra": "forbid"})


class Strict:
    """Base of dataclasses in files: an unknown key in a file is an error."""

    __slots__ = ()
    __pydantic_config__ = STRICT


@cache
def _adapter(kind: Hashable) -> TypeAdapter[Any]:
    """The reader and writer of a type; cached, as making it takes thirty times as long as using it."""
    from pydantic import TypeAdapter

    return TypeAdapter(cast("type[Any]", kind))


def to_data(value: Any) -> Any:
    """Convert a dataclass value to plain data (dicts, lists, strings, numbers), without fields at their defaults."""
    return _adapter(cast("Hashable", type(value))).dump_python(value, mode="json", exclude_defaults=True)


def from_data(kind: type[T], data: object, field: str, *, strict: bool = True) -> T:
    """Convert plain data to a value of dataclass ``kind``.

    Args:
        kind: the dataclass.
        data: the content of a file.
        field: name of the data in errors, usually the path.
        strict: do not accept ``"1"``, ``1.0`` and ``true`` as integers; False for words of a command line.

    Raises:
        FileFormatError: the data does not fit; names the first offending key.
    """
    from pydantic import ValidationError

    try:
        # Through JSON, where strict readers accept lists as tuples and texts as enumerations.
        text = json.dumps(data, default=index)
        return cast("T", _adapter(cast("Hashable", kind)).validate_json(text, strict=strict))
    except TypeError as error:
        raise FileFormatError(field, kind_of(data), f"It holds what no file can ({error}).") from error
    except ValidationError as error:
        first = error.errors()[0]
        place = ".".join(str(part) for part in first["loc"]) or "the top level"
        value = first.get("input")
        shown = value if isinstance(value, (str, int, float, bool, type(None))) else type(value).__name__
        if first["type"] == "missing":  # the value is what it is missing from
            shown = None
        reason = first["msg"].removeprefix("Value error, ")
        if isinstance(value, str) and first["type"] in ("int_type", "float_type"):
            reason += ", without quotes, and with point and sign where it has an exponent: 1.0e+9"
        remedy = f"{reason} ({error.error_count()} problem(s) in all). Mend or remake it."
        raise FileFormatError(f"{field}, {place}", shown, remedy) from error


def read_data(path: Path) -> Any:
    """Read a YAML or JSON file as plain data.

    Raises:
        FileFormatError: no such file, not text, truncated, or not valid YAML or JSON; names the line.
    """
    return parse_data(path, read_text(path, limits.FILE_BYTES if path.suffix == ".json" else limits.YAML_BYTES))


def parse_data(path: Path, text: str) -> Any:
    """Parse the text of a file as plain data; the suffix of the path says whether it is JSON."""
    import yaml

    try:
        data = json.loads(text, object_pairs_hook=without_twins) if path.suffix == ".json" else _yaml(path, text)
    except (json.JSONDecodeError, yaml.MarkedYAMLError) as error:
        raise _syntax_error(path, text, error) from error
    except FileFormatError:
        raise
    except Exception as error:  # for example an AttributeError of !!timestamp without a date
        reason = " ".join(str(error).split())
        raise FileFormatError("file", str(path), f"It cannot be read ({reason[:200]}). Make it anew.") from error
    return check_plain(data, str(path))


def parse_line(line: str | bytes, field: str) -> Any:
    """Parse one line of JSON, such as of a log; numbers may be NaN or infinite.

    Raises:
        FileFormatError: not JSON, or beyond the limits.
    """
    try:
        data = json.loads(line, object_pairs_hook=without_twins)
    except (ValueError, RecursionError) as error:
        raise FileFormatError(field, line[:40], f"It is not JSON ({error}): take the line out.") from error
    return check_plain(data, field, finite=False)


def parse_record(line: str | bytes, field: str, kinds: Mapping[str, type[T]], log: str, version: int) -> T:
    """Parse a line of a log as the kind of record that it names.

    Args:
        line: of JSON.
        field: name of the line in errors.
        kinds: record types by the names of their kinds.
        log: name of the kind of log in errors.
        version: supported version of records.

    Raises:
        FileFormatError: an unknown kind, or another version.
    """
    data = parse_line(line, field)
    kind = data.get("kind") if isinstance(data, dict) else None
    if not isinstance(kind, str) or kind not in kinds:
        raise FileFormatError(f"{field}, kind", kind, f"Give one of {', '.join(kinds)}.")
    if data.get("version", version) != version:
        raise FileFormatError(f"{field}, version", data["version"], f"This release reads {log} of version {version}.")
    return from_data(kinds[kind], data, field)


def without_twins(pairs: Sequence[tuple[str, Any]]) -> dict[str, Any]:
    """Make a mapping of JSON (``object_pairs_hook``), of which readers otherwise drop repeated keys.

    Raises:
        ValueError: a key is repeated.
    """
    data = dict(pairs)
    if len(data) < len(pairs):
        keys = [key for key, _ in pairs]
        raise ValueError(f"the key {next(key for key in keys if keys.count(key) > 1)[:80]!r} stands twice")
    return data


def check_regular(path: Path) -> Path:
    """Return the path if it is a regular file, or does not exist.

    Raises:
        FileFormatError: a folder, a pipe or a device.
    """
    if os.path.exists(path) and not os.path.isfile(path):
        raise FileFormatError("file", str(path), "It is a folder, a pipe or a device: give a regular file.")
    return path


def read_text(path: Path, limit: int) -> str:
    """Read a text file of at most ``limit`` bytes.

    Raises:
        FileFormatError: no such file, larger, or not UTF-8.
    """
    check_regular(path)
    try:
        with path.open("rb") as stream:
            raw = stream.read(limit + 1)
        text = raw.decode("utf-8")
    except FileNotFoundError as error:
        raise FileFormatError("file", str(path), "There is no such file.") from error
    except (OSError, ValueError) as error:
        raise FileFormatError("file", str(path), f"It cannot be read ({str(error)[:200]}). Make it anew.") from error
    if len(raw) > limit:
        remedy = "Write it as JSON." if limit == limits.YAML_BYTES else "Make it anew."
        raise FileFormatError("file", str(path), f"It has more than {limit} bytes. {remedy}")
    return text


def _yaml(path: Path, text: str) -> Any:
    """Parse YAML, after a check of its depth and of the size that its aliases expand to.

    The parser recurses in C, and later checks walk through every use of an alias.
    """
    import yaml

    loader = getattr(yaml, "CSafeLoader", yaml.SafeLoader)

    class Loader(loader):  # type: ignore[misc,valid-type]
        """Refuses repeated keys."""

        def construct_mapping(self, node: Any, deep: bool = False) -> Any:
            seen = set[tuple[str, str]]()
            for key, _ in node.value:
                name = (key.tag, key.value) if isinstance(key, yaml.ScalarNode) else None
                if name in seen:
                    reason = f"the key {name[1][:80]!r} stands twice"
                    raise yaml.constructor.ConstructorError(None, None, reason, key.start_mark)
                seen |= {name} if name is not None else set()
            return super().construct_mapping(node, deep)

    # Sizes of anchored values, and the anchor and first value of every open collection.
    count, anchors, starts, aliased = 0, dict[str | None, int](), list[tuple[str | None, int]](), 0
    for event in yaml.parse(text, Loader=loader):
        if isinstance(event, yaml.CollectionEndEvent):
            name, before = starts.pop()
            size = count - before
        elif isinstance(event, yaml.AliasEvent):
            size = anchors.get(event.anchor, limits.ALIASED + 1)  # unknown, or within itself
            aliased, name = aliased + size, None
            count += size
        elif isinstance(event, yaml.NodeEvent):
            count, name, size = count + 1, event.anchor, 1
            if isinstance(event, yaml.CollectionStartEvent):
                starts.append((name, count - 1))
                name = None
        else:
            continue
        if name is not None:
            anchors[name] = size
        if len(starts) > limits.DEPTH or aliased > limits.ALIASED:
            line = 1 if event.start_mark is None else event.start_mark.line + 1
            reason = f"more than {limits.DEPTH} levels" if aliased <= limits.ALIASED else "aliases"
            remedy = f"Nest at most {limits.DEPTH} levels; aliases (*name) may stand for {limits.ALIASED} values."
            raise FileFormatError(f"{path}, line {line}", reason, remedy)
    return yaml.load(text, Loader=Loader)


def _syntax_error(path: Path, text: str, error: Any) -> FileFormatError:
    """The error for a text that is not valid JSON or YAML, with the line at which the parser stopped."""
    mark = getattr(error, "problem_mark", None)
    number = error.lineno if mark is None and hasattr(error, "lineno") else 1 if mark is None else mark.line + 1
    reason = " ".join(str(getattr(error, "problem", None) or getattr(error, "msg", error)).split())
    context = getattr(error, "context_mark", None)
    if context is not None and context.line + 1 != number:
        reason += f" (in what begins in line {context.line + 1})"
    line = [*text.splitlines(), "", ""][number - 1].strip()[:_SHOWN]
    kind = "JSON" if path.suffix == ".json" else "YAML"
    remedy = (
        f"It is no {kind} there: {reason}. Mend this line or the one before (indentation by spaces, brackets, quotes), "
        "or make the file anew."
    )
    return FileFormatError(f"{path}, line {number}", line, remedy)


def kind_of(data: object) -> str:
    """The type of plain data, in words for people."""
    names = {type(None): "nothing", list: "a list", str: "a text", dict: "a mapping"}
    return names.get(type(data), type(data).__name__)


def read_value(kind: type[T], path: Path) -> T:
    """Read a value of dataclass ``kind`` from a YAML or JSON file.

    Raises:
        FileFormatError: see ``read_data`` and ``from_data``.
    """
    return from_data(kind, read_data(path), str(path))


def write_text(path: Path, text: str | Iterator[str]) -> None:
    """Write a text, or its parts, to a file atomically: the file is either the old one or the complete new one."""
    try:
        check_regular(path).parent.mkdir(parents=True, exist_ok=True)
        handle, temporary = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.", suffix=".tmp")
    except OSError as error:
        message = f"It cannot be written ({error.strerror}): give another place"
        raise type(error)(error.errno, message, str(path)) from None
    try:
        with os.fdopen(handle, "w", encoding="utf-8") as stream:
            stream.writelines([text] if isinstance(text, str) else text)
            stream.flush()
            os.fsync(stream.fileno())
        os.chmod(temporary, 0o644)
        os.replace(temporary, path)
    except BaseException:
        Path(temporary).unlink(missing_ok=True)
        raise


def write_data(path: Path, data: Any) -> None:
    """Write plain data as JSON (``.json``) or YAML, atomically."""
    import yaml

    if path.suffix == ".json":
        write_text(path, json.dumps(data, indent=1) + "\n")
        return
    dumper = getattr(yaml, "CSafeDumper", yaml.SafeDumper)
    write_text(path, yaml.dump(data, Dumper=dumper, sort_keys=False, width=120, allow_unicode=True))


def write_value(path: Path, value: Any) -> None:
    """Write a dataclass value as YAML or JSON, atomically."""
    write_data(path, to_data(value))

"""Files that were damaged: bytes changed, keys lost, values swapped for others, by chance from a seed."""

from __future__ import annotations

import copy
import json
import math
import random
from collections.abc import Iterator
from typing import Any

Place = tuple[dict[Any, Any] | list[Any], Any]
VALUES: tuple[Any, ...] = (
    None, True, False, 0, -1, 1, 3, 2**31, 2**63, 2**200, 1e308, -1e-308, 0.5, math.inf, -math.inf, math.nan,
    1e-90, 1e12, 1e24, 1e30, 2**20, 2**24, 2**53, 2**62,
    "", "x", "1", "-1", "1e9", "nan", "40GB", "\x00", "\ud7ff", "a" * 300, "../../etc/passwd", "__class__", "{{7*7}}",
    "<script>alert(1)</script>", "!!python/object/apply:os.system", [], {}, [[]], [None], {"": None}, {"x": {"y": []}},
)  # fmt: skip
"""What a value is swapped for."""


def places(data: Any) -> Iterator[Place]:
    """Every place in nested data: its owner, and its key or number there."""
    if isinstance(data, (dict, list)):
        keys = list(data) if isinstance(data, dict) else range(len(data))
        for key in keys:
            yield data, key
            yield from places(data[key])


def damaged(data: Any, draw: random.Random) -> Any:
    """A copy with one to four places damaged."""
    found = copy.deepcopy(data)
    for _ in range(draw.randint(1, 4)):
        known = list(places(found))
        if known:
            owner, key = draw.choice(known)
            _damage(owner, key, draw, known)
    return found


def _damage(owner: Any, key: Any, draw: random.Random, known: list[Place]) -> None:
    value = owner[key]
    number = isinstance(value, (int, float)) and not isinstance(value, bool)
    way = 2 if number and draw.random() < 0.6 else draw.randrange(6)
    if way == 0:
        del owner[key]
    elif way == 1:
        other, there = draw.choice(known)
        owner[key] = (
            copy.deepcopy(other[there]) if there in other or (isinstance(other, list) and there < len(other)) else None
        )
    elif way == 2 and number:
        owner[key] = draw.choice([-value, value * 1000, value + 1, value / 3, 0, value * 10**9, 1, 2**20, 2**50])
    elif way == 3 and isinstance(owner, dict):
        owner[draw.choice(["x", 7, None, f"{key}s", ""])] = owner.pop(key)
    elif way == 4 and isinstance(value, list) and value:
        value.append(copy.deepcopy(draw.choice(value)))
    else:
        owner[key] = copy.deepcopy(draw.choice(VALUES))


def scrambled(text: bytes, draw: random.Random) -> bytes:
    """The bytes of a file, cut off or with some changed, lost or doubled."""
    found = bytearray(text)
    for _ in range(draw.randint(1, 6)):
        where = draw.randrange(len(found) + 1)
        way = draw.randrange(5)
        if way == 0:
            del found[where:]
        elif way == 1:
            del found[where : where + draw.randint(1, 40)]
        elif way == 2:
            found[where:where] = bytes(draw.randrange(256) for _ in range(draw.randint(1, 4)))
        elif way == 3:
            found[where:where] = draw.choice(
                [b": ", b"- ", b"{", b"[", b"\n  ", b"\t", b"&a ", b"*a", b"!!", b"? ", b"#"]
            )
        else:
            found[where:where] = found[where : where + draw.randint(1, 80)]
    return bytes(found)


def hostile(suffix: str, draw: random.Random) -> str:
    """A small text that takes long, or much memory, to read without limits."""
    deep = 10 ** draw.randint(2, 5)
    texts = ["[" * deep, '{"a":' * deep, "[" + "1," * deep + "1]", '{"version": 1' + "0" * deep + "}"]
    if suffix == ".yaml":
        wide = draw.randint(2, 9)
        bomb = "a0: &a0 [x, x]\n" + "".join(
            f"a{n}: &a{n} [{', '.join([f'*a{n - 1}'] * wide)}]\n" for n in range(1, draw.randint(5, 40))
        )
        tags = [f"a: !!{tag} x" for tag in ("timestamp", "int", "float", "binary", "set", "omap", "null", "bool")]
        texts += [bomb, "- " * deep, "a: &a [*a]", "? [a]\n: b", "a: 2001-01-01", "0x" + "f" * deep, *tags]
    return draw.choice(texts)


FREE = ("notes", "description", "source", "sources", "url", "batch", "sequence")
"""Fields that may hold anything, or a number or a list."""
_NO_NUMBER = (True, "1", math.nan, math.inf, -math.inf, 2**200, -(2**63), 1e300, "x", "", [], {}, [[]])
_NO_TEXT = (7, True, [], {}, "\x00", "\ud7ff" * 200_000, 0.5)
_NO_GROUP = ("x", 7, 0.5, True)


def nonsense(data: Any, draw: random.Random) -> str:
    """JSON with one value that its field never has, a key twice, or cut off."""
    data = copy.deepcopy(data)
    text = json.dumps(data)
    way = draw.random()
    if way < 0.1:
        return text[: draw.randrange(len(text))]
    owner, key = draw.choice([one for one in places(data) if one[1] not in FREE])
    if way < 0.2 and isinstance(owner, dict):
        owner[key], value = "\a", json.dumps(owner[key])
        return json.dumps(data).replace(json.dumps("\a"), f"{value}, {json.dumps(key)}: {value}")
    old = owner[key]
    if isinstance(old, bool):
        owner[key] = draw.choice(["x", 7, [], {}])
    elif isinstance(old, (int, float)):
        owner[key] = draw.choice(_NO_NUMBER)
    else:
        owner[key] = draw.choice(_NO_TEXT if isinstance(old, str) else _NO_GROUP)
    return json.dumps(data)

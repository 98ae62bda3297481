from __future__ import annotations

from collections.abc import Callable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from galvatron_lite.errors import UnitError
from galvatron_lite.units import (
    format_budget,
    format_bytes,
    format_count,
    format_duration,
    format_seconds,
    parse_budget,
    parse_bytes,
    parse_count,
    parse_seconds,
)

Parse = Callable[[str, str], float]
READ: list[tuple[Parse, dict[str, float]]] = [
    (parse_bytes, {"40GB": 40e9, "40 gb": 40e9, "40GiB": 40 * 2**30, "1.5TiB": 3 * 2**39, "512MB": 512e6, "16B": 16}),
    (parse_count, {"1000": 1e3, "1.5M": 1.5e6, "2b": 2e9, "2G": 2e9, "1 T": 1e12, "3e11": 3e11, "20K": 2e4}),
    (parse_seconds, {"2s": 2, "300ms": 0.3, "50us": 5e-5, "10min": 600, "12 h": 43200, "30D": 2592000, "1w": 604800}),
]
REFUSED: list[tuple[Parse, tuple[str, ...], str]] = [
    (parse_bytes, ("40", "forty", "-1GB", "40e9", "40 parsecs", "", "GB", "4iB", "40Gbit"), "40GiB"),
    (parse_count, ("", "0", "-1", "1Mi", "many", "1.M", "1P", "nan", "inf"), "--asked"),
    (parse_seconds, ("2", "0s", "-1s", "1 month", "", "s", "1m"), "--asked"),
]


@pytest.mark.parametrize(("parse", "text", "value"), [(parse, *one) for parse, own in READ for one in own.items()])
def test_sizes_counts_and_durations(parse: Parse, text: str, value: float) -> None:
    assert parse(text, "--asked") == pytest.approx(value, rel=1e-12)


@pytest.mark.parametrize(("parse", "text", "said"), [(parse, one, said) for parse, own, said in REFUSED for one in own])
def test_what_is_none_is_refused_with_the_remedy(parse: Parse, text: str, said: str) -> None:
    with pytest.raises(UnitError, match=said):
        parse(text, "--asked")


def test_a_share_is_of_the_capacity() -> None:
    assert parse_budget("80%", 80 * 2**30) == 64 * 2**30


def test_a_budget_may_be_plain_bytes() -> None:
    assert parse_budget("9382739968", 2**40) == 9382739968
    assert parse_budget(str(2**20), 2**40) == 2**20


@pytest.mark.parametrize("text", ["0%", "101%", "40B", "1kB", "40", "1048575", "-5", "1e9"])
def test_budgets_that_make_no_sense(text: str) -> None:
    with pytest.raises(UnitError):
        parse_budget(text, 2**34)


@given(st.integers(0, 10**15))
def test_formatted_bytes_read_back(size: int) -> None:
    text = format_bytes(size)
    assert parse_bytes(text.replace(" ", "")) == pytest.approx(size, rel=0.05, abs=52)


@given(st.integers(0, 10**15), st.booleans())
def test_budgets_read_back_on_the_side_they_were_rounded_to(size: int, up: bool) -> None:
    read = parse_bytes(format_budget(size, up=up))
    assert read >= size if up else read <= size
    assert abs(read - size) <= size / 100


def test_formats() -> None:
    assert format_budget(17_754_046_464, up=True) == "16.54GiB"
    assert format_budget(17_754_046_464) == "16.53GiB"
    assert format_budget(40 * 2**30) == "40GiB"
    assert format_bytes(40 * 2**30) == "40.0 GiB"
    assert format_seconds(1.42) == "1.42 s"
    assert format_seconds(0.3184) == "318 ms"
    assert format_count(6_738_415_616) == "6.74B"


def test_long_times_for_people() -> None:
    assert [format_duration(seconds) for seconds in (1.5, 150, 7200, 36000, 86400 * 3.25, 86400 * 5000)] == [
        "1.5 s", "2.5 minutes", "2 hours", "10 hours", "3.25 days", "5,000 days",
    ]  # fmt: skip

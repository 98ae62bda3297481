from __future__ import annotations

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


@pytest.mark.parametrize(
    ("text", "size"),
    [
        ("40GB", 40 * 10**9),
        ("40 gb", 40 * 10**9),
        ("40GiB", 40 * 2**30),
        ("1.5TiB", 3 * 2**39),
        ("512MB", 512 * 10**6),
        ("16B", 16),
    ],
)
def test_sizes(text: str, size: int) -> None:
    assert parse_bytes(text) == size


@pytest.mark.parametrize("text", ["40", "forty", "-1GB", "40e9", "40 parsecs", "", "GB", "4iB", "40Gbit"])
def test_unknown_units_are_refused_with_the_remedy(text: str) -> None:
    with pytest.raises(UnitError, match="40GiB"):
        parse_bytes(text, "--mem")


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


@pytest.mark.parametrize(
    ("text", "number"),
    [("1000", 1e3), ("1.5M", 1.5e6), ("2b", 2e9), ("2G", 2e9), ("1 T", 1e12), ("3e11", 3e11), ("20K", 2e4)],
)
def test_counts(text: str, number: float) -> None:
    assert parse_count(text, "--tokens") == number


@pytest.mark.parametrize("text", ["", "0", "-1", "1Mi", "many", "1.M", "1P", "nan", "inf"])
def test_counts_that_are_none(text: str) -> None:
    with pytest.raises(UnitError, match="--tokens"):
        parse_count(text, "--tokens")


@pytest.mark.parametrize(
    ("text", "seconds"),
    [
        ("2s", 2.0),
        ("300ms", 0.3),
        ("50us", 5e-5),
        ("10min", 600.0),
        ("12 h", 43200.0),
        ("30D", 2592000.0),
        ("1w", 604800),
    ],
)
def test_durations(text: str, seconds: float) -> None:
    assert parse_seconds(text, "--step") == pytest.approx(seconds)


@pytest.mark.parametrize("text", ["2", "0s", "-1s", "1 month", "", "s", "1m"])
def test_durations_that_are_none(text: str) -> None:
    with pytest.raises(UnitError, match="--step"):
        parse_seconds(text, "--step")


def test_long_times_for_people() -> None:
    assert [format_duration(seconds) for seconds in (1.5, 150, 7200, 36000, 86400 * 3.25, 86400 * 5000)] == [
        "1.5 s", "2.5 minutes", "2 hours", "10 hours", "3.25 days", "5,000 days",
    ]  # fmt: skip

"""Lines that are told unasked: where they go, and how to be rid of them."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from galvatron_lite.errors import LOG


@contextmanager
def level(wanted: int) -> Iterator[None]:
    LOG.setLevel(wanted)
    try:
        yield
    finally:
        LOG.setLevel(logging.INFO)


def test_a_line_goes_to_standard_error(capsys: pytest.CaptureFixture[str]) -> None:
    LOG.info("plan: [x]")
    assert capsys.readouterr().err == "galvatron: plan: [x]\n"


def test_a_program_that_logs_gets_it_there_instead(
    capsys: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.INFO):
        LOG.info("plan: %s")
    assert set(caplog.messages) == {"plan: %s"}  # pytest listens at loggers that do not propagate, too
    assert capsys.readouterr().err == ""


def test_it_can_be_silenced(capsys: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture) -> None:
    with level(logging.WARNING):
        LOG.info("plan")
    assert (capsys.readouterr().err, caplog.messages) == ("", [])

"""Lines that are told unasked: where they go, and how to be rid of them."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from galvatron_lite.saying import LOG, say


@contextmanager
def level(wanted: int) -> Iterator[None]:
    LOG.setLevel(wanted)
    try:
        yield
    finally:
        LOG.setLevel(logging.NOTSET)


def test_a_line_goes_to_standard_error(capsys: pytest.CaptureFixture[str]) -> None:
    say("plan: [x]")
    assert capsys.readouterr().err == "galvatron: plan: [x]\n"


def test_a_program_that_logs_gets_it_there_instead(
    capsys: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture
) -> None:
    with level(logging.INFO):
        say("plan: %s")
    assert caplog.messages == ["plan: %s"]
    assert capsys.readouterr().err == ""


def test_it_can_be_silenced(capsys: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture) -> None:
    with level(logging.WARNING):
        say("plan")
    assert (capsys.readouterr().err, caplog.messages) == ("", [])

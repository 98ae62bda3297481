"""Starting commands, waiting for them, and ending all when one fails."""

from __future__ import annotations

import os
import subprocess
import time
from collections.abc import Mapping, Sequence

from galvatron_lite.errors import LaunchError

_LOOK = 0.2
"""Seconds between looks at what runs."""
_GRACE = 10.0
"""Seconds that what is told to end has to do so."""


def run_all(commands: Sequence[Sequence[str]], environment: Mapping[str, str]) -> int:
    """Run commands side by side, their output going where this process' goes.

    When one fails, or this process is interrupted, the others are ended.

    Returns:
        The first exit status that is not 0; 0 where all went well.

    Raises:
        LaunchError: a command's program is not there.
    """
    started = [_start(command, environment) for command in commands]
    try:
        while any(one.poll() is None for one in started) and not _failed(started):
            time.sleep(_LOOK)
    finally:
        _end([one for one in started if one.poll() is None])
    return _failed(started)


def output_of(commands: Sequence[Sequence[str]], environment: Mapping[str, str], timeout: float) -> str:
    """What commands print, run side by side.

    Raises:
        LaunchError: a program is not there, one takes longer than ``timeout`` seconds, or one fails.
    """
    started = [_start(command, environment, subprocess.PIPE) for command in commands]
    deadline = time.monotonic() + timeout
    try:
        said = [one.communicate(timeout=max(0.1, deadline - time.monotonic()))[0] for one in started]
    except subprocess.TimeoutExpired as error:
        remedy = "See that the node can be reached, or give it longer (--timeout)."
        raise LaunchError(f"No answer in {timeout:g} s: {_name(error.cmd)}. {remedy}") from error
    finally:
        _end([one for one in started if one.poll() is None])
    for one, text in zip(started, said, strict=True):
        if one.returncode:
            raise LaunchError(f"{_name(one.args)} ended with status {one.returncode}:\n{text.strip()[-2000:]}")
    return "\n".join(said)


def _start(command: Sequence[str], environment: Mapping[str, str], output: int | None = None) -> subprocess.Popen[str]:
    errors = None if output is None else subprocess.STDOUT
    try:
        return subprocess.Popen(
            list(command), env={**os.environ, **environment}, stdout=output, stderr=errors, text=True,
            stdin=subprocess.DEVNULL,
        )  # fmt: skip
    except FileNotFoundError as error:
        raise LaunchError(f"There is no program {command[0]!r} here. Install it, or launch another way.") from error


def _failed(started: Sequence[subprocess.Popen[str]]) -> int:
    """The first exit status that tells of a failure; a signal's as shells give it."""
    codes = [one.returncode for one in started if one.returncode]
    return (codes[0] if codes[0] > 0 else 128 - codes[0]) if codes else 0


def _end(running: Sequence[subprocess.Popen[str]]) -> None:
    for one in running:
        one.terminate()
    deadline = time.monotonic() + _GRACE
    for one in running:
        try:
            one.wait(max(0.1, deadline - time.monotonic()))
        except subprocess.TimeoutExpired:
            one.kill()
            one.wait()


def _name(command: object) -> str:
    words = command if isinstance(command, (list, tuple)) else [command]
    return " ".join(str(word) for word in words)[:200]

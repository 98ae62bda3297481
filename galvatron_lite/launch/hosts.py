"""Nodes that processes are started on."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

from galvatron_lite.errors import InputError, LaunchError

_LINE = re.compile(r"(?P<name>[\w.@\[\]-]+)(\s+slots\s*=\s*(?P<slots>\d+))?(\s+max[_-]slots\s*=\s*\d+)?")


@dataclass(frozen=True, slots=True)
class Host:
    """A node.

    Attributes:
        name: as ssh knows it.
        slots: processes it may run.
    """

    name: str
    slots: int


def read_hostfile(path: Path) -> tuple[Host, ...]:
    """The hosts of a file with a line ``NAME slots=N`` each, as DeepSpeed and MPI read it; one slot where none is said.

    Raises:
        InputError: the file cannot be read, a line cannot be, a host comes twice, or there is none.
    """
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise InputError("--hostfile", str(path), f"It cannot be read ({error}).") from error
    hosts = [
        _host(text, f"--hostfile {path}, line {number}")
        for number, line in enumerate(lines, start=1)
        if (text := line.split("#")[0].strip())
    ]
    names = [host.name for host in hosts]
    twice = next((name for name in names if names.count(name) > 1), None)
    if twice is not None:
        raise InputError(f"--hostfile {path}", twice, "Name each host once, with all its slots.")
    if not hosts:
        raise InputError("--hostfile", str(path), "It names no host: write a line `NAME slots=N` for each.")
    return tuple(hosts)


def _host(text: str, field: str) -> Host:
    found = _LINE.fullmatch(text)
    slots = 0 if found is None else int(found["slots"] or 1)
    if found is None or not slots:
        raise InputError(field, text, "Write `NAME slots=N`.")
    return Host(found["name"], slots)


def chosen(hosts: tuple[Host, ...], devices: int) -> tuple[Host, ...]:
    """The first hosts that have so many slots together, all of them used.

    Raises:
        LaunchError: there are fewer, or the last one would be used in part, or hosts have unlike numbers of slots:
            ranks of a plan are counted in nodes of equal size.
    """
    taken: list[Host] = []
    for host in hosts:
        if sum(one.slots for one in taken) < devices:
            taken.append(host)
    total = sum(host.slots for host in taken)
    if total < devices:
        raise LaunchError(f"{devices} processes are to be started, but the hosts have {total} slots. Add hosts.")
    unlike = next((host for host in taken if host.slots != taken[0].slots), None)
    if unlike is not None:
        raise LaunchError(
            f"Host {unlike.name} has {unlike.slots} slots, {taken[0].name} has {taken[0].slots}. A plan's ranks are "
            "counted in nodes of equal size: give every host the same number of slots."
        )
    if total != devices:
        raise LaunchError(
            f"{devices} processes do not fill {len(taken)} hosts of {taken[0].slots} slots. Give other slots, or make "
            f"a plan for {total} devices."
        )
    return tuple(taken)

"""Published training runs as a file holds them: one JSON object a line. No torch here."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

from galvatron_lite.errors import FileFormatError
from galvatron_lite.files import parse_line
from galvatron_lite.validate.ranges import checked


@dataclass(frozen=True, slots=True, kw_only=True)
class PublishedRun:
    """One published run; a field that its source does not state is None.

    Fields are those of ``profiles/published/README.md``. ``family``, ``run_id`` and ``source`` say where the run comes
    from; nothing is predicted from them. ``line`` is that of its file. ``problem`` says which field could not be read;
    such a run is not predicted.
    """

    family: str
    run_id: str
    framework: str
    source: str | None = None
    model: str | None = None
    arch: str | None = None
    params_b: float | None = None
    layers: int | None = None
    hidden: int | None = None
    heads: int | None = None
    kv_heads: int | None = None
    ffn_hidden: int | None = None
    gated_mlp: bool | None = None
    vocab: int | None = None
    tied_embeddings: bool | None = None
    seq_len: int | None = None
    image_size: int | None = None
    n_experts: int | None = None
    moe_topk: int | None = None
    moe_ffn: int | None = None
    gpu: str | None = None
    gpu_mem_gb: float | None = None
    gpus_per_node: int | None = None
    intra_link: str | None = None
    inter_net: str | None = None
    inter_node_gbps: float | None = None
    n_gpus: int | None = None
    dp: int | None = None
    tp: int | None = None
    pp: int | None = None
    cp: int | None = None
    ep: int | None = None
    spatial: int | None = None
    filter: int | None = None
    vpp: int | None = None
    pp_schedule: str | None = None
    zero_stage: int | None = None
    zero_group: int | None = None
    micro_batch: int | None = None
    global_batch: int | None = None
    grad_accum: float | None = None
    act_ckpt: str | None = None
    seq_parallel: bool | None = None
    precision: str | None = None
    flash_attn: bool | None = None
    optimizer: str | None = None
    iter_time_s: float | None = None
    tokens_per_s_per_gpu: float | None = None
    samples_per_s: float | None = None
    peak_mem_gb: float | None = None
    oom: bool | None = None
    derived: str | None = None
    quality: str | None = None
    notes: str | None = None
    line: int | None = None
    problem: str | None = None

    @property
    def said(self) -> str:
        """What people wrote about how the figures came about, in lower case."""
        return f"{self.notes or ''}; {self.derived or ''}".lower()


KINDS = {
    item.name: str(item.type).removesuffix(" | None")
    for item in fields(PublishedRun)
    if item.name not in ("line", "problem")
}
"""The kind of every field that a row may have: a key of ``ranges.WANTED``."""

_NEEDED = ("family", "run_id", "framework")
_NO_RUN = "a line that is no run"


def read_runs(path: Path) -> tuple[PublishedRun, ...]:
    """All runs of a file, in order; fields that are not known here are passed over, empty lines too.

    A line that cannot be read, or a field with a value that cannot be, makes a run with a ``problem``: it is counted.

    Raises:
        FileFormatError: no such file, or not text.
    """
    return tuple(parse_runs(read_lines(path), str(path)))


def read_lines(path: Path) -> list[str]:
    """The lines of a file; of standard input where the path is ``-``.

    Raises:
        FileFormatError: no such file, or not text.
    """
    try:
        text = sys.stdin.read() if str(path) == "-" else path.read_text(encoding="utf-8")
    except FileNotFoundError as error:
        raise FileFormatError("file", str(path), "There is no such file.") from error
    except (OSError, UnicodeDecodeError) as error:
        raise FileFormatError("file", str(path), f"It cannot be read ({error}).") from error
    return text.split("\n")


def parse_runs(lines: Iterable[str], place: str = "runs") -> Iterator[PublishedRun]:
    """The runs that lines of JSON hold; see ``read_runs``."""
    for number, data in parse_lines(lines, place):
        yield data if isinstance(data, PublishedRun) else readable(data, number, place)


def parse_lines(lines: Iterable[str], place: str) -> Iterator[tuple[int, dict[str, Any] | PublishedRun]]:
    """The objects of lines that are not empty, with their numbers from 1; a run with its problem for others."""
    for number, line in enumerate(lines, 1):
        if line.strip():
            try:
                yield number, _object(line, f"{place}, line {number}")
            except FileFormatError as error:
                yield number, _unread(number, error)


def _unread(number: int, error: FileFormatError) -> PublishedRun:
    """What stands for a line that holds no run, so that it is counted."""
    named = {"family": _NO_RUN, "run_id": f"line {number}", "framework": ""}
    return PublishedRun(**named, line=number, problem=str(error))  # type: ignore[arg-type]


def readable(data: dict[str, Any], number: int, place: str) -> PublishedRun:
    """A run from the object of a line: the fields that can be read and the ``problem`` of the first that cannot."""
    try:
        return run_from_data(data, f"{place}, line {number}", number)
    except FileFormatError as error:
        good = {name: data[name] for name in KINDS.keys() & data.keys() if _good(name, data[name])}
        named = {"family": _NO_RUN, "run_id": f"line {number}", "framework": ""} | good
        return PublishedRun(**named, line=number, problem=str(error))


def _good(name: str, value: Any) -> bool:
    try:
        return value is not None and checked(name, value, KINDS[name], "") is not None
    except FileFormatError:
        return False


def _object(line: str, place: str) -> dict[str, Any]:
    data = parse_line(line, place)
    if not isinstance(data, dict):
        raise FileFormatError(place, line[:40], "Give one JSON object a line.")
    return data


def run_from_data(data: dict[str, Any], place: str = "run", line: int | None = None) -> PublishedRun:
    """A run from the object of one line.

    Raises:
        FileFormatError: a field is missing, of the wrong kind or out of range.
    """
    for name in _NEEDED:
        if data.get(name) is None:
            raise FileFormatError(f"{place}, {name}", None, "Every run needs it.")
    known = {name: data[name] for name in KINDS if data.get(name) is not None}
    return PublishedRun(**{name: checked(name, value, KINDS[name], place) for name, value in known.items()}, line=line)

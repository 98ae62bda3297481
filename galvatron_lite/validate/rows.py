"""Published training runs as a file holds them: one JSON object a line. No torch here."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

from galvatron_lite.errors import FileFormatError


@dataclass(frozen=True, slots=True, kw_only=True)
class PublishedRun:
    """One published run; a field that its source does not state is None.

    Fields are those of ``profiles/published/README.md``. ``family``, ``run_id`` and ``source`` say where the run comes
    from; nothing is predicted from them. ``problem`` says which field could not be read; such a run is not predicted.
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
    problem: str | None = None

    @property
    def said(self) -> str:
        """What people wrote about how the figures came about, in lower case."""
        return f"{self.notes or ''}; {self.derived or ''}".lower()


_KINDS = {item.name: str(item.type).removesuffix(" | None") for item in fields(PublishedRun) if item.name != "problem"}
_NEEDED = ("family", "run_id", "framework")
_AT_LEAST_ONE = {
    "layers", "hidden", "heads", "kv_heads", "seq_len", "image_size", "n_experts", "moe_topk", "gpus_per_node",
    "n_gpus", "dp", "tp", "pp", "cp", "ep", "vpp", "micro_batch", "global_batch",
}  # fmt: skip
_WANTED = {"str": "a text", "int": "a whole number", "float": "a number", "bool": "true or false"}


def read_runs(path: Path) -> tuple[PublishedRun, ...]:
    """All runs of a file, in order; fields that are not known here are passed over, empty lines too.

    A run with a field of the wrong kind stays, with its ``problem``, so that it is counted.

    Raises:
        FileFormatError: no such file, not text, or a line that is not a run at all (names the line).
    """
    try:
        text = path.read_text(encoding="utf-8")
    except FileNotFoundError as error:
        raise FileFormatError("file", str(path), "There is no such file.") from error
    except (OSError, UnicodeDecodeError) as error:
        raise FileFormatError("file", str(path), f"It cannot be read ({error}).") from error
    return tuple(parse_runs(text.splitlines(), str(path)))


def parse_runs(lines: Iterable[str], place: str = "runs") -> Iterator[PublishedRun]:
    """The runs that lines of JSON hold; see ``read_runs``."""
    for number, line in enumerate(lines, 1):
        if line.strip():
            yield _readable(_object(line, f"{place}, line {number}"), f"{place}, line {number}")


def _readable(data: dict[str, Any], place: str) -> PublishedRun:
    named = [str(data[name]) for name in _NEEDED if data.get(name) is not None]
    try:
        return run_from_data(data, place)
    except FileFormatError as error:
        if len(named) < len(_NEEDED):
            raise
        return PublishedRun(family=named[0], run_id=named[1], framework=named[2], problem=str(error))


def _object(line: str, place: str) -> dict[str, Any]:
    try:
        data = json.loads(line)
    except ValueError as error:
        raise FileFormatError(place, line[:40], f"It is not JSON ({error}).") from error
    if not isinstance(data, dict):
        raise FileFormatError(place, line[:40], "Give one JSON object a line.")
    return data


def run_from_data(data: dict[str, Any], place: str = "run") -> PublishedRun:
    """A run from the object of one line.

    Raises:
        FileFormatError: a field is missing or of the wrong kind.
    """
    for name in _NEEDED:
        if data.get(name) is None:
            raise FileFormatError(f"{place}, {name}", None, "Every run needs it.")
    known = {name: data[name] for name in _KINDS.keys() & data.keys() if data[name] is not None}
    return PublishedRun(**{name: _value(name, value, place) for name, value in known.items()})


def _value(name: str, value: Any, place: str) -> Any:
    """The value as its field's kind."""
    kind = _KINDS[name]
    number = isinstance(value, (int, float)) and not isinstance(value, bool)
    fits = {
        "str": isinstance(value, str),
        "bool": isinstance(value, bool),
        "float": number,
        "int": number and float(value).is_integer(),
    }[kind]
    if not fits or (name in _AT_LEAST_ONE and value < 1):
        least = " of 1 or more" if name in _AT_LEAST_ONE else ""
        raise FileFormatError(f"{place}, {name}", value, f"Give {_WANTED[kind]}{least}, or leave it out.")
    return int(value) if kind == "int" else value

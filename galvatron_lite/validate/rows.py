"""Reads published training runs, one JSON object a line, and checks the values of their fields.

The upper bounds lie far beyond any machine or model; they keep a mistyped row from costing hours.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Iterable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, fields
from math import prod
from pathlib import Path
from typing import Any

from galvatron_lite.errors import FileFormatError
from galvatron_lite.files import check_regular, parse_line

INTEGERS: Mapping[str, tuple[int, int]] = {
    "layers": (1, 10_000), "hidden": (1, 1_000_000), "heads": (1, 100_000), "kv_heads": (1, 100_000),
    "ffn_hidden": (1, 10_000_000), "vocab": (1, 100_000_000), "seq_len": (1, 100_000_000), "image_size": (1, 100_000),
    "n_experts": (1, 100_000), "moe_topk": (1, 10_000), "moe_ffn": (1, 10_000_000), "gpus_per_node": (1, 10_000),
    "n_gpus": (1, 10_000_000), "dp": (1, 10_000_000), "tp": (1, 100_000), "pp": (1, 10_000), "cp": (1, 1_000_000),
    "ep": (1, 100_000), "spatial": (1, 1_000_000), "filter": (1, 1_000_000), "vpp": (1, 10_000), "zero_stage": (0, 3),
    "zero_group": (1, 10_000_000), "micro_batch": (1, 10_000_000), "global_batch": (1, 100_000_000),
}  # fmt: skip
"""Least and largest value of the integer fields."""

REALS: Mapping[str, float] = {
    "params_b": 1e6, "gpu_mem_gb": 1e5, "inter_node_gbps": 1e6, "grad_accum": 1e8, "iter_time_s": 1e7,
    "tokens_per_s_per_gpu": 1e9, "samples_per_s": 1e9, "peak_mem_gb": 1e7,
}  # fmt: skip
"""Largest value of the real fields, which are positive and finite."""

_DEGREES = ("tp", "pp", "cp", "spatial", "filter")  # with ``dp``, what the devices of a run are the product of

GRADES = ("A", "B", "A-mem", "C")  # values of ``quality``

NOT_USED = ("tflops_per_gpu", "tflops_kind", "mfu", "hfu")
"""Fields of published rows that are not read, since sources count FLOPs differently."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PublishedRun:
    """One published run; None for a field that its source does not state.

    ``profiles/published/README.md`` describes the fields. ``family``, ``run_id`` and ``source`` tell where the run
    comes from; no prediction depends on them. ``line`` is its line of the file. ``problem`` names a field that could
    not be read; such a run is not predicted.
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
    trainable: str | None = None
    freeze: str | None = None
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
    def remarks(self) -> str:
        """Notes on the run and on derived figures, in lower case."""
        return f"{self.notes or ''}; {self.derived or ''}".lower()


KINDS = {
    item.name: str(item.type).removesuffix(" | None")
    for item in fields(PublishedRun)
    if item.name not in ("line", "problem")
}
"""The type of each field of a row: ``str``, ``int``, ``float`` or ``bool``."""


def _checked(name: str, value: Any, place: str) -> Any:
    """Return a field's value in its type."""
    if name in INTEGERS or name in REALS:
        least, largest = INTEGERS.get(name) or (0, REALS[name])
        is_valid = isinstance(value, int | float) and not isinstance(value, bool) and least <= value <= largest
        is_valid = is_valid and (float(value).is_integer() if name in INTEGERS else value > 0)
        integer = f"a whole number of {least:,} to {largest:,}"
        expected = integer if name in INTEGERS else f"a number above 0, up to {largest:,.0f}"
    elif name == "quality":
        is_valid, expected = value in GRADES, f"one of {', '.join(GRADES)}"
    else:
        is_valid = isinstance(value, str if KINDS[name] == "str" else bool)
        expected = "a text" if KINDS[name] == "str" else "true or false"
    if not is_valid:
        raise FileFormatError(f"{place}, {name}", value, f"Give {expected}, or leave it out.")
    if name == "precision":  # ``float16`` and ``bfloat16``, as tensors' types are called
        return re.sub("(?i)float(?=[0-9])", "f" if "bfloat" in value.lower() else "fp", value)
    return int(value) if name in INTEGERS else value


def read_runs(path: Path) -> tuple[PublishedRun, ...]:
    """Return all runs of a file, in order; unknown fields and empty lines are ignored.

    A line or field that cannot be read makes a run with a ``problem``, which counts as not scored.
    """
    return tuple(run for _, run in parse_rows(read_lines(path), str(path)))


def read_lines(path: Path) -> list[str]:
    """Return the lines of a file, or of standard input for the path ``-``."""
    try:
        text = sys.stdin.read() if str(path) == "-" else check_regular(path).read_text(encoding="utf-8")
    except FileNotFoundError as error:
        raise FileFormatError("file", str(path), "There is no such file.") from error
    except (OSError, UnicodeDecodeError) as error:
        raise FileFormatError("file", str(path), f"It cannot be read ({error}).") from error
    return text.split("\n")


def parse_rows(lines: Iterable[str], place: str = "runs") -> Iterator[tuple[dict[str, Any] | None, PublishedRun]]:
    """Yield the object of each line of JSON (None if it is not an object) and its run; see ``read_runs``.

    A run with a ``problem`` has the fields that can be read.
    """
    for number, line in enumerate(lines, 1):
        if line.strip():
            field, data = f"{place}, line {number}", None
            try:
                data = parse_line(line, field)
                if not isinstance(data, dict):
                    data = None
                    raise FileFormatError(field, line[:40], "Give one JSON object a line.")
                yield data, run_from_data(data, field, number)
            except FileFormatError as error:
                yield data, _with_problem(data or {}, number, error)


def _with_problem(data: dict[str, Any], number: int, error: FileFormatError) -> PublishedRun:
    """Return a run, with the fields that can be read, for a line that cannot be used, so that it is counted."""
    fields: dict[str, Any] = {"family": "a line that is no run", "run_id": f"line {number}", "framework": ""}
    for name in KINDS.keys() & data.keys():
        if data[name] is not None:
            with suppress(FileFormatError):
                fields[name] = _checked(name, data[name], "")
    return PublishedRun(**fields, line=number, problem=str(error))


def run_from_data(data: dict[str, Any], place: str = "run", line: int | None = None) -> PublishedRun:
    """Return the run of an object; the replicas that it does not state are those that its other degrees leave."""
    for name in ("family", "run_id", "framework"):
        if data.get(name) is None:
            raise FileFormatError(f"{place}, {name}", None, "Every run needs it.")
    fields = {name: _checked(name, data[name], place) for name in KINDS if data.get(name) is not None}
    replicas, left = divmod(fields.get("n_gpus", 0), prod(fields.get(name, 1) for name in _DEGREES))
    if replicas and not left:
        fields.setdefault("dp", replicas)
    return PublishedRun(**fields, line=line)

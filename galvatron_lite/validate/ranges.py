"""What the fields of a published run may hold: kinds, ranges of numbers, words. No torch here.

The upper bounds lie far beyond any machine or model there is; they keep one mistyped row from costing hours.
"""

from __future__ import annotations

from collections.abc import Mapping
from math import isfinite
from typing import Any

from galvatron_lite.errors import FileFormatError

WANTED = {"str": "a text", "int": "a whole number", "float": "a number", "bool": "true or false"}
"""Kinds of fields in words."""

WHOLE: Mapping[str, tuple[int, int]] = {
    "layers": (1, 10_000), "hidden": (1, 1_000_000), "heads": (1, 100_000), "kv_heads": (1, 100_000),
    "ffn_hidden": (1, 10_000_000), "vocab": (1, 100_000_000), "seq_len": (1, 100_000_000), "image_size": (1, 100_000),
    "n_experts": (1, 100_000), "moe_topk": (1, 10_000), "moe_ffn": (1, 10_000_000), "gpus_per_node": (1, 10_000),
    "n_gpus": (1, 10_000_000), "dp": (1, 10_000_000), "tp": (1, 100_000), "pp": (1, 10_000), "cp": (1, 1_000_000),
    "ep": (1, 100_000), "spatial": (1, 1_000_000), "filter": (1, 1_000_000), "vpp": (1, 10_000), "zero_stage": (0, 3),
    "zero_group": (1, 10_000_000), "micro_batch": (1, 10_000_000), "global_batch": (1, 100_000_000),
}  # fmt: skip
"""Least and largest value of every field that is a whole number."""

REAL: Mapping[str, float] = {
    "params_b": 1e6, "gpu_mem_gb": 1e5, "inter_node_gbps": 1e6, "grad_accum": 1e8, "iter_time_s": 1e7,
    "tokens_per_s_per_gpu": 1e9, "samples_per_s": 1e9, "peak_mem_gb": 1e7,
}  # fmt: skip
"""Largest value of every field that is a number: more than nought, and finite."""

GRADES = ("A", "B", "A-mem", "C")
"""What ``quality`` may be."""

NOT_USED = ("tflops_per_gpu", "tflops_kind", "mfu", "hfu")
"""Fields that published rows have and nothing here reads: every source counts FLOPs in its own way."""


def checked(name: str, value: Any, kind: str, place: str) -> Any:
    """A field's value as its kind.

    Args:
        name: of the field.
        value: as JSON has it; not None.
        kind: one of ``WANTED``.
        place: what to call the row in an error.

    Raises:
        FileFormatError: another kind, a number out of range, or a grade that there is not.
    """
    if not _of_kind(value, kind) or not _within(name, value):
        raise FileFormatError(f"{place}, {name}", value, f"Give {allowed(name, kind)}, or leave it out.")
    return int(value) if kind == "int" else value


def allowed(name: str, kind: str) -> str:
    """What a field may hold, in words."""
    if name == "quality":
        return f"one of {', '.join(GRADES)}"
    if name in WHOLE:
        return f"a whole number of {WHOLE[name][0]:,} to {WHOLE[name][1]:,}"
    return f"a number above 0, up to {REAL[name]:,.0f}" if name in REAL else WANTED[kind]


def _of_kind(value: Any, kind: str) -> bool:
    if kind in ("str", "bool"):
        return isinstance(value, {"str": str, "bool": bool}[kind])
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        return False
    return kind == "float" or isinstance(value, int) or value.is_integer()


def _within(name: str, value: Any) -> bool:
    if name in WHOLE:
        least, largest = WHOLE[name]
        return bool(least <= value <= largest)
    if name in REAL:
        return bool(0 < value <= REAL[name]) and isfinite(value)
    return name != "quality" or value in GRADES

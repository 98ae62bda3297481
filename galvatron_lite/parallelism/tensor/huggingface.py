"""Column and row linears that transformers' own tensor-parallel plans name (``base_model_tp_plan`` of a config)."""

from __future__ import annotations

from collections.abc import Iterable
from fnmatch import fnmatchcase
from typing import Any

from torch import nn

COLUMN, ROW = "colwise", "rowwise"


def proposed_regions(block: nn.Module, linears: Iterable[str]) -> dict[str, tuple[str, ...]]:
    """Columns by row, as the config of a transformers block proposes; empty where it proposes nothing.

    A plan lists paths of the whole model (``layers.*.mlp.up_proj``); what follows the last ``*.`` is the path inside
    a block. Columns belong to the row of the same parent module. Other styles (experts, gathered outputs) are left
    out.

    Args:
        block: the block; some module of it may hold the model's config as ``config``.
        linears: paths of its linears.
    """
    styles = _styles(block)
    chosen = {path: style for path in linears for pattern, style in styles.items() if fnmatchcase(path, pattern)}
    parents = {path.rpartition(".")[0]: path for path, style in chosen.items() if style == ROW}
    columns: dict[str, tuple[str, ...]] = {}
    for path, style in chosen.items():
        row = parents.get(path.rpartition(".")[0])
        if style == COLUMN and row is not None:
            columns[row] = (*columns.get(row, ()), path)
    return columns


def _styles(block: nn.Module) -> dict[str, Any]:
    """Style by path inside the block."""
    plans = [getattr(getattr(module, "config", None), "base_model_tp_plan", None) for module in block.modules()]
    plan: dict[str, Any] = next((plan for plan in plans if isinstance(plan, dict)), {})
    return {path.rpartition("*.")[2]: style for path, style in plan.items() if "*." in path}

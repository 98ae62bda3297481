"""Bytes that blocks keep for backward: no more than Megatron-Core keeps, and as priced."""

from __future__ import annotations

from dataclasses import replace
from unittest.mock import patch

import pytest

from galvatron_lite.model.graph import Recompute
from studies import kept_bytes

MOST = 1.15


@pytest.mark.parametrize(("name", "tensor"), [("Llama", 1), *((name, 2) for name in kept_bytes.MODELS)])
def test_blocks_keep_no_more_than_they_must(name: str, tensor: int) -> None:
    sizes, make = kept_bytes.MODELS[name]
    small = replace(sizes, hidden=sizes.hidden // 16, ffn=sizes.ffn // 16, heads=4, kv_heads=2)
    if sizes.kv_heads == sizes.heads:
        small = replace(small, kv_heads=4)
    with patch.dict(kept_bytes.MODELS, {name: (small, make)}):
        for recompute in (Recompute.NONE, Recompute.SELECTIVE):
            theirs, seen, said = kept_bytes.compare(name, tensor, recompute)
            assert said == pytest.approx(seen, rel=0.01), recompute
            assert seen <= MOST * theirs, recompute

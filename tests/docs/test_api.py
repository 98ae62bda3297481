"""The reference that is written from the docstrings has every public name."""

from __future__ import annotations

import importlib.util
import sys

import galvatron_lite

from .pages import ROOT


def test_the_reference_has_every_public_name() -> None:
    spec = importlib.util.spec_from_file_location("docs_api", ROOT / "scripts" / "docs_api.py")
    script = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = script
    spec.loader.exec_module(script)
    lines = set(script.page().splitlines())
    assert {f"### `galvatron_lite.{name}`" for name in galvatron_lite.__all__} <= lines

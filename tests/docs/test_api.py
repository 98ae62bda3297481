"""The reference is what the docstrings say, and has every public name."""

from __future__ import annotations

import importlib.util
import sys

import galvatron_lite

from .pages import ROOT


def test_the_reference_is_up_to_date_and_has_every_public_name() -> None:
    spec = importlib.util.spec_from_file_location("docs_api", ROOT / "scripts" / "docs_api.py")
    assert spec is not None
    assert spec.loader is not None
    script = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = script
    spec.loader.exec_module(script)
    written = script.PAGE.read_text(encoding="utf-8")
    assert written == script.page(), "run scripts/docs_api"
    assert {f"### `galvatron_lite.{name}`" for name in galvatron_lite.__all__} <= set(written.splitlines())

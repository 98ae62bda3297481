"""Every promise of ``promises.md`` has a test that exists."""

from __future__ import annotations

import re
from pathlib import Path

TESTS = Path(__file__).parent


def test_the_tests_of_promises_exist() -> None:
    named = re.findall(r"`([\w/]+\.py)::(\w+)`", (TESTS / "promises.md").read_text(encoding="utf-8"))
    assert len(named) > 45
    missing = [name for file, name in named if f"def {name}(" not in (TESTS / file).read_text(encoding="utf-8")]
    assert not missing

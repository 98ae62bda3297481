"""Changing the plan while training runs."""

from __future__ import annotations

from galvatron_lite.runtime.switch.live import Switched, switch

__all__ = ["Switched", "switch"]

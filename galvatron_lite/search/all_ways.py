"""The ways there are to plan beside stages in the model's order (``ways``)."""

from __future__ import annotations

from galvatron_lite.search.branches import branch_plans
from galvatron_lite.search.delayed import delayed_plans, why_not_delayed
from galvatron_lite.search.ways import Way, Why

WAYS: tuple[Way, ...] = (branch_plans, delayed_plans)
WHY: tuple[Why, ...] = (why_not_delayed,)

"""What the columns of the scores mean; printed by ``galvatron validate --help``."""

from __future__ import annotations

LEGEND = (
    "time %: mean of |predicted / measured - 1| of step times; median: of the same; bias: mean with sign (+: too slow)",
    "memory %, bias: the same of peak memory; over: runs that ran but are predicted not to fit their device",
    "rank: Spearman's correlation of predicted and measured times; in groups: among plans of one model, machine, batch",
    "regret %: by how much the plan predicted fastest in such a group is slower than its best; worst: of any group",
)
"""A line for each group of columns."""

EPILOG = "Columns. " + ". ".join(LEGEND) + ". Exit status: 0, or 1 where nothing is scored or a value is wrong."
"""What stands below the options."""

POINTER = "What the columns mean: galvatron validate --help"

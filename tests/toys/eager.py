"""A schedule of its own: 1F1B with one more forward pass of warm-up."""

from __future__ import annotations

from galvatron_lite.parallelism.pipeline.schedule import Schedule


class Eager(Schedule):
    """Every group runs one micro-batch further ahead of its backward than under 1F1B, and so holds one more."""

    def ahead(self, groups: int, group: int, microbatches: int) -> int:
        return super().ahead(groups, group, microbatches) + 1


EAGER = Eager("eager-1f1b", ("eager",), settles=True, repeats=True)

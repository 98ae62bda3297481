"""The schedules there are, by what they have in common."""

from __future__ import annotations

from galvatron_lite.parallelism.pipeline.schedule import schedules

EXECUTABLE = tuple(schedule for schedule in schedules() if schedule.executable)
SIMPLE = tuple(schedule for schedule in schedules() if schedule.simple)
ZERO_BUBBLE = tuple(schedule for schedule in schedules() if schedule.splits_backward)

"""What must hold of any search: more room, more schedules, more strategies never make a plan slower; it repeats."""

from __future__ import annotations

import os
import subprocess
import sys

CODE = """
import json, random
from galvatron_lite.files import to_data
from galvatron_lite.search.planner import find_plan
from tests.search.instances import random_instance
for seed in range(6):
    asked = random_instance(seed)
    plan = find_plan(asked.profile, devices=asked.devices, global_batch=asked.batch, budget=10**6, backend="any")
    print(json.dumps(to_data(plan)))
"""


def test_the_same_question_has_the_same_answer_in_every_process() -> None:
    said = [
        subprocess.run(
            [sys.executable, "-c", CODE], capture_output=True, text=True, check=True,
            env={**os.environ, "PYTHONHASHSEED": seed},
        ).stdout
        for seed in ("0", "4242")
    ]  # fmt: skip
    assert len(said[0].splitlines()) == 6
    assert said[0] == said[1]

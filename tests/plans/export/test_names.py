"""Names are refused when read, and escaped in what is written for other tools."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
import yaml

from galvatron_lite.errors import FileFormatError, InputError
from galvatron_lite.files import to_data
from galvatron_lite.plans.export.tools import TOOLS, export
from galvatron_lite.plans.io import read_plan
from galvatron_lite.plans.schema import BranchPlacement, Plan
from tests.plans.export.made import PLANS

EVIL = "gpt\n--load /evil --trust-remote\ndeepspeed_config: {deepspeed_config_file: /evil}\r\u2028x"


@pytest.mark.parametrize("place", [("model",), ("stages", 0, "runs", 0, "first"), ("precision",)])
@pytest.mark.parametrize("value", [EVIL, "a" * 301, "\x1b[2J"])
def test_a_name_is_one_printable_line(tmp_path: Path, place: tuple[str | int, ...], value: str) -> None:
    data = part = json.loads(json.dumps(to_data(PLANS["mixed"])))
    for key in place[:-1]:
        part = part[key]
    part[place[-1]] = value
    (tmp_path / "plan.json").write_text(json.dumps(data))
    with pytest.raises(FileFormatError, match=str(place[-1])):
        read_plan(tmp_path / "plan.json")


def named(plan: Plan, name: str) -> Plan:
    """The plan with a name wherever it has one."""
    run = replace(plan.stages[0].runs[1], first=name)
    stage = replace(plan.stages[0], runs=(plan.stages[0].runs[0], run, *plan.stages[0].runs[2:]))
    branch = BranchPlacement(name, (name,), 0, plan.devices, (run,))
    return replace(plan, model=name, stages=(stage,), branches=(branch,))


@pytest.mark.parametrize("tool", sorted(TOOLS))
def test_a_plan_made_in_python_writes_no_line_of_its_names(tool: str) -> None:
    evil, plain = (export(named(PLANS["mixed"], name), tool).text for name in (EVIL, "gpt"))
    without = [[line for line in text.splitlines() if not line.startswith("#")] for text in (evil, plain)]
    assert without[0] == without[1]
    assert yaml.safe_load(evil) == yaml.safe_load(plain) or tool in ("megatron", "torchtitan")


@pytest.mark.parametrize("tool", sorted(TOOLS))
def test_a_precision_is_one_of_those_there_are(tool: str) -> None:
    with pytest.raises(InputError, match="precision"):
        export(replace(PLANS["data"], precision=EVIL), tool)

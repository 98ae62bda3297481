"""Damaged plan, profile, cluster and phase files: what reads and prices them ends well, or with an error of our own.

What is accepted is used as the commands would: shown, priced, written again. ``scripts/fuzz`` takes 10,000 files,
here a tenth of that many.
"""

from __future__ import annotations

import json
import os
import random
from collections.abc import Callable
from contextlib import suppress
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import yaml
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from galvatron_lite import api
from galvatron_lite.errors import GalvatronError
from galvatron_lite.files import read_data, to_data
from galvatron_lite.parallelism.backends import check_runs
from galvatron_lite.plans.describe import headline, memory_parts, stage_rows
from galvatron_lite.plans.io import read_plan, write_plan
from galvatron_lite.plans.phases import PHASES_VERSION, read_phased_plan, read_phases
from galvatron_lite.plans.schema import Plan
from galvatron_lite.profiler.schema import Profile
from galvatron_lite.profiler.store import read_profile, write_profile
from tests.fuzz.damage import damaged, scrambled

CONFIGS = Path(__file__).parents[2] / "configs"
CLUSTERS = ("a100-80gb", "a100-v100", "rtx-titan")
SEEDS = st.integers(0, 2**40)


TIMES = int(os.environ.get("FUZZ_TIMES", "1"))


def many(count: int) -> Callable[[Any], Any]:
    """So many inputs, times ``TIMES``; always the same ones."""
    quiet = [HealthCheck.function_scoped_fixture, HealthCheck.too_slow]
    return settings(
        max_examples=count * TIMES, deadline=None, database=None, derandomize=True, suppress_health_check=quiet
    )


@cache
def known_profile() -> Profile:
    return api.profile("llama2-7b", estimate=True, cluster="b200", gpus=4, sequence=128)


@cache
def plans() -> list[Any]:
    """Valid plans as data: mixed strategies, a pipeline, cyclic data parallelism, inference."""
    asked: list[dict[str, Any]] = [
        {"mem": "60GB"}, {"fix": "pp=2"}, {"fix": ("rule=cdp-v1", "setting=data"), "allow_delay": True, "mem": "99%"},
        {"mode": "inference"},
    ]  # fmt: skip
    return [to_data(api.plan(known_profile(), batch=16, runners_up=1, **one)) for one in asked]


@cache
def profile_data() -> Any:
    return to_data(known_profile())


def used_plan(path: Path) -> None:
    plan = read_plan(path)
    shown(plan)
    write_plan(plan, path)
    assert read_plan(path) == plan
    check_runs(plan)
    shown(api.evaluate(plan, known_profile()))


def shown(plan: Plan) -> None:
    headline(plan)
    for row, stage in zip(stage_rows(plan), plan.stages, strict=False):
        assert row is not None
        memory_parts(stage.memory)


def used_profile(path: Path) -> None:
    profile = read_profile(path)
    write_profile(profile, path)
    assert read_profile(path) == profile
    shown(api.evaluate(read_one(plans()[0]), profile))


@cache
def _plan_of(text: str) -> Plan:
    from galvatron_lite.files import from_data

    return from_data(Plan, json.loads(text), "plan")


def read_one(data: Any) -> Plan:
    return _plan_of(json.dumps(data))


def used_cluster(path: Path) -> None:
    shown(api.evaluate(read_one(plans()[0]), known_profile(), cluster=path, gpus=4))


def ours(call: Callable[[Path], None], path: Path) -> None:
    """Whatever the file, no error but our own, which says something."""
    with suppress(GalvatronError):
        call(path)


def write(path: Path, data: Any, draw: random.Random) -> Path:
    """The data as YAML or JSON."""
    place = path / ("file.json" if draw.random() < 0.5 else "file.yaml")
    dumper = getattr(yaml, "CSafeDumper", yaml.SafeDumper)
    text = json.dumps(data) if place.suffix == ".json" else yaml.dump(data, Dumper=dumper)
    place.write_text(text, encoding="utf-8", errors="surrogatepass" if place.suffix == ".json" else "replace")
    return place


@given(seed=SEEDS)
@many(200)
def test_damaged_plans(tmp_path: Path, seed: int) -> None:
    draw = random.Random(seed)
    ours(used_plan, write(tmp_path, damaged(draw.choice(plans()), draw), draw))


@given(seed=SEEDS)
@many(40)
def test_damaged_profiles(tmp_path: Path, seed: int) -> None:
    draw = random.Random(seed)
    ours(used_profile, write(tmp_path, damaged(profile_data(), draw), draw))


@given(seed=SEEDS)
@many(120)
def test_damaged_clusters(tmp_path: Path, seed: int) -> None:
    draw = random.Random(seed)
    data = read_data(CONFIGS / "clusters" / f"{draw.choice(CLUSTERS)}.yaml")
    ours(used_cluster, write(tmp_path, damaged(data, draw), draw))


@given(seed=SEEDS)
@many(40)
def test_damaged_phases(tmp_path: Path, seed: int) -> None:
    draw = random.Random(seed)
    ramp = read_data(draw.choice(sorted((CONFIGS / "phases").glob("*.yaml"))))
    ours(lambda path: list(map(str, read_phases(path))), write(tmp_path, damaged(ramp, draw), draw))
    phase = {"name": "one", "steps": 10, "first": 0, "plan": draw.choice(plans())}
    planned = {"version": PHASES_VERSION, "phases": [phase, {**phase, "first": 10}]}
    ours(lambda path: str(read_phased_plan(path).at(3)), write(tmp_path, damaged(planned, draw), draw))


@given(seed=SEEDS)
@many(600)
def test_scrambled_bytes(tmp_path: Path, seed: int) -> None:
    draw = random.Random(seed)
    door, text = draw.choice(
        [(used_plan, yaml_of(0)), (used_plan, yaml_of(1)), (used_profile, profile_text()), *cluster_texts()]
    )
    place = tmp_path / draw.choice(["file.yaml", "file.json"])
    place.write_bytes(scrambled(text, draw))
    ours(door, place)


@cache
def yaml_of(number: int) -> bytes:
    return bytes(yaml.safe_dump(plans()[number], encoding="utf-8"))


@cache
def profile_text() -> bytes:
    return json.dumps(profile_data()).encode()


def cluster_texts() -> list[tuple[Callable[[Path], None], bytes]]:
    return [(used_cluster, (CONFIGS / "clusters" / f"{name}.yaml").read_bytes()) for name in CLUSTERS]


@pytest.mark.parametrize("door", [used_plan, used_profile, used_cluster])
def test_nothing_in_a_file_is_executed(tmp_path: Path, door: Callable[[Path], None]) -> None:
    trap = tmp_path / "trap"
    for call in ("os.system", "subprocess.getoutput"):
        place = tmp_path / "file.yaml"
        place.write_text(f"!!python/object/apply:{call} ['touch {trap}']")
        with pytest.raises(GalvatronError):
            door(place)
    assert not trap.exists()

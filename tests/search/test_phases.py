"""Phases of a run: reading them, choosing their plans, and what switching between plans costs."""

from __future__ import annotations

import json
import random
import sys
from dataclasses import replace
from itertools import product
from math import inf
from pathlib import Path

import pytest

from galvatron_lite import api
from galvatron_lite.cli import main
from galvatron_lite.cost.switching import FIXED, LAYER, switch_cost
from galvatron_lite.errors import InputError
from galvatron_lite.files import to_data
from galvatron_lite.parallelism.strategy import Strategy
from galvatron_lite.plans.io import is_phased
from galvatron_lite.plans.phases import (
    Phase,
    PhasedPlan,
    read_phases,
    read_training_plan,
    same_split,
    write_phased_plan,
)
from galvatron_lite.plans.schema import Plan
from galvatron_lite.profiler.schema import Profile
from galvatron_lite.search.phases import choose
from galvatron_lite.search.result import plan_of
from tests.factories import make_cluster, make_graph, make_kind, make_profile, random_profile

ITEMS = 720
STATE = 4 + 8
"""Bytes of a parameter and its optimizer state."""


def phases_file(folder: Path, text: str) -> Path:
    path = folder / "phases.yaml"
    path.write_text(f"version: 1\nphases:\n{text}")
    return path


def test_a_ramp_is_its_parts(tmp_path: Path) -> None:
    path = phases_file(tmp_path, "- {name: ramp, steps: 10, batch: [4, 8, 16]}\n- {name: main, steps: 5, batch: 32}\n")
    assert read_phases(path) == (
        Phase("ramp 1/3", 4, 4), Phase("ramp 2/3", 3, 8), Phase("ramp 3/3", 3, 16), Phase("main", 5, 32),
    )  # fmt: skip


@pytest.mark.parametrize(
    ("entry", "field"),
    [
        ("{name: a, steps: 2, batch: [1, 2, 3]}", "phases.0.steps"),
        ("{name: a, steps: 2, batch: 0}", "phases.0.batch"),
        ("{name: a, steps: 9, batch: [1, 2], sequence: [8, 16, 32]}", "phases.0"),
        ("{name: a, steps: 9, batch: 1, sequence: [8, 16], profile: p.yaml}", "phases.0.profile"),
        ("{name: a, steps: 9, batch: 1, speed: 3}", "speed"),
    ],
)
def test_phases_that_cannot_be_are_refused(tmp_path: Path, entry: str, field: str) -> None:
    with pytest.raises(InputError, match=field):
        read_phases(phases_file(tmp_path, f"- {entry}\n"))


def total(seconds: list[list[float]], steps: list[int], costs: list[list[float]], path: tuple[int, ...]) -> float:
    """Seconds of a run, infinite where it may not be: by the rules in words, phase by phase."""
    result = 0.0
    for phase, own in enumerate(path):
        result += steps[phase] * seconds[phase][own]
        last = path[phase - 1] if phase else own
        if last != own:
            gained = steps[phase] * (seconds[phase][last] - seconds[phase][own])
            result += costs[last][own] if gained > costs[last][own] else inf
    return result


def test_the_chosen_plans_of_phases_equal_brute_force() -> None:
    draw = random.Random(3)
    switched = 0
    for _ in range(200):
        phases, plans = draw.randint(1, 5), draw.randint(1, 4)
        seconds = [[draw.choice([1.0, 2.0, 3.0, 1.5, inf]) for _ in range(plans)] for _ in range(phases)]
        steps = [draw.randint(1, 9) for _ in range(phases)]
        costs = [[draw.uniform(0.1, 8.0) for _ in range(plans)] for _ in range(plans)]
        every = min(total(seconds, steps, costs, path) for path in product(range(plans), repeat=phases))
        found = choose(seconds, steps, lambda one, other, costs=costs: costs[one][other])
        assert (found is None) == (every == inf)
        if found is not None:
            assert total(seconds, steps, costs, tuple(found)) == pytest.approx(every)
            switched += len(set(found)) > 1
    assert switched > 20


def one_layer(devices: int, layers: int = 1, whole: int = 0) -> Profile:
    """A model of equal layers whose matmuls can be split, on nodes of two devices; tensor groups have ``whole``."""
    kind = make_kind("block", ITEMS, tensor_degrees=4, whole=whole)
    cluster = make_cluster(devices, bandwidth=1e6, latency=0.0)
    if devices > 2:
        level = cluster.levels[0]
        levels = (replace(level, size=2), replace(level, name="rack", size=devices // 2, bandwidth=1e5))
        cluster = replace(cluster, levels=levels)
    return make_profile(make_graph([kind], ["block"] * layers), [], cluster)


def plan_with(profile: Profile, strategies: list[Strategy], cuts: tuple[int, ...] = ()) -> Plan:
    devices = profile.cluster.devices
    ends = cuts or (0, len(strategies))
    return plan_of(
        profile.graph, devices=devices, global_batch=8, microbatches=1, cuts=ends, strategies=strategies
    )  # fmt: skip


ONE, DATA, TENSOR = Strategy(), Strategy(data=2), Strategy(tensor=2)
ZERO3, ZERO1 = Strategy(zero=2, zero_stage=3), Strategy(zero=2, zero_stage=1)


@pytest.mark.parametrize(
    ("before", "after", "received"),
    [
        (DATA, ZERO3, 0),  # a part of what each has
        (ZERO3, DATA, ITEMS // 2 * STATE),
        (ZERO1, DATA, ITEMS // 2 * 8),  # parameters are whole already
        (TENSOR, DATA, ITEMS // 2 * STATE),
        # the second half of its slice is with the other one: a quarter of all
        (ZERO3, TENSOR, ITEMS // 4 * STATE),
    ],
)
def test_what_two_devices_take_from_each_other(before: Strategy, after: Strategy, received: int) -> None:
    profile = one_layer(2)
    cost = switch_cost(profile, plan_with(profile, [before]), plan_with(profile, [after]))
    assert (cost.received, cost.moved) == (received, 2 * received)
    held = ITEMS * STATE // (1 if after == DATA else 2)
    moving = received / 1e6 + 2 * held / profile.cluster.device.memory_bandwidth
    assert cost.seconds == pytest.approx(FIXED + LAYER + moving)


@pytest.mark.parametrize(
    ("before", "after", "received"),
    [
        (ZERO1, DATA, ITEMS // 2 * STATE),
        (DATA, ZERO1, ITEMS // 2 * 2),
        (ZERO1, ZERO3, 0),
        (ZERO3, ZERO1, ITEMS // 2 * 2),
    ],
)
def test_masters_move_and_are_gathered_in_16_bits(before: Strategy, after: Strategy, received: int) -> None:
    profile = replace(one_layer(2), copied_bytes=2)
    cost = switch_cost(profile, plan_with(profile, [before]), plan_with(profile, [after]))
    assert cost.received == received


def test_what_tensor_parallelism_does_not_split_moves_as_a_whole() -> None:
    profile = one_layer(2, whole=80)
    total = profile.graph.kinds["block"].parameters.total
    cost = switch_cost(profile, plan_with(profile, [ZERO3]), plan_with(profile, [TENSOR]))
    assert cost.received == ((total - 80) // 4 + 80 // 2) * STATE


def test_stages_give_their_layers_over_the_slow_link() -> None:
    """Two nodes of two devices: a stage each becomes replicas everywhere; each node takes a layer from the other."""
    profile = one_layer(4, layers=2)
    staged = plan_with(profile, [DATA, DATA], (0, 1, 2))
    spread = plan_with(profile, [Strategy(data=4)] * 2)
    cost = switch_cost(profile, staged, spread)
    assert cost.received == ITEMS * STATE
    # both devices of a node take a whole layer over the node's one link of 1e5 bytes/s
    assert cost.seconds == pytest.approx(FIXED + 2 * LAYER + 2 * ITEMS * STATE / 1e5 + 4 * ITEMS * STATE / 1e10)


def by_items(profile: Profile, before: Strategy, after: Strategy) -> int:
    """Bytes that devices take from others, item by item of a grid as fine as all splits."""
    side = 12

    def held(strategy: Strategy, rank: int, states: bool) -> set[tuple[int, int]]:
        shard, tensor = rank // strategy.tensor % strategy.zero, rank % strategy.tensor
        shards = strategy.zero if states or strategy.zero_stage >= 2 else 1
        rows = range(tensor * side // strategy.tensor, (tensor + 1) * side // strategy.tensor)
        columns = range(shard % shards * side // shards, (shard % shards + 1) * side // shards)
        return set(product(rows, columns))

    moved = 0.0
    for rank in range(profile.cluster.devices):
        for states, width in ((False, 4), (True, 8)):
            missing = held(after, rank, states) - held(before, rank, states)
            moved += len(missing) * width * ITEMS / side**2
    return round(moved)


def test_what_moves_is_what_items_say() -> None:
    profile, draw = one_layer(12), random.Random(1)
    options = [
        Strategy(data=12 // zero // tensor, zero=zero, zero_stage=stage if zero > 1 else 0, tensor=tensor)
        for tensor in (1, 2, 4)
        for zero in (1, 2, 3)
        if 12 % (zero * tensor) == 0
        for stage in (1, 2, 3)
    ]
    for _ in range(40):
        before, after = draw.sample(options, 2)
        plans = [plan_with(profile, [strategy]) for strategy in (before, after)]
        if not same_split(*plans):
            assert switch_cost(profile, *plans).moved == by_items(profile, before, after), (before, after)


def test_only_the_batch_changes_and_nothing_is_paid() -> None:
    profile = one_layer(2)
    plan = plan_with(profile, [DATA])
    assert switch_cost(profile, plan, replace(plan, global_batch=16, microbatches=4)).seconds == 0.0


def test_phases_of_a_random_model(tmp_path: Path) -> None:
    profile = random_profile(random.Random(5), devices=4, blocks=3)
    phases = [Phase("short", 3, 8), Phase("long", 100000, 64)]
    found = api.plan_phases(phases, profile, mem="90%")
    assert [phase.first for phase in found.phases] == [0, 3]
    assert [phase.plan.global_batch for phase in found.phases] == [8, 64]
    assert found.at(2).name == "short"
    assert found.at(3).name == found.at(10**9).name == "long"
    assert found.seconds <= (found.single_seconds or inf) + 1e-9
    write_phased_plan(found, tmp_path / "plan.yaml")
    assert read_training_plan(tmp_path / "plan.yaml") == found
    assert is_phased(to_data(found))
    broken = replace(found, phases=(found.phases[0], replace(found.phases[1], first=7)))
    write_phased_plan(broken, tmp_path / "broken.yaml")
    with pytest.raises(InputError, match=r"phases\.1\.first"):
        read_training_plan(tmp_path / "broken.yaml")


def test_a_measured_profile_is_not_taken_for_another_sequence() -> None:
    profile = random_profile(random.Random(5))
    with pytest.raises(InputError, match="8 tokens a sample"):
        api.plan_phases([Phase("long", 10, 8, sequence=4096)], profile)


def test_the_phases_command(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Profiles are estimated at the sequence of each phase."""
    text = (
        "- {name: short, steps: 2000, batch: 64, sequence: 128}\n"
        "- {name: long, steps: 2000, batch: 8, sequence: 1024}\n"
    )
    path = phases_file(tmp_path, text)
    options = ["--model", "gpt2", "--cluster", "a100-80gb", "--gpus", "2", "--phases", str(path)]
    monkeypatch.setattr(sys, "argv", ["galvatron", "plan", *options, "--json", "-o", str(tmp_path / "plan.yaml")])
    with pytest.raises(SystemExit) as ended:
        main()
    assert not ended.value.code
    data = json.loads(capsys.readouterr().out)
    found = read_training_plan(tmp_path / "plan.yaml")
    assert isinstance(found, PhasedPlan)
    assert data["seconds"] == pytest.approx(found.seconds)
    assert [phase.sequence for phase in found.phases] == [128, 1024]
    assert (found.phases[1].switch is None) == same_split(found.phases[0].plan, found.phases[1].plan)

"""Plans as people write them."""

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from galvatron_lite.errors import InputError
from galvatron_lite.files import to_data
from galvatron_lite.model.graph import Recompute
from galvatron_lite.parallelism.strategy import Offload, Strategy
from galvatron_lite.plans.describe import placed_branches
from galvatron_lite.plans.schema import BranchPlacement
from galvatron_lite.plans.written import parse_strategy, plan_from
from tests.factories import make_graph, make_kind

KINDS = [make_kind(name, 100) for name in ("before", "block", "after")]
GRAPH = make_graph(KINDS, ["before", *["block"] * 5, "after"])
NAMES = [layer.name for layer in GRAPH.layers]
FIRST, BLOCKS, LAST = NAMES[0], NAMES[1:-1], NAMES[-1]
HAND = {
    "devices": 4,
    "global_batch": 8,
    "microbatches": 2,
    "runs": [
        {"layers": FIRST, "strategy": "zero3x4"},
        {"layers": f"{BLOCKS[0]}..{BLOCKS[-1]}", "strategy": "zero3x4 recompute"},
        {"layers": LAST, "strategy": {"data": 4}},
    ],
}
COUNTS = {key: value for key, value in HAND.items() if key != "runs"}

STRATEGIES = st.builds(
    Strategy,
    data=st.integers(1, 8),
    tensor=st.integers(1, 8),
    expert=st.integers(1, 4),
    recompute=st.sampled_from(Recompute),
    offload=st.sampled_from(Offload),
)


@given(STRATEGIES, st.integers(1, 8), st.sampled_from([1, 2, 3]), st.integers(1, 4), st.booleans(), st.booleans())
def test_short_forms_read_back(
    base: Strategy, zero: int, stage: int, context: int, ulysses: bool, shared: bool
) -> None:
    strategy = replace(
        base,
        zero=zero, zero_stage=stage if zero > 1 else 0, context=context, ulysses=ulysses and context > 1,
        sequence_parallel=shared and base.tensor > 1,
    )  # fmt: skip
    assert parse_strategy(str(strategy)) == strategy


@pytest.mark.parametrize(
    "strategy",
    [
        Strategy(data=4, expert=4, expert_tensor=1, tensor=2), Strategy(height=2, width=4), Strategy(filters=2),
        Strategy(depth=2, height=3, width=5, data=2), Strategy(channels=2),
    ],
)  # fmt: skip
def test_whole_experts_and_shares_of_pictures_read_back(strategy: Strategy) -> None:
    assert parse_strategy(str(strategy)) == strategy


@pytest.mark.parametrize("text", ["", "zero4", "tensor0", "data2 data4", "ulysses2 context2", "data2+sp", "fast"])
def test_other_words_are_refused(text: str) -> None:
    with pytest.raises(InputError, match="field"):
        parse_strategy(text, "field")


def test_ranges_and_short_strategies() -> None:
    plan = plan_from(HAND, GRAPH, "plan")
    zero = Strategy(zero=4, zero_stage=3)
    assert [(run.first, run.last, run.count, run.strategy) for run in plan.stages[0].runs] == [
        (FIRST, FIRST, 1, zero),
        (BLOCKS[0], BLOCKS[-1], len(BLOCKS), replace(zero, recompute=Recompute.FULL)),
        (LAST, LAST, 1, Strategy(data=4)),
    ]
    assert (plan.model, plan.precision, plan.schedule.value) == (GRAPH.name, GRAPH.precision, "1f1b")


def test_a_glob_takes_what_matches_next() -> None:
    data = {**COUNTS, "stages": [{"runs": [{"layers": "*", "strategy": "data4"}]}]}
    assert plan_from(data, GRAPH, "plan").stages[0].runs[0].count == len(NAMES)


def test_a_plan_file_is_read_as_a_written_plan() -> None:
    plan = plan_from(HAND, GRAPH, "plan")
    assert plan_from(to_data(plan), GRAPH, "plan") == plan


@pytest.mark.parametrize(
    ("run", "named"),
    [
        ({"strategy": "data4"}, r"runs\.1\.layers is missing"),
        ({"layers": BLOCKS[1], "strategy": "data4"}, r"runs\.1\.layers: .* goes on with"),
        ({"layers": f"{BLOCKS[0]}..nowhere", "strategy": "data4"}, r"runs\.1\.layers.* No layer nowhere"),
        (
            {"layers": f"{BLOCKS[0]}..{BLOCKS[-1]}9", "strategy": "data4"},
            rf"No layer {BLOCKS[-1]}9 follows {BLOCKS[0]}; the last of that name is {LAST}\.",
        ),
        ({"layers": BLOCKS[0], "strategy": {"datta": 4}}, r"runs\.1\.strategy\.datta: 4 .* Did you mean data\?"),
        ({"layers": BLOCKS[0], "strategy": "data3x"}, r"runs\.1\.strategy: 'data3x'"),
        ({"layers": f"{BLOCKS[0]}..{BLOCKS[-1]}", "strategy": "data2"}, r"runs\.1\.strategy"),
        ({"layers": BLOCKS[0], "strategy": "data4", "fast": True}, r"runs\.1\.fast"),
        ({"layers": BLOCKS[0]}, r"runs\.1\.strategy is missing"),
        (
            {"first": BLOCKS[0], "last": BLOCKS[-1], "count": 99, "strategy": "data4"},
            rf"runs\.1\.count: 99 .*From {BLOCKS[0]} to {BLOCKS[-1]} there are {len(BLOCKS)}",
        ),
    ],
)
def test_an_error_names_the_run(run: dict[str, object], named: str) -> None:
    runs = [HAND["runs"][0], run, *HAND["runs"][2:]]  # type: ignore[index]
    with pytest.raises(InputError, match=named):
        plan_from({**HAND, "runs": runs}, GRAPH, "plan")


def test_a_plan_that_ends_early_names_the_next_layer() -> None:
    with pytest.raises(
        InputError, match=rf"strategy of {LAST} is missing\. The stages end before it: they have 6 of the 7 layers"
    ):
        plan_from({**HAND, "runs": HAND["runs"][:2]}, GRAPH, "plan")  # type: ignore[index]


@pytest.mark.parametrize(
    ("wrong", "right"), [("batch", "global_batch"), ("gpus", "devices"), ("microbatch", "microbatches")]
)
def test_a_key_by_another_name_is_refused_with_its_name(wrong: str, right: str) -> None:
    data = {wrong if key == right else key: value for key, value in HAND.items()}
    with pytest.raises(InputError, match=rf"plan, {wrong}: .* Did you mean {right}\? {right} is missing\."):
        plan_from(data, GRAPH, "plan")


def test_a_missing_key_is_named() -> None:
    with pytest.raises(InputError, match=r"plan, gpu: .* devices and global_batch are missing\."):
        plan_from({"gpu": 4, "microbatches": 2, "runs": HAND["runs"]}, GRAPH, "plan")
    with pytest.raises(InputError, match=r"plan, global_batch is missing\. Needed are devices"):
        plan_from({key: value for key, value in HAND.items() if key != "global_batch"}, GRAPH, "plan")


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"runs": HAND["runs"], "devics": "b200"}, r"plan, stages\.0\.devics: .*Did you mean device\?"),
        ({"runs": [*HAND["runs"], {"layers": LAST, "strategy": "data4"}]}, "All layers .* are planned already"),  # type: ignore[misc]
        ({"runs": [{"layers": f"{BLOCKS[1]}..{LAST}", "strategy": "data4"}]}, f"goes on with {FIRST}"),
    ],
)
def test_a_stage_that_cannot_be_used_is_refused_with_the_reason(change: dict[str, object], said: str) -> None:
    with pytest.raises(InputError, match=said):
        plan_from({**COUNTS, "stages": [change]}, GRAPH, "plan")


@pytest.mark.parametrize(
    "data",
    [[], {"devices": 4}, {**HAND, "runs": "all"}, *({**COUNTS, "stages": stages} for stages in ([], "all", [1], {}))],
)
def test_what_is_no_plan_is_refused(data: object) -> None:
    with pytest.raises(InputError):
        plan_from(data, GRAPH, "plan.yaml")


def test_branches_that_the_model_has_not_are_named() -> None:
    branch = {"name": "left", "first": 0, "devices": 4, "runs": HAND["runs"]}
    with pytest.raises(InputError, match=rf"^plan, branches\.0\.name: 'left' .*{GRAPH.name} has no such branch"):
        plan_from({**HAND, "branches": [branch]}, GRAPH, "plan")
    plan = replace(plan_from(HAND, GRAPH, "plan"), branches=(BranchPlacement("left", ("left",), 0, 4, ()),))
    with pytest.raises(InputError, match=r"^branches\.0\.name: 'left' .*has no independent branches"):
        placed_branches(GRAPH, plan)
    with pytest.raises(InputError, match=r"^plan, stages\.0, runs: \[\] .*Give a list of runs"):
        plan_from({**HAND, "runs": []}, GRAPH, "plan")

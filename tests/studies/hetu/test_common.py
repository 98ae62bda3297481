"""The space that both planners can say."""

import pytest

from galvatron_lite.parallelism.strategy import Strategy
from galvatron_lite.peers.hetu.plan import from_plan
from studies.hetu.compare import backend_of, bench_for, pins_of

from .cases import FOLDER, FOUND, found


@pytest.mark.parametrize(
    ("strategy", "said"),
    [
        (Strategy(zero=8, zero_stage=1), True),
        (Strategy(zero=2, zero_stage=3, context=4, ulysses=True), True),
        (Strategy(tensor=8, sequence_parallel=True), True),
        (Strategy(zero=2, zero_stage=3, context=4), False),
        (Strategy(zero_stage=3, context=8, ulysses=True), False),
        (Strategy(data=2, zero=4, zero_stage=3), False),
        (Strategy(zero=2, zero_stage=1, tensor=2, context=2, ulysses=True), False),
        (Strategy(zero=8, zero_stage=2), False),
    ],
)
def test_strategies(strategy: Strategy, said: bool) -> None:
    assert backend_of(found("llama2-7b")[0]).runs(strategy) == said


def test_what_was_left_out() -> None:
    search = next(one for one in FOUND if one.off == ("ckpt", "fsdp", "sp"))
    values = backend_of(search).values
    assert (values["zero_stage"], values["context"], len(values["recompute"])) == ((0, 1), (1,), 1)
    assert pins_of(search).even
    assert pins_of(found("t5-3B", "v240")[0]).pipeline == 1


@pytest.mark.parametrize("degree", [1, 2])
def test_their_files_can_say_what_our_search_finds(degree: int) -> None:
    search = next(one for one in FOUND if one.off == ("ckpt", "fsdp", "sp") and one.budget_gb == 36)
    found = bench_for(search, FOLDER).found(degree, search.usable)
    assert found is not None
    theirs = from_plan(found[0])
    assert theirs.division == (32 // degree,) * degree
    assert theirs.chunks * theirs.pipeline > 1

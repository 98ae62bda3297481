from __future__ import annotations

import re

import pytest

from galvatron_lite.errors import InputError
from galvatron_lite.parallelism.backends import ANY, DEEPSPEED, GALVATRON
from galvatron_lite.search.pins import check_backend


@pytest.mark.parametrize(
    ("pin", "lacking"),
    [
        ("schedule=interleaved", "the interleaved-1f1b schedule"),
        ("vpp=2", "several stages a group"),
    ],
)
def test_what_the_backend_lacks_is_named_as_it_was_typed(pin: str, lacking: str) -> None:
    with pytest.raises(
        InputError, match=re.escape(f"--fix: '{pin}' cannot be used. Backend deepspeed cannot run")
    ) as no:
        check_backend([pin], [], DEEPSPEED)
    assert lacking in str(no.value)
    assert "--backend any offers it" in str(no.value)
    check_backend([pin], [], ANY)


def test_schedules_that_are_asked_for_are_held_against_the_backend_too() -> None:
    check_backend(
        ["cp=2", "ulysses=on", "EP=2", "zero=3", "tp=8", "filters=2", "height=2", "schedule=gpipe", "vpp=1"],
        ["1f1b"],
        GALVATRON,
    )
    with pytest.raises(InputError, match="--schedule: 'zb1p' cannot be used") as no:
        check_backend([], ["zb1p"], DEEPSPEED)
    assert "--backend any offers it" in str(no.value)
    check_backend([], ["zb1p"], GALVATRON)
    check_backend([], ["zb1p"], ANY)

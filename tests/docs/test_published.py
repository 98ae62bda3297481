"""What the page on published runs says, against the runs."""

import json
import re
from collections import Counter
from dataclasses import fields

from galvatron_lite.validate.rows import PublishedRun

from .pages import text_of

PAGE = text_of("profiles/published/README.md")
RUNS = [json.loads(line) for line in text_of("profiles/published/runs.jsonl").splitlines()]
LAYERS = [json.loads(line) for line in text_of("profiles/published/layers.jsonl").splitlines()]


def test_counts() -> None:
    words = " ".join(PAGE.split())
    assert f"holds {len(RUNS):,} runs in {len({run['family'] for run in RUNS})} families" in words
    assert f"holds {len(LAYERS)} timings" in words
    assert f"to {max(run.get('n_gpus', 0) for run in RUNS):,} (" in " ".join(text_of("README.md").split())


def test_every_field_of_the_rows_is_described_and_read_or_never_compared() -> None:
    present = set().union(*RUNS)
    assert {name for name in present | set().union(*LAYERS) if f"`{name}`" not in PAGE} == set()
    read = {item.name for item in fields(PublishedRun)}
    assert present - read == {"tflops_per_gpu", "tflops_kind", "mfu", "hfu"}


def test_every_row_says_where_it_comes_from_and_has_a_name_of_its_own() -> None:
    assert all(run["source"] for run in RUNS)
    assert max(Counter(run["run_id"] for run in RUNS).values()) == 1
    assert {run["quality"] for run in RUNS} == {"A", "A-mem", "B", "C"}


def test_families_that_are_named_exist() -> None:
    part = PAGE.split("## What to know of the families")[1].split("## Licences")[0]
    families = {run["family"] for run in RUNS}
    for name in re.findall(r"\b([a-z]+-(?:[a-z0-9*]+-?)+)(?=[ ,:])", part):
        known = [one for one in families if re.fullmatch(name.replace("*", ".*"), one) or one.endswith(name)]
        assert known or name in NO_FAMILY, name


NO_FAMILY = {"nvidia-smi", "third-party"}

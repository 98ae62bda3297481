"""The page without a browser: whole, self-contained, escaped, small; and what the script unpacks is the timeline."""

from __future__ import annotations

import base64
import json
import re
import zlib
from dataclasses import astuple, replace
from html.parser import HTMLParser

import numpy as np
import pytest

from galvatron_lite.analysis.report.page import PlanView, page, with_timeline
from galvatron_lite.analysis.report.plan_figures import device_groups, split_dimensions
from galvatron_lite.analysis.report.timeline_data import KINDS, packed
from galvatron_lite.cost.timeline import Timeline
from galvatron_lite.errors import InputError
from galvatron_lite.parallelism.cyclic.rules import CyclicRule, CyclicSetting
from galvatron_lite.parallelism.strategy import Strategy
from galvatron_lite.plans.schema import Cyclic, Schedule
from tests.analysis.report.plans import HOSTILE, hostile, large, large_page, small

VOID = {"meta", "link", "br", "img", "input", "hr"}
BACK = re.compile(r'<(?:script|link|img|iframe|object|embed|use|image)[^>]*\b(?:src|href)="(?!data:|#)', re.IGNORECASE)


class Checked(HTMLParser):
    """Notes what is opened and not closed, identifiers, what refers to them, texts by element, scripts."""

    def __init__(self) -> None:
        super().__init__()
        self.open: list[str] = []
        self.ids: list[str] = []
        self.refers: list[str] = []
        self.scripts: list[str] = []
        self.tags: list[str] = []
        self.headings: list[int] = []
        self.handlers: list[str] = []
        self.unlabelled: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        given = dict(attrs)
        self.ids += [given["id"]] if given.get("id") else []
        for name in ("aria-labelledby", "aria-describedby", "aria-controls"):
            self.refers += (given.get(name) or "").split()
        self.handlers += [name for name in given if name.startswith("on")]
        if given.get("role") == "img" and not given.get("aria-label"):
            self.unlabelled.append(tag)
        if re.fullmatch(r"h\d", tag):
            self.headings.append(int(tag[1]))
        if tag not in VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.handle_starttag(tag, attrs)
        if tag not in VOID:
            self.open.pop()

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag, self.getpos()

    def handle_data(self, data: str) -> None:
        if self.open and self.open[-1] == "script":
            self.scripts.append(data)


def checked(html: str) -> Checked:
    found = Checked()
    found.feed(html)
    found.close()
    return found


@pytest.fixture(scope="module")
def whole() -> str:
    return page([small(), small(Schedule.ZERO_BUBBLE_1P)])


def test_the_page_is_well_formed_and_labelled(whole: str) -> None:
    found = checked(whole)
    assert not found.open
    assert len(set(found.ids)) == len(found.ids)
    assert set(found.refers) <= set(found.ids)
    assert not found.unlabelled
    assert not found.handlers
    # headings go down one level at a time
    assert all(after <= before + 1 for before, after in zip(found.headings, found.headings[1:], strict=False))
    assert found.headings[0] == 1


def test_the_page_loads_nothing_from_the_network(whole: str) -> None:
    assert not BACK.search(whole)
    assert "default-src 'none'" in whole
    assert not re.search(r"@import|url\((?!#)", whole)
    assert "fetch(" not in whole


def test_the_page_names_every_section_and_figure(whole: str) -> None:
    plan = small().plan
    assert plan.prediction is not None
    sections = ("Layers and what they do", "Runners-up", "Memory at the worst moment", "Groups of devices in a step")
    for words in ("Step time", "Samples a second", "MFU", "estimated", "Where the time of a step goes", *sections):
        assert words in whole
    assert "zero3x2" in whole
    assert f"{100 * plan.prediction.mfu:.1f} %" in whole


def test_nothing_that_is_shown_is_taken_for_markup() -> None:
    html = page([hostile(), small()])
    found = checked(html)
    plain = checked(page([small(), small()]))
    assert set(found.tags) == set(plain.tags)
    assert found.tags.count("script") == plain.tags.count("script")
    assert not found.handlers
    assert "<script>alert" not in html
    assert "<img" not in html
    assert "{{ 7*7 }}" in html.replace("&#34;", '"')  # shown as it is, not worked out
    assert html.count("</style>") == 1
    own = [json.loads(script) for script in found.scripts if script.lstrip().startswith("{")]
    assert [len(told["groups"]) for told in own] == [4, 4]


def test_names_are_shown_as_they_are() -> None:
    class Texts(HTMLParser):
        seen = ""

        def handle_data(self, data: str) -> None:
            self.seen += data

    texts = Texts()
    texts.feed(page([hostile()]))
    assert texts.seen.count(HOSTILE) >= 6


def unpacked(told: dict[str, object]) -> list[dict[str, np.ndarray]]:
    """What the page's script makes of it, in Python."""
    data, at, found = zlib.decompress(base64.b64decode(str(told["data"]))), 0, []
    for group in told["groups"]:  # type: ignore[attr-defined]
        planes = []
        for kind in ("<u1", "<i2", "<i4", "<u2", "<u2"):
            planes.append(np.frombuffer(data, kind, group["count"], at))
            at += planes[-1].nbytes
        codes, steps, gaps, during, after = planes
        times = np.array([group["times"][code // 3][code % 3] for code in codes])
        starts = np.cumsum(gaps) + np.concatenate([[0], np.cumsum(times.sum(axis=1))[:-1]])
        last: dict[int, int] = {}
        numbers = []
        for code, step in zip(codes.tolist(), steps.tolist(), strict=True):
            last[code] = last.get(code, 0) + step
            numbers.append(last[code])
        found.append(
            {"kind": codes % 3, "microbatch": np.array(numbers), "start": starts, "during": during, "after": after}
        )
    assert at == len(data)
    return found


@pytest.mark.parametrize("schedule", [Schedule.GPIPE, Schedule.INTERLEAVED, Schedule.ZERO_BUBBLE_V])
def test_the_packed_timeline_is_unpacked_unchanged(schedule: Schedule) -> None:
    step = small(schedule, 7).timeline
    assert step is not None
    same(step)


def same(step: Timeline) -> None:
    told = packed(step, [0] * len(step.groups), [""] * len(step.groups))
    for group, own in zip(step.groups, unpacked(told), strict=True):
        assert [KINDS[kind] for kind in own["kind"]] == [one.what for one in group.passes]
        assert own["microbatch"].tolist() == [one.microbatch for one in group.passes]
        # a tick is a 2^30th of the step: rounding adds up to a millionth of it at the most
        starts = np.array([one.start for one in group.passes])
        assert np.abs(own["start"] * told["tick"] - starts).max() < 1e-6 * step.span
        levels = told["levels"]
        assert [levels[place] for place in own["during"]] == [astuple(memory) for memory in group.during]
        assert [levels[place] for place in own["after"]] == [astuple(memory) for memory in group.after]


def test_a_pipeline_of_128_stages_and_512_micro_batches_is_small() -> None:
    shown = large()
    assert sum(len(group.passes) for group in shown.timeline.groups) == 2 * 65536
    html = large_page()
    assert len(html.encode()) < 1_000_000
    same(replace(shown.timeline, groups=shown.timeline.groups[::60]))


def test_groups_of_devices_are_those_of_the_strategy() -> None:
    """Row-major over (data, zero, context, tensor): the last innermost (``Strategy``)."""
    strategy = Strategy(data=2, zero=2, zero_stage=1, context=2, tensor=2)
    assert split_dimensions(strategy) == [("data", 2, 8), ("zero", 2, 4), ("context", 2, 2), ("tensor", 2, 1)]
    plan = replace(small().plan, devices=8)
    names = {found.name: found for found in device_groups(plan, 4)}
    assert names["pipeline stages"].words == "0: 0, 1; 1: 2, 3; 2: 4, 5; 3: 6, 7; each within a node"
    assert (names["zero"].size, names["zero"].count) == (2, 4)


def test_parts_that_cannot_be_shown_are_named() -> None:
    own = small()
    bare = PlanView("plan.yaml", replace(own.plan, prediction=None), own.profile)
    with pytest.raises(InputError, match="no prediction"):
        page([bare])
    cyclic = replace(own, plan=replace(own.plan, cyclic=Cyclic(CyclicRule.V1, CyclicSetting.DATA)), timeline=None)
    html = page([with_timeline(cyclic)])
    assert "Cyclic data parallelism has no timeline" in html
    assert "A step, pass by pass" not in html
    assert "Where the time goes" in html

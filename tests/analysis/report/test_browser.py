"""The page in a headless Chromium: it draws, answers to keys and pointer, and asks for nothing from a network."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from galvatron_lite.analysis.report.page import page
from galvatron_lite.plans.schema import Schedule
from tests.analysis.report.browser import Browser, missing
from tests.analysis.report.plans import hostile, large_page, small, written

pytestmark = pytest.mark.skipif(bool(missing()), reason=missing() or "there is a browser")

READY = "return document.documentElement.dataset.ready"
VIEW = "return document.querySelector('.timeline').view()"
MOST_SECONDS = 2.0


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The pages."""
    folder = tmp_path_factory.mktemp("pages")
    written(folder, "two", page([small(), replace(small(Schedule.ZERO_BUBBLE_1P, 8), name="other.yaml")]))
    written(folder, "one", page([small()]))
    written(folder, "hostile", page([hostile(), small()]))
    written(folder, "large", large_page())
    return folder


@pytest.fixture(scope="module")
def browser(place: Path) -> Iterator[Browser]:
    """One for all tests, closed at the end."""
    own = Browser(place)
    yield own
    own.close()


def opened(browser: Browser, path: Path, theme: str = "light") -> None:
    browser.log("performance")
    browser.log("browser")
    browser.command("Emulation.setEmulatedMedia", features=[{"name": "prefers-color-scheme", "value": theme}])
    browser.open(path)
    browser.wait(READY)


def requests(browser: Browser) -> list[str]:
    """What the page asked for since the last look, itself left out."""
    told = [json.loads(line["message"])["message"] for line in browser.log("performance")]
    found = [one["params"]["request"]["url"] for one in told if one["method"] == "Network.requestWillBeSent"]
    return [url for url in found if not url.startswith(("data:", "blob:"))]


def colours(browser: Browser, selector: str) -> int:
    """Different colours on a canvas: 1 where nothing was drawn."""
    script = (
        "const own = document.querySelector(arguments[0]); const paint = own.getContext('2d');"
        "const data = new Uint32Array(paint.getImageData(0, 0, own.width, own.height).data.buffer);"
        "return new Set(data).size"
    )
    return int(browser.run(script, selector))


@pytest.mark.parametrize("name", ["one", "two", "hostile", "large"])
def test_it_opens_without_errors_and_without_a_network(browser: Browser, place: Path, name: str) -> None:
    opened(browser, place / f"{name}.html")
    assert [line["message"] for line in browser.log("browser")] == []
    assert [url for url in requests(browser) if not url.endswith(f"/{name}.html")] == []
    assert colours(browser, "canvas.passes") > 5
    assert colours(browser, "canvas.memory") > 5
    assert browser.run("return document.documentElement.scrollWidth <= innerWidth")
    assert browser.run("return document.querySelectorAll('script').length") == browser.run(
        "return document.querySelectorAll('script.packed').length + 2"
    )


def test_a_large_report_opens_quickly(browser: Browser, place: Path) -> None:
    """The browser's own processor time to read, run and draw the page: a busy machine does not count."""
    browser.command("Performance.enable", timeDomain="threadTicks")
    opened(browser, place / "large.html")
    found = {one["name"]: one["value"] for one in browser.command("Performance.getMetrics")["metrics"]}
    browser.command("Performance.disable")
    assert 0.0 < found["TaskDuration"] < MOST_SECONDS


def test_zoom_and_pan_by_buttons_keys_and_pointer(browser: Browser, place: Path) -> None:
    opened(browser, place / "one.html")
    whole = browser.run(VIEW)
    browser.run("document.querySelector('[data-do=in]').click()")
    near = browser.run(VIEW)
    assert near[1] - near[0] == pytest.approx((whole[1] - whole[0]) / 2)
    browser.run("document.querySelector('canvas.passes').focus()")
    browser.press("+", "+")
    assert browser.run(VIEW)[1] - browser.run(VIEW)[0] == pytest.approx((whole[1] - whole[0]) / 8)
    browser.press("0")
    assert browser.run(VIEW)[:2] == pytest.approx(whole[:2])
    browser.press("+")
    before = browser.run(VIEW)
    box = browser.run(
        "const own = document.querySelector('canvas.passes'); own.scrollIntoView({block: 'center'});"
        "const frame = own.getBoundingClientRect(); return [frame.left, frame.top, frame.width]"
    )
    x, y = int(box[0] + box[2] / 2), int(box[1] + 10)
    down, up = {"type": "pointerDown", "button": 0}, {"type": "pointerUp", "button": 0}
    browser.point(x, y, down, {"type": "pointerMove", "duration": 0, "x": x + 120, "y": y}, up)
    assert browser.run(VIEW)[0] < before[0]


def test_screen_readers_get_the_passes(browser: Browser, place: Path) -> None:
    opened(browser, place / "one.html")
    browser.run("document.querySelector('canvas.passes').focus()")
    browser.press("up", "up", "up", "home", "right")
    said = str(browser.run("return document.querySelector('.readout').textContent"))
    assert said.startswith("Stage 0 (ranks 0–1), micro-batch 1: forward, ")
    browser.press("down")
    said = str(browser.run("return document.querySelector('.readout').textContent"))
    assert said.startswith("Stage 1 (ranks 2–3)")
    browser.press("home")
    said = str(browser.run("return document.querySelector('.readout').textContent"))
    assert " for forward of micro-batch 0 on stage 0." in said
    assert "It waits " in said
    browser.press("right")
    said = str(browser.run("return document.querySelector('.readout').textContent"))
    assert " of micro-batch 1 on " in said
    browser.press("end")
    assert ": backward, " in str(browser.run("return document.querySelector('.readout').textContent"))
    told = small().timeline
    assert browser.run(VIEW)[2:] == [1, len(told.groups[1].passes) - 1]


def test_pointing_at_a_pass_says_what_it_is(browser: Browser, place: Path) -> None:
    opened(browser, place / "one.html")
    box = browser.run(
        "const own = document.querySelector('canvas.passes'); own.scrollIntoView({block: 'center'});"
        "const frame = own.getBoundingClientRect(); return [frame.left, frame.top]"
    )
    browser.point(int(box[0]) + 78, int(box[1]) + 10)
    said = str(browser.run("return document.querySelector('.readout').textContent"))
    assert said.startswith("Stage 0 (ranks 0–1), micro-batch 0: forward")


def test_tabs_show_one_plan_at_a_time(browser: Browser, place: Path) -> None:
    opened(browser, place / "two.html")
    shown = "return [...document.querySelectorAll('.plan')].map((plan) => !plan.hidden)"
    assert browser.run(shown) == [True, False]
    browser.run("document.querySelector('[role=tab]').focus()")
    browser.press("right")
    assert browser.run(shown) == [False, True]
    assert browser.run("return document.activeElement.textContent") == "other.yaml"
    assert colours(browser, "#plan-1 canvas.passes") > 5


def test_light_and_dark_themes(browser: Browser, place: Path) -> None:
    ground = "return getComputedStyle(document.body).backgroundColor"
    opened(browser, place / "one.html", "dark")
    dark = browser.run(ground)
    browser.run("document.querySelector('.theme').click()")
    light = browser.run(ground)
    assert dark != light
    assert contrast(browser) >= 4.5
    browser.run("document.querySelector('.theme').click()")
    assert browser.run(ground) == dark
    assert contrast(browser) >= 4.5
    browser.run("localStorage.clear()")


def contrast(browser: Browser) -> float:
    """The least contrast of texts with the card they are on (WCAG 2.2, 1.4.3: 4.5)."""
    pairs = browser.run(
        "const number = (words) => words.match(/[\\d.]+/g).slice(0, 3).map(Number);"
        "const paper = number(getComputedStyle(document.querySelector('section')).backgroundColor);"
        "const texts = [...document.querySelectorAll('p, th, td, dt, .value, .note, caption, summary, h2, button')];"
        "return [paper, texts.map((one) => number(getComputedStyle(one).color))]"
    )
    return min(ratio(pairs[0], own) for own in pairs[1])


def ratio(one: list[float], other: list[float]) -> float:
    light, dark = sorted((luminance(one), luminance(other)), reverse=True)
    return (light + 0.05) / (dark + 0.05)


def luminance(colour: list[float]) -> float:
    parts = [value / 255 for value in colour]
    linear = [part / 12.92 if part <= 0.04045 else ((part + 0.055) / 1.055) ** 2.4 for part in parts]
    return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]


def test_every_control_can_be_reached_by_keys(browser: Browser, place: Path) -> None:
    opened(browser, place / "one.html")
    focus = "const own = document.activeElement; return own.className || own.dataset.do || own.tagName"
    seen: list[Any] = []
    for _ in range(12):
        browser.press("tab")
        seen.append(browser.run(focus))
    assert seen[0] == "skip"
    assert {"in", "out", "left", "right", "all", "passes"} <= set(seen)


def test_print_shows_every_plan(browser: Browser, place: Path) -> None:
    opened(browser, place / "two.html")
    browser.command("Emulation.setEmulatedMedia", media="print")
    shown = "return getComputedStyle(document.querySelector(arguments[0])).display"
    assert browser.run(shown, ".timeline") == "none"
    assert browser.run(shown, "#plan-1") != "none"
    assert browser.printed().startswith(b"%PDF")
    browser.command("Emulation.setEmulatedMedia", media="")


def test_without_a_script_everything_but_the_timeline_is_there(browser: Browser, place: Path) -> None:
    browser.command("Emulation.setScriptExecutionDisabled", value=True)
    browser.open(place / "two.html")
    root = browser.command("DOM.getDocument", depth=-1)["root"]
    found = browser.command("DOM.querySelector", nodeId=root["nodeId"], selector="#plan-1 .courses svg")
    box = browser.command("DOM.getBoxModel", nodeId=found["nodeId"])["model"]
    browser.command("Emulation.setScriptExecutionDisabled", value=False)
    assert box["width"] > 200
    assert box["height"] > 50


def test_a_narrow_window_does_not_scroll_sideways(browser: Browser, place: Path) -> None:
    browser.size(390, 800)
    opened(browser, place / "two.html")
    assert browser.run("return document.documentElement.scrollWidth <= 390")
    fits = "return [...document.querySelectorAll('.scroll')].every((one) => one.scrollWidth <= one.clientWidth)"
    assert browser.run(fits)
    browser.size(1280, 900)

"""The figure of ``scripts/planning_time`` as SVG: CPU seconds against layers and GPUs, log-log."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from galvatron_lite.svg import Scale, caption, colour, decades, document, mark, rounded

Points = Sequence[tuple[float, float]]  # size and CPU seconds

_SIDE, _HIGH, _LEFT, _TOP, _BETWEEN = 360, 300, 70, 84, 90
_WIDTH, _ROW = 2 * _SIDE + _LEFT + _BETWEEN + 20, 17


def figure(layers: Mapping[str, Points], gpus: Mapping[str, Points]) -> str:
    """The figure of both kinds of growth, by series with the name that the legend gives it; light and dark."""
    names = [*layers, *gpus]
    height = _TOP + _HIGH + 62 + _ROW * ((len(names) + 1) // 2)
    low, high = rounded(seconds for points in (*layers.values(), *gpus.values()) for _, seconds in points)
    upwards = Scale(low, high, _TOP + _HIGH, _TOP)
    how = "CPU seconds on one core of a warm process, the profile ready; both axes logarithmic"
    parts = [
        caption(_LEFT, 26, "How long a search takes", more=' font-size="15" font-weight="600"'),
        caption(_LEFT, 46, how, kind="soft"),
        *_plane(layers, 0, _LEFT, upwards, "layers"),
        *_plane(gpus, len(layers), _LEFT + _SIDE + _BETWEEN, upwards, "GPUs"),
        *(_legend(place, name) for place, name in enumerate(names)),
    ]
    title = "CPU seconds of a search against layers and GPUs"
    words = (
        f"{name}: {', '.join(f'{size:g} in {seconds:.2g} s' for size, seconds in points)}"
        for name, points in (*layers.items(), *gpus.items())
    )  # what a screen reader says
    return document(_WIDTH, height, title, parts, "; ".join(words))


def _plane(series: Mapping[str, Points], first: int, left: float, upwards: Scale, name: str) -> list[str]:
    sizes = sorted({size for points in series.values() for size, _ in points}) or [1.0]
    across = Scale(sizes[0] / 1.15, sizes[-1] * 1.15, left, left + _SIDE)
    bottom = _TOP + _HIGH
    lines = [f'<path class="grid" d="M{left} {_TOP}H{left + _SIDE}V{bottom}H{left}z"/>']
    for value in decades(upwards.low, upwards.high):
        y = upwards.at(value)
        lines.append(f'<path class="grid" d="M{left} {y:.1f}H{left + _SIDE}"/>')
        lines.append(caption(left - 7, y + 4, f"{value:g} s", "end", "soft"))
    kept: list[float] = []
    for size in sizes:
        x = across.at(size)
        if not kept or x - kept[-1] >= 38:
            kept.append(x)
            lines.append(caption(x, bottom + 18, f"{size:,g}", "middle", "soft"))
    lines.append(caption(left + _SIDE / 2, bottom + 38, name, "middle"))
    for place, points in enumerate(series.values(), first):
        places = [(across.at(size), upwards.at(seconds)) for size, seconds in points]
        path = "L".join(f"{x:.1f} {y:.1f}" for x, y in places)
        lines.append(f'<path class="t{colour(place)}" stroke-width="1.5" d="M{path}"/>')
        marks = "".join(mark(place, x, y) for x, y in places)
        lines.append(f'<g class="c{colour(place)}">{marks}</g>')
    return lines


def _legend(place: int, name: str) -> str:
    x, y = _LEFT + (place % 2) * (_SIDE + _BETWEEN), _TOP + _HIGH + 62 + _ROW * (place // 2)
    return f'<g class="c{colour(place)}">{mark(place, x, y - 4)}</g>' + caption(x + 12, y, name)

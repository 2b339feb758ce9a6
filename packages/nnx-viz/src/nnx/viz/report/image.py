"""The losses of a run as one picture without scripts, for a model card."""

from __future__ import annotations

import math
from collections.abc import Sequence
from html import escape
from typing import TYPE_CHECKING, Any

from nnx.viz._common import PALETTE
from nnx.viz.report.page import epoch_rows

if TYPE_CHECKING:
    from nnx.store import NNRun

_WIDTH, _HEIGHT, _LEFT, _TOP, _RIGHT, _BOTTOM = 640, 300, 64, 34, 16, 40
_INK, _GRID = "#57606a", "#d0d7de"

Line = tuple[str, str, list[tuple[float, float]]]


def training_svg(run: NNRun) -> str:
    """Training and validation loss of each epoch as an SVG; empty for a run without any."""
    last = {record.epoch_idx: record for record in epoch_rows(run)}
    scores: dict[str, dict[int, Any]] = {
        "training": {epoch: record.monitored_train_edp() for epoch, record in last.items()},
        "validation": {epoch: record.val_edp for epoch, record in last.items()},
    }
    lines: list[Line] = []
    for label, found in scores.items():
        losses = {epoch: score.loss for epoch, score in found.items() if score is not None}
        points = [
            (epoch + 1.0, float(loss))
            for epoch, loss in sorted(losses.items())
            if loss is not None and math.isfinite(loss)
        ]
        if points:
            lines.append((label, PALETTE[len(lines)], points))
    return _drawn(f"Loss of run {run.id}", lines) if lines else ""


def _drawn(title: str, lines: Sequence[Line]) -> str:
    every = [point for _, _, points in lines for point in points]
    x0, x1 = _range([x for x, _ in every])
    y0, y1 = _range([y for _, y in every])

    def at(x: float, y: float) -> tuple[float, float]:
        across = _LEFT + (x - x0) / (x1 - x0) * (_WIDTH - _LEFT - _RIGHT)
        down = _TOP + (y1 - y) / (y1 - y0) * (_HEIGHT - _TOP - _BOTTOM)
        return round(across, 1), round(down, 1)

    parts = [_text(_LEFT, 20, title, "start", bold=True)]
    for y in (y0, (y0 + y1) / 2, y1):
        _, down = at(x0, y)
        parts.append(f'<path d="M{_LEFT} {down}H{_WIDTH - _RIGHT}" stroke="{_GRID}"/>')
        parts.append(_text(_LEFT - 8, down + 4, f"{y:.3g}", "end"))
    for x in sorted({x for x, _ in every} if len(every) < 3 else {x0, x1}):
        parts.append(_text(at(x, y0)[0], _HEIGHT - 22, f"{x:g}", "middle"))
    parts.append(_text((_LEFT + _WIDTH - _RIGHT) / 2, _HEIGHT - 6, "epochs completed", "middle"))
    for index, (label, colour, points) in enumerate(lines):
        way = "L".join("{} {}".format(*at(x, y)) for x, y in points)
        parts.append(f'<path d="M{way}" fill="none" stroke="{colour}" stroke-width="2"/>')
        parts += [
            '<circle cx="{}" cy="{}" r="2.5" fill="{}"/>'.format(*at(x, y), colour)
            for x, y in points
        ]
        parts.append(
            _text(_WIDTH - _RIGHT - 96 * (len(lines) - 1 - index), 20, label, "end", colour)
        )
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" role="img" aria-label="{escape(title)}" '
        f'width="{_WIDTH}" height="{_HEIGHT}" viewBox="0 0 {_WIDTH} {_HEIGHT}" '
        'font-family="sans-serif" font-size="12">'
        f'<rect width="{_WIDTH}" height="{_HEIGHT}" fill="#ffffff"/>{"".join(parts)}</svg>\n'
    )


def _range(values: Sequence[float]) -> tuple[float, float]:
    low, high = min(values), max(values)
    if low == high:
        half = abs(low) / 2 or 0.5
        return low - half, high + half
    return low, high


def _text(
    x: float, y: float, text: str, anchor: str, colour: str = _INK, *, bold: bool = False
) -> str:
    weight = ' font-weight="bold"' if bold else ""
    return f'<text x="{x}" y="{y}" text-anchor="{anchor}" fill="{colour}"{weight}>{escape(text)}</text>'

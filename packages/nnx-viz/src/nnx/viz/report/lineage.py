"""The runs that a run continues, and those that continue it, as a drawn graph."""

from __future__ import annotations

from html import escape

from nnx.viz.report.reading import Relative, RunView

_WIDTH, _HEIGHT, _GAP = 190, 54, 84


def as_svg(view: RunView) -> str | None:
    """An SVG of the lineage, or ``None`` for a run without relatives.

    One column per generation; an edge names the checkpoint and epoch it
    resumed from. Colours are the page's own.
    """
    if len(view.lineage) < 2:
        return None
    depth = _depths(view.lineage)
    columns: dict[int, list[Relative]] = {}
    for relative in view.lineage:
        columns.setdefault(depth[relative.run_id], []).append(relative)
    place = {
        r.run_id: (10 + d * (_WIDTH + _GAP), 10 + i * (_HEIGHT + 22))
        for d, members in columns.items()
        for i, r in enumerate(members)
    }
    width = 20 + len(columns) * _WIDTH + (len(columns) - 1) * _GAP
    height = 20 + max(len(c) for c in columns.values()) * (_HEIGHT + 22)
    parts = [_edge(r, f"arrow-{view.short}", place) for r in view.lineage if r.parent_id in place]
    parts += [_node(r, *place[r.run_id], own=r.run_id == view.id) for r in view.lineage]
    label = escape(f"Lineage of run {view.short}: " + "; ".join(map(_sentence, view.lineage)))
    return (
        f'<svg class="lineage" role="img" aria-label="{label}" width="{width}" height="{height}" '
        f'viewBox="0 0 {width} {height}">'
        f'<defs><marker id="arrow-{view.short}" viewBox="0 0 8 8" refX="8" refY="4" markerWidth="7" '
        'markerHeight="7" orient="auto"><path d="M0 0L8 4L0 8z" class="head"/></marker></defs>'
        + "".join(parts)
        + "</svg>"
    )


def _depths(relatives: list[Relative]) -> dict[str, int]:
    parents = {r.run_id: r.parent_id for r in relatives}

    def depth(run_id: str) -> int:
        seen, steps = {run_id}, 0
        parent = parents[run_id]
        while parent in parents and parent not in seen:
            seen.add(parent)
            steps += 1
            parent = parents[parent]
        return steps

    return {r.run_id: depth(r.run_id) for r in relatives}


def _node(relative: Relative, x: int, y: int, *, own: bool) -> str:
    kind = "own" if own else "other" if relative.known else "missing"
    if not relative.known:
        line = "not in this folder"
    elif relative.epochs is None:
        line = "no committed epoch"
    else:
        line = f"{relative.mode}, {relative.epochs} epochs in all"
    return (
        f'<g class="{kind}"><rect x="{x}" y="{y}" width="{_WIDTH}" height="{_HEIGHT}" rx="6"/>'
        f'<text x="{x + 12}" y="{y + 23}" class="id">{escape(relative.run_id[:16])}</text>'
        f'<text x="{x + 12}" y="{y + 41}">{escape(line)}</text></g>'
    )


def _edge(relative: Relative, arrow: str, place: dict[str, tuple[int, int]]) -> str:
    assert relative.parent_id is not None
    x1, y1 = place[relative.parent_id]
    x2, y2 = place[relative.run_id]
    x1, y1, y2 = x1 + _WIDTH, y1 + _HEIGHT // 2, y2 + _HEIGHT // 2
    text = relative.checkpoint or ""
    if relative.epoch is not None:
        text += f", epoch {relative.epoch}"
    middle = (x1 + x2) // 2
    return (
        f'<path class="edge" d="M{x1} {y1}C{middle} {y1} {middle} {y2} {x2} {y2}" '
        f'marker-end="url(#{arrow})"/>'
        f'<text class="on-edge" x="{middle}" y="{(y1 + y2) // 2 - 8}">{escape(text)}</text>'
    )


def _sentence(relative: Relative) -> str:
    if relative.parent_id is None:
        return f"{relative.run_id[:8]} started fresh"
    return f"{relative.run_id[:8]} continues {relative.parent_id[:8]}"

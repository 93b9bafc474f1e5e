# SPDX-License-Identifier: Apache-2.0
"""Stacked horizontal bars as a small SVG."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from html import escape

COLOURS = ("#4e79a7", "#f28e2b", "#59a14f", "#e15759", "#76b7b2", "#edc948", "#b07aa1", "#9c755f", "#ff9da7", "#86bcb6")
REST_COLOUR = "#bab0ac"
WIDTH, LABEL_WIDTH, BAR_HEIGHT, GAP, TOP = 900, 190, 22, 8, 34
LEGEND_COLUMNS, LEGEND_HEIGHT = 4, 20
LEAST_LABELLED = 0.06  # a narrower segment has no room for its number


def stacked_bars(title: str, names: Sequence[str], shares: Mapping[str, Sequence[float]]) -> str:
    """Return an SVG document with one bar per name.

    Args:
        title: above the bars.
        names: of the bars, top down.
        shares: by segment, one number in [0, 1] per bar; the last segment is what is left, in grey.
    """
    colours = {segment: COLOURS[i % len(COLOURS)] for i, segment in enumerate(shares)}
    colours[list(shares)[-1]] = REST_COLOUR
    legend_top = TOP + len(names) * (BAR_HEIGHT + GAP) + 6
    height = legend_top + -(-len(shares) // LEGEND_COLUMNS) * LEGEND_HEIGHT + 6
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height}" '
        'font-family="sans-serif" font-size="12">',
        f'<rect width="{WIDTH}" height="{height}" fill="white"/>',
        f'<text x="8" y="20" font-size="14">{escape(title)}</text>',
    ]
    for row, name in enumerate(names):
        values = {segment: numbers[row] for segment, numbers in shares.items()}
        parts += _bar(TOP + row * (BAR_HEIGHT + GAP), name, values, colours)
    for i, (segment, colour) in enumerate(colours.items()):
        x = 8 + i % LEGEND_COLUMNS * (WIDTH // LEGEND_COLUMNS)
        y = legend_top + i // LEGEND_COLUMNS * LEGEND_HEIGHT
        parts.append(f'<rect x="{x}" y="{y}" width="12" height="12" fill="{colour}"/>')
        parts.append(f'<text x="{x + 18}" y="{y + 11}">{escape(segment)}</text>')
    return "\n".join([*parts, "</svg>", ""])


def _bar(y: int, name: str, values: Mapping[str, float], colours: Mapping[str, str]) -> list[str]:
    """Return one bar: its name on the left, then a segment per value, with its per cents where they fit."""
    parts = [f'<text x="{LABEL_WIDTH - 8}" y="{y + 15}" text-anchor="end">{escape(name)}</text>']
    x, scale = float(LABEL_WIDTH), WIDTH - LABEL_WIDTH - 10
    for segment, value in values.items():
        width = max(0.0, value) * scale
        if width < 0.5:
            continue
        parts.append(
            f'<rect x="{x:.1f}" y="{y}" width="{width:.1f}" height="{BAR_HEIGHT}" fill="{colours[segment]}">'
            f"<title>{escape(segment)} {value:.1%}</title></rect>"
        )
        if value >= LEAST_LABELLED:
            parts.append(f'<text x="{x + width / 2:.1f}" y="{y + 15}" text-anchor="middle">{100 * value:.0f}</text>')
        x += width
    return parts

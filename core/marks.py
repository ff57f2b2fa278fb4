"""What was changed while a run went on, as dotted lines and words in its charts; changes near each other share a block.

Words stand upright, a row for each step that something was changed before. Rows that would lie over each other become
one block over its lines, in their order, so that each can be read on a telephone too: how wide a row is in pixels isn't
known here, only what share of a chart it takes.
"""

from __future__ import annotations

import html
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

COLOUR = "#8a8f98"
"""Seen on a light and on a dark page."""
ROW_SHARE = 0.05
"""Of a chart's width: a row of small text, where the chart is as narrow as on a telephone."""
ROW_LENGTH = 36
"""Characters of small text that are no longer than a chart is high."""
MOST_ROWS = 6
FONT_SIZE = 10
RIM = ", ".join(f"{x}px {y}px 1px Canvas" for x, y in ((1, 1), (-1, -1), (1, -1), (-1, 1)))
"""Around the letters, so that they can be read over a curve; Canvas is what a browser calls a page's own ground, light
or dark."""
NO_MARKS: dict[str, Any] = {"shapes": [], "annotations": []}


@dataclass(frozen=True)
class _Block:
    """Words of changes that share a place in a chart.

    Attributes:
        told: place, step and text of each, in their order.
        row: the width of a row, as x goes.
        end: of the chart.
    """

    told: tuple[tuple[float, int, str], ...]
    row: float
    end: float

    @cached_property
    def rows(self) -> list[str]:
        return _rows(self.told)

    @property
    def anchor(self) -> tuple[float, str]:
        """Where the rows stand, and which side of theirs: beside a line, or over the midst of several."""
        first, last, width = self.told[0][0], self.told[-1][0], self.row * len(self.rows)
        if first == last:
            return first, "right" if first >= width else "left"
        return min(max((first + last) / 2, width / 2), self.end - width / 2), "center"

    @property
    def span(self) -> tuple[float, float]:
        """From where to where the rows reach."""
        (x, side), width = self.anchor, self.row * len(self.rows)
        begin = x - {"left": 0.0, "center": width / 2, "right": width}[side]
        return begin, begin + width


def draw_marks(marks: Iterable[Mapping[str, Any]], end: float, steps_per_epoch: float | None = None) -> dict[str, Any]:
    """`shapes` and `annotations` of plotly's layout; pointed at, the words say the step of each change.

    Args:
        marks: `step` and `text` of each.
        end: where the chart's x axis ends, from 0.
        steps_per_epoch: where x are epochs, each of which is drawn about its number; None where x are steps.
    """
    per = steps_per_epoch
    told = sorted(
        ((0.5 + mark["step"] / per if per else mark["step"], mark["step"], mark["text"]) for mark in marks),
        key=lambda one: one[0],
    )
    end = max([end, *(place for place, _, _ in told)])
    row = ROW_SHARE * end
    blocks: list[_Block] = []
    for one in told:
        block = _Block((one,), row, end)
        # those before one step stand together in any case
        while blocks and (blocks[-1].told[-1][0] == one[0] or blocks[-1].span[1] > block.span[0]):
            block = _Block((*blocks.pop().told, *block.told), row, end)
        blocks.append(block)
    places = dict.fromkeys(place for place, _, _ in told)
    return {"shapes": [_line(place) for place in places], "annotations": [_words(block) for block in blocks]}


def _rows(told: Sequence[tuple[float, int, str]]) -> list[str]:
    """A row a step, or more where its texts are too long for one; the newest, and how many there were before them."""
    rows: list[list[str]] = []
    # from the newest on, which somebody waits for
    for left, (_, step, text) in zip(range(len(told), 0, -1), reversed(told), strict=True):
        is_same = left < len(told) and told[left][1] == step
        if is_same and len(", ".join([text, *rows[-1]])) <= ROW_LENGTH:
            rows[-1].insert(0, text)
        elif len(rows) < MOST_ROWS:
            rows.append([text])
        else:
            rows[-1] = [f"{left + len(rows[-1]):,} earlier"]
            break
    return [", ".join(row) for row in reversed(rows)]


def _line(place: float) -> dict[str, Any]:
    line = {"color": COLOUR, "width": 1, "dash": "dot"}
    return {"type": "line", "x0": place, "x1": place, "yref": "paper", "y0": 0, "y1": 1, "line": line}


def _words(block: _Block) -> dict[str, Any]:
    # plotly reads tags in texts
    text = "<br>".join(html.escape(row, quote=False) for row in block.rows)
    told = [f"Step {step:,}: {html.escape(text, quote=False)}" for _, step, text in block.told]
    x, side = block.anchor
    return {
        "x": x,
        "y": 1,
        "yref": "paper",
        "text": text,
        "hovertext": "<br>".join(told),
        "textangle": -90,
        "align": "right",
        "showarrow": False,
        "xanchor": side,
        "yanchor": "top",
        "font": {"size": FONT_SIZE, "shadow": RIM},
    }

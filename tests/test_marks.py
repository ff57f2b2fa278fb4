"""The marks of what was changed while a run went on: lines and words in its charts."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import pytest

from core.marks import MOST_ROWS, ROW_SHARE, draw_marks


def marks(*told: tuple[int, str]) -> list[dict[str, Any]]:
    return [{"step": step, "text": text} for step, text in told]


def words(drawn: dict[str, Any]) -> list[tuple[float, str]]:
    return [(note["x"], note["text"]) for note in drawn["annotations"]]


def taken(note: dict[str, Any], end: float) -> tuple[float, float]:
    """From where to where the words reach."""
    width = (note["text"].count("<br>") + 1) * ROW_SHARE * end
    begin = note["x"] - {"left": 0.0, "center": width / 2, "right": width}[note["xanchor"]]
    return begin, begin + width


def test_changes_far_from_each_other_have_words_of_their_own():
    drawn = draw_marks(marks((100, "learning rate 0.001"), (200, "epochs 10")), 400)
    assert [shape["x0"] for shape in drawn["shapes"]] == [100, 200]
    assert words(drawn) == [(100, "learning rate 0.001"), (200, "epochs 10")]


def test_changes_before_one_step_share_a_line_and_words():
    drawn = draw_marks(marks((100, "learning rate 0.001"), (100, "epochs 10")), 400)
    assert [shape["x0"] for shape in drawn["shapes"]] == [100]
    assert words(drawn) == [(100, "learning rate 0.001, epochs 10")]


def test_changes_near_each_other_keep_their_lines_and_stand_in_rows_over_them():
    drawn = draw_marks(marks((200, "learning rate 0.001"), (200, "epochs 9"), (204, "taken up")), 400)
    assert [shape["x0"] for shape in drawn["shapes"]] == [200, 204]
    assert words(drawn) == [(202, "learning rate 0.001, epochs 9<br>taken up")]
    assert (
        drawn["annotations"][0]["hovertext"]
        == "Step 200: learning rate 0.001<br>Step 200: epochs 9<br>Step 204: taken up"
    )


def test_many_changes_before_one_step_stand_in_as_many_rows_as_they_need():
    told = [(200, f"learning rate 0.0{number}") for number in (1, 2, 3)]
    assert words(draw_marks(marks(*told), 400)) == [
        (200, "learning rate 0.01<br>learning rate 0.02<br>learning rate 0.03")
    ]


def test_words_at_the_left_edge_stand_to_the_right_of_their_line():
    (note,) = draw_marks(marks((1, "learning rate 0.001")), 400)["annotations"]
    assert (note["x"], note["xanchor"]) == (1, "left")
    (note,) = draw_marks(marks((300, "learning rate 0.001")), 400)["annotations"]
    assert (note["x"], note["xanchor"]) == (300, "right")


@pytest.mark.parametrize("apart", [1, 5, 10, 21, 40, 61, 99])
@pytest.mark.parametrize("first", [1, 30, 150, 400])
def test_no_words_lie_over_others_or_reach_beyond_the_chart(apart: int, first: int):
    told = [(first + apart * place, f"learning rate 0.00{place:03}") for place in range(8)]
    end = max(400, told[-1][0])
    spans = [taken(note, end) for note in draw_marks(marks(*told), end)["annotations"]]
    assert spans[0][0] >= -1e-9 and spans[-1][1] <= end + 1e-9
    for (_, before), (after, _) in pairwise(spans):
        assert before <= after + 1e-9


def test_the_newest_of_many_changes_are_named_and_all_told_where_they_are_pointed_at():
    told = [(200 + place, f"learning rate 0.00{place:03}") for place in range(9)]
    (note,) = draw_marks(marks(*told), 400)["annotations"]
    rows = note["text"].split("<br>")
    assert len(rows) == MOST_ROWS and (rows[0], rows[-1]) == ("4 earlier", "learning rate 0.00008")
    assert note["hovertext"].count("Step ") == 9


def test_a_thousand_changes_are_drawn_at_once():
    drawn = draw_marks(marks(*[(step, f"learning rate {step}") for step in range(1, 1001)]), 1000)
    told = sum(note["hovertext"].count("Step ") for note in drawn["annotations"])
    assert len(drawn["shapes"]) == told == 1000


def test_in_a_chart_of_epochs_a_change_stands_within_its_epochs_bar():
    # before step 6 of epochs of 4: the second step of the second one
    drawn = draw_marks(marks((6, "learning rate 0.001")), 3.5, steps_per_epoch=4)
    assert [shape["x0"] for shape in drawn["shapes"]] == [2.0]


def test_words_are_no_tags():
    (note,) = draw_marks(marks((10, "<b>loud</b>")), 400)["annotations"]
    assert note["text"] == "&lt;b&gt;loud&lt;/b&gt;" and "<b>" not in note["hovertext"]

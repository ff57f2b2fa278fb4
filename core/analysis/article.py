"""The times that the article of 2020 gives, as a group like one's own; they are quoted, not measured here."""

from __future__ import annotations

from core.analysis.repeats import Repeat, RunGroup

_MINUTES_AND_SECONDS = (("TPU", 7, 58), ("TPU", 12, 35), ("TPU", 8, 35), ("GPU", 11, 15), ("GPU", 11, 8))

ARTICLE = RunGroup(
    group_id="article-2020",
    name="The article's five runs",
    repeats=[
        Repeat(
            label=label,
            start="",
            run_id=f"article-{place}",
            state="finished",
            total_s=60.0 * minutes + seconds,
            phases={},
            epochs=[],
        )
        for place, (label, minutes, seconds) in enumerate(_MINUTES_AND_SECONDS, start=1)
    ],
    note='Dajiro, "Colab, PyTorch and TPU" (July 2020): the job of the preset blog (Wide ResNet-50-2 on ImageNetV2, '
    "5 epochs, batch size 32, Adam at 1e-5). Only the times of whole runs are known: neither phases nor versions, "
    "nor which runs were cold.",
)

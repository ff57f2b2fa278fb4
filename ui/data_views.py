"""What the data page draws of a scanned data set."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from pathlib import Path

import pandas as pd
import streamlit as st

from core.config import RunConfig, field_errors
from core.data.dataset import FEW_IMAGES, SKIP_WORDS, Dataset
from core.data.split import Item
from core.errors import AppError
from core.events import progress_in_words
from core.output import data_figures as figures
from ui import forms
from ui.scans import ScanJob, ScanKey
from ui.words import escaped

THUMBNAIL = 160
PER_PAGE = 12
MOST_SENTENCES = 5
MOST_IGNORED = 200
LAZY_ROWS = 10_000
ALL = -1
Placed = list[tuple[str, Item]]


def scan_key() -> ScanKey:
    """What the form asks to be scanned."""
    return ScanKey(
        *(st.session_state[forms.key_of(name)] for name in ("data", "seed", "val_percent", "val_duplicates"))
    )


def show_progress(job: ScanJob) -> None:
    """How far a scan is; reruns the page when it is over."""
    if job.state != "running":
        st.rerun()
    what, done, total = job.progress
    words = progress_in_words(what, done, total) if done or total else what
    st.progress(min(done / total, 1.0) if total else 0.0, text=f"{words[:1].upper()}{words[1:]}")
    st.button("Stop", icon=":material/stop:", on_click=job.stop, key=f"stop_scan_{job.number}")


def header(dataset: Dataset) -> None:
    """The figures that matter, how they add up, and what a person should know."""
    splits = {split: len(items) for split, items in dataset.splits.items()}
    used = sum(splits.values())
    cards = {
        "Images": used,
        **{figures.SPLIT_WORDS[split]: num for split, num in splits.items()},
        "Classes": len(dataset.classes),
        "Skipped": len(dataset.skipped),
        "Not pictures": len(dataset.ignored),
    }
    number_cards(cards)
    skipped, ignored = len(dataset.skipped), len(dataset.ignored)
    found = used + skipped + ignored
    st.caption(f"{found:,} files found = {used:,} used + {skipped:,} skipped + {ignored:,} not pictures")
    callouts(dataset.warnings, dataset.hints(), dataset.about)


def number_cards(numbers: dict[str, int]) -> None:
    """A card a number, as many in a row as there is room for."""
    told = {title: f"{num:,}" for title, num in numbers.items()}
    # a figure that is too wide for its card would be cut off
    grid = st.grid("auto", min_column_width=max(108, 36 + 17 * max(map(len, told.values()))), gap="small")
    for title, words in told.items():
        with grid.cell():
            st.metric(title, words, border=True)


def callouts(warnings: Sequence[str], hints: Sequence[str], about: str = "") -> None:
    """Warnings, hints and what is known of the data, a box each; only the first few sentences are unfolded."""
    if warnings:
        st.warning(_bullets(warnings[:MOST_SENTENCES]), icon=":material/warning:")
    notes = list(filter(None, [about, *hints]))
    if notes:
        st.info(_bullets(notes[:MOST_SENTENCES]), icon=":material/info:")
    rest = [*warnings[MOST_SENTENCES:], *notes[MOST_SENTENCES:]]
    if rest:
        with st.expander(f"{len(rest):,} more"):
            st.markdown(_bullets(rest))


def classes(job: ScanJob) -> None:
    """The images of each class, as a chart, and as a table where they are many."""
    assert job.dataset is not None
    figure = job.once(figures.classes_figure)
    st.plotly_chart(figure, key=f"classes_{job.number}", config={"displayModeBar": False})
    frame = job.once(class_frame)
    marked = int((frame["Note"] != "").sum())
    has_many = len(frame) > figures.MOST_BARS
    if not has_many and not marked:
        return
    words = f"{marked:,} of {len(frame):,} classes have fewer than {FEW_IMAGES} training images"
    with st.container() if has_many else st.expander(words):
        if has_many:
            st.caption(f"{words if marked else f'{len(frame):,} classes'}. The table can be searched and sorted.")
        st.dataframe(
            frame,
            hide_index=True,
            height=320 if len(frame) > 8 else "auto",
            column_config={
                "Images": st.column_config.ProgressColumn(
                    format="%d", min_value=0, max_value=int(frame["Images"].max())
                ),
                "Note": st.column_config.TextColumn(help=f"few: fewer than {FEW_IMAGES} training images"),
            },
        )


def samples(job: ScanJob) -> None:
    """Thumbnails of a class, or one of each class, page by page."""
    dataset = job.dataset
    assert dataset is not None
    page_key = f"samples_page_{job.number}"

    def begin() -> None:
        st.session_state[page_key] = 0

    left, right = st.columns([3, 2])
    label = left.selectbox(
        "Class",
        [ALL, *range(len(dataset.classes))],
        format_func=lambda label: "All classes, one image of each" if label == ALL else dataset.classes[label],
        key=f"samples_class_{job.number}",
        on_change=begin,
    )
    split = right.segmented_control(
        "Split",
        ["all", *dataset.splits],
        format_func=lambda split: figures.SPLIT_WORDS.get(split, "All"),
        default="all",
        required=True,
        key=f"samples_split_{job.number}",
        on_change=begin,
    )
    chosen = chosen_samples(job.once(members), label, split)
    first = min(st.session_state.get(page_key, 0) * PER_PAGE, max(len(chosen) - 1, 0) // PER_PAGE * PER_PAGE)
    if len(chosen) > PER_PAGE:
        _pager(page_key, first, len(chosen))
    elif not chosen:
        st.caption("No image.")
    grid = st.grid("auto", min_column_width=THUMBNAIL, gap="small")
    for place, item in chosen[first : first + PER_PAGE]:
        with grid.cell():
            _sample(place, item, dataset.classes[item.label] if label == ALL else "")


def _pager(key: str, first: int, total: int) -> None:
    def turn(by: int) -> None:
        st.session_state[key] = first // PER_PAGE + by

    with st.container(horizontal=True, vertical_alignment="center"):
        st.button(
            "Previous", icon=":material/chevron_left:", disabled=not first, on_click=turn, args=(-1,), key=f"{key}_back"
        )
        is_last = first + PER_PAGE >= total
        st.button("Next", icon=":material/chevron_right:", disabled=is_last, on_click=turn, args=(1,), key=f"{key}_on")
        st.caption(f"{first + 1:,} to {min(first + PER_PAGE, total):,} of {total:,}", width="content")


def _sample(split: str, item: Item, class_name: str) -> None:
    with st.container(height=THUMBNAIL, border=False, vertical_alignment="bottom", gap=None):
        try:
            st.image(_thumbnail(item.digest, str(item.path)), alt=item.file)
            problem = ""
        except AppError:
            st.markdown(":gray[:material/broken_image:]")
            problem = " · :red[can't be read any more]"
    name = escaped(item.file.rpartition("/")[2])
    title = f"**{escaped(class_name)}**  \n" if class_name else ""
    st.caption(f"{title}{name}  \n{item.width} x {item.height} · {figures.SPLIT_WORDS[split]}{problem}")


@st.cache_data(max_entries=2000, show_spinner=False)
def _thumbnail(digest: str, _path: str) -> bytes:
    from core.output.preview import thumbnail

    return thumbnail(Path(_path), THUMBNAIL)


def image_sizes(job: ScanJob) -> None:
    """Widths and heights, in words and as a chart where they differ."""
    widths, heights = job.once(figures.sizes)
    st.markdown(figures.sizes_in_words(widths, heights))
    values = forms.values()
    try:
        from core.models.build import preprocessing

        looks = preprocessing(values["model"], values["image_size"])
    except AppError as error:
        st.caption(escaped(str(error)))
    else:
        words = figures.enlarged_in_words(widths, heights, looks.resize_size, looks.image_size)
        st.caption(f"{escaped(values['model'])}: {words}")
    chart = job.once(figures.sizes_figure)
    if chart is not None:
        st.plotly_chart(chart, key=f"sizes_{job.number}", config={"displayModeBar": False})


def training_batch(job: ScanJob) -> None:
    """The first batch of the run that the form describes, after a press."""
    from core.output.preview import SHOWN, as_image, first_batch, recipe_in_words

    assert job.dataset is not None
    values = forms.values()
    problems = field_errors(values)
    st.caption(
        "The very pixels that step 1 gets, but for normalisation: cropped, mirrored, coloured and mixed as the options "
        "on Train say."
    )
    if problems:
        st.markdown(":red[:material/error:] Some options on Train are out of their limits.")
        return
    config = RunConfig(**values)
    done = ", ".join(recipe_in_words(config)) or "none, the centre of each image"
    st.markdown(f"Augmentation: {escaped(done)} · seed {config.seed} · {escaped(config.model)}")
    asked = (job.number, config.model_dump())
    if st.button("Show the first batch", icon=":material/grid_view:", key=f"show_batch_{job.number}"):
        try:
            with st.spinner("Making the batch"):
                made = first_batch(job.dataset, config)
        except AppError as error:
            st.error(f"**{escaped(error.problem)}** {escaped(error.fix)}")
            return
        st.session_state["first_batch"] = (asked, made, [as_image(pixels) for pixels, _ in made.images])
    shown_for, batch, pictures = st.session_state.get("first_batch", (None, None, ()))
    if shown_for != asked:
        return
    grid = st.grid("auto", min_column_width=112, gap="small")
    for (_, label), picture in zip(batch.images, pictures, strict=True):
        with grid.cell():
            st.image(picture, width="stretch", alt=label)
            st.caption(escaped(label))
    if batch.batch_size > SHOWN:
        st.caption(f"The first {SHOWN} of {batch.batch_size:,} images.")
    if not batch.is_exact:
        why = f"{config.batch_size:,} would take long" if config.batch_size else "the run finds its batch size itself"
        st.caption(
            f"Drawn in a batch of {batch.batch_size:,}, since {why}: the files are those of the run, crops and colours "
            "are drawn otherwise."
        )
    for file, why in batch.lost[:MOST_SENTENCES]:
        st.warning(f"{escaped(file)} can't be read any more: {escaped(why)}", icon=":material/broken_image:")


def left_out(job: ScanJob) -> None:
    """Files that are skipped, with their reasons, and the report of all files to take away."""
    dataset = job.dataset
    assert dataset is not None
    if not dataset.skipped:
        st.markdown("Every picture is used.")
    else:
        _skipped_table(job, dataset)
    with st.container(horizontal=True):
        st.download_button(
            "All files as CSV",
            lambda: figures.report_csv(dataset),
            "data-report.csv",
            "text/csv",
            icon=":material/download:",
            on_click="ignore",
            key=f"csv_{job.number}",
        )
        st.download_button(
            "Report as JSON",
            lambda: figures.report_json(dataset),
            "data-report.json",
            "application/json",
            icon=":material/download:",
            on_click="ignore",
            key=f"json_{job.number}",
        )
    if dataset.ignored:
        with st.expander(f"Not pictures, or hidden: {len(dataset.ignored):,}"):
            more = len(dataset.ignored) - MOST_IGNORED
            names = "\n".join(" ".join(name.split()) for name in dataset.ignored[:MOST_IGNORED])
            st.code(f"{names}\nand {more:,} more" if more > 0 else names, language=None, height="content")


def _skipped_table(job: ScanJob, dataset: Dataset) -> None:
    counts = dataset.skipped_by_reason()
    left, right = st.columns(2)
    reasons = left.multiselect(
        "Reason",
        list(counts),
        format_func=lambda why: f"{SKIP_WORDS.get(why, why)} ({counts[why]:,})",
        placeholder="All reasons",
        key=f"skipped_why_{job.number}",
    )
    text = right.text_input("File name has", key=f"skipped_text_{job.number}")
    frame = job.once(skipped_frame)
    if reasons:
        frame = frame[frame["reason"].isin(reasons)]
    if text:
        frame = frame[frame["File"].str.contains(text, case=False, regex=False)]
    st.dataframe(frame[["File", "Why"]], hide_index=True, lazy=len(frame) > LAZY_ROWS or None)
    if len(frame) < len(dataset.skipped):
        st.caption(f"{len(frame):,} of {len(dataset.skipped):,}")


def duplicates(job: ScanJob) -> None:
    """Groups of files with equal bytes."""
    frame = job.once(duplicates_frame)
    if frame.empty:
        st.markdown("No two files are equal.")
        return
    marked = Counter(mark for marks in frame["Beware"] for mark in marks.split(", ") if mark)
    words = [f"in {mark}: {num:,}" for mark, num in marked.items()]
    st.markdown(" · ".join([f"Groups of equal files: {len(frame):,}", *words]))
    st.dataframe(frame, hide_index=True, lazy=len(frame) > LAZY_ROWS or None)


def class_frame(dataset: Dataset) -> pd.DataFrame:
    return pd.DataFrame(figures.class_table(dataset))


def duplicates_frame(dataset: Dataset) -> pd.DataFrame:
    return pd.DataFrame(figures.duplicates_table(dataset))


def skipped_frame(dataset: Dataset) -> pd.DataFrame:
    whys = [item.why for item in dataset.skipped]
    words = [SKIP_WORDS.get(why, why) for why in whys]
    return pd.DataFrame({"File": [item.file for item in dataset.skipped], "Why": words, "reason": whys})


def members(dataset: Dataset) -> dict[int, Placed]:
    """Each class's images with their splits, in order."""
    found: dict[int, Placed] = {label: [] for label in range(len(dataset.classes))}
    for split, items in dataset.splits.items():
        for item in items:
            found[item.label].append((split, item))
    return found


def chosen_samples(found: dict[int, Placed], label: int, split: str) -> Placed:
    """The images of a class in a split, or with `ALL` the first of each class."""

    def fits(place: tuple[str, Item]) -> bool:
        return split in ("all", place[0])

    if label != ALL:
        return [place for place in found[label] if fits(place)]
    firsts = (next(filter(fits, places), None) for places in found.values())
    return [place for place in firsts if place is not None]


def _bullets(sentences: Sequence[str]) -> str:
    told = [escaped(f"{sentence[:1].upper()}{sentence[1:]}") for sentence in sentences]
    return told[0] if len(told) == 1 else "\n".join(f"- {sentence}" for sentence in told)

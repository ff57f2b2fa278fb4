"""The data page, drawn without a browser, and what it is made of: scans, figures, and the preview of a batch."""

from __future__ import annotations

import csv
import io
import json
import shutil
import threading
from contextlib import ExitStack
from pathlib import Path

import numpy as np
import pytest
from PIL import Image
from streamlit.testing.v1 import AppTest

from core.config import make_config
from core.data.dataset import Dataset
from core.data.scan import scan
from core.data.sources import Skipped, open_source
from core.data.split import Item
from core.devices.local import CpuDevice
from core.errors import DataError
from core.events import ImageLost, Phases, RunEnded, RunPrepared
from core.output import data_figures as figures
from core.output.preview import first_batch, recipe_in_words, thumbnail
from core.setup import prepare
from core.training.task import mix_images
from tests.test_pages import MAIN, add_run, button, open_page, pages_store
from ui import data_views, registry
from ui.scans import ScanJob, ScanKey, Scans

CASE = Path(__file__).parent / "data" / "cases" / "truncated_jpeg" / "data"
WAIT_S = 60


@pytest.fixture
def store(tmp_path, monkeypatch):
    store = pages_store(tmp_path / "home", monkeypatch)
    yield store
    store.close()


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Two classes of fourteen pictures of different sizes, one of them twice, a broken one and a text."""
    root = tmp_path / "pictures"
    generator = np.random.default_rng(0)
    for label, name in enumerate(("cat", "dog")):
        (root / name).mkdir(parents=True)
        for number in range(14):
            shape = (40 + 3 * number, 60 - number, 3)
            pixels = generator.integers(100 * label, 100 * label + 100, shape, dtype=np.uint8)
            Image.fromarray(pixels).save(root / name / f"{number}.png")
    shutil.copy(root / "cat" / "0.png", root / "cat" / "same.png")
    (root / "cat" / "broken.jpg").write_bytes(b"\xff\xd8\xff\xe0 no more")
    (root / "dog" / "note.txt").write_text("not a picture")
    return root


def key_of(spec: object, seed: int = 0) -> ScanKey:
    return ScanKey(str(spec), seed, 20, "keep")


def scanned(folder: Path, home: Path) -> Dataset:
    return scan(open_source(str(folder), home), home=home, seed=0, val_percent=20)


def open_data(spec: object, **form: object) -> AppTest:
    app = AppTest.from_file(MAIN, default_timeout=120)
    app.session_state["form_data"] = str(spec)
    for name, value in form.items():
        app.session_state[f"form_{name}"] = value
    app.run()
    app.switch_page("../pages/data.py")
    app.run()
    assert not app.exception, app.exception
    return app


def look(app: AppTest, spec: object) -> ScanJob:
    """Press the button and wait for the scan."""
    button(app, "Look at it").click().run()
    job = registry.services().scans.find(key_of(spec))
    assert job is not None and job.wait(WAIT_S)
    app.run()
    assert not app.exception, app.exception
    return job


def texts(app: AppTest) -> str:
    return "\n".join(str(item.value) for item in [*app.markdown, *app.caption, *app.warning, *app.info])


def test_a_folder_is_looked_at(store, folder):
    app = open_data(folder)
    assert not app.metric
    look(app, folder)
    shown = {item.label: item.value for item in app.metric}
    assert shown == {"Images": "29", "Training": "23", "Validation": "6", "Classes": "2", "Skipped": "1"} | {
        "Not pictures": "1"
    }
    assert "31 files found = 29 used + 1 skipped + 1 not pictures" in texts(app)
    assert "Groups of equal files: 1" in texts(app)
    assert "cat/broken.jpg" in list(next(f.value for f in app.dataframe if "Why" in f.value)["File"])


def test_what_was_scanned_is_shown_at_once_to_another_session(store, folder):
    look(open_data(folder), folder)
    assert next(item.value for item in open_data(folder).metric if item.label == "Images") == "29"


def test_what_is_chosen_here_is_what_train_trains(store):
    app = open_data("builtin:fashion-mnist")
    app.selectbox(key="form_data").set_value("builtin:digits").run()
    app.number_input(key="form_seed").set_value(7).run()
    app.switch_page("../pages/train.py")
    app.run()
    assert (app.session_state["form_data"], app.session_state["form_seed"]) == ("builtin:digits", 7)


def test_a_failure_is_told_with_its_fix(store, tmp_path):
    nowhere = tmp_path / "nowhere"
    app = open_data(nowhere)
    job = look(app, nowhere)
    [error] = app.error
    assert error.value.replace("\\", "") == f"**{job.problem}** {job.fix}"


def test_a_scan_tells_how_far_it_is_and_is_stopped(store, folder, monkeypatch):
    def run(job: ScanJob, home: Path, anew: bool) -> None:
        while True:
            job.tell("reading images", 1200, 20_000)
            threading.Event().wait(0.02)

    monkeypatch.setattr(ScanJob, "run", run)
    app = open_data(folder)
    button(app, "Look at it").click().run()
    assert button(app, "Look at it").disabled
    job = registry.services().scans.find(key_of(folder))
    assert job is not None
    button(app, "Stop").click().run()
    assert job.wait(WAIT_S) and job.progress == ("reading images", 1200, 20_000)
    app.run()
    assert "The scan was stopped" in app.error[0].value and not button(app, "Look at it").disabled


def test_skipped_files_are_found_by_reason_and_name(store, folder):
    (folder / "dog" / "empty.png").write_bytes(b"")
    app = open_data(folder)
    job = look(app, folder)

    def files() -> list[str]:
        return list(next(frame.value for frame in app.dataframe if "Why" in frame.value)["File"])

    assert files() == ["cat/broken.jpg", "dog/empty.png"]
    app.multiselect(key=f"skipped_why_{job.number}").set_value(["zero_bytes"]).run()
    assert files() == ["dog/empty.png"]
    app.multiselect(key=f"skipped_why_{job.number}").set_value([]).run()
    app.text_input(key=f"skipped_text_{job.number}").set_value("BROKEN").run()
    assert files() == ["cat/broken.jpg"]


def test_samples_are_turned_page_by_page_and_a_lost_file_ends_nothing(store, folder):
    app = open_data(folder)
    job = look(app, folder)
    (folder / "cat" / "5.png").unlink()
    data_views._thumbnail.clear()
    app.selectbox(key=f"samples_class_{job.number}").set_value(0).run()
    assert not app.exception and "1 to 12 of 15" in texts(app)
    assert "can't be read any more" in texts(app)
    button(app, "Next").click().run()
    assert "13 to 15 of 15" in texts(app) and "can't be read" not in texts(app)
    app.segmented_control(key=f"samples_split_{job.number}").set_value("val").run()
    assert "13 to 15" not in texts(app) and "Training" not in texts(app)


def test_the_first_batch_is_shown_after_a_press(store, folder):
    app = open_data(folder)
    look(app, folder)
    button(app, "Show the first batch").click().run()
    assert not app.exception, app.exception
    [_, batch, pictures] = app.session_state["first_batch"]
    assert len(pictures) == 23 and batch.is_exact
    assert {label for _, label in batch.images} == {"cat", "dog"}


def test_a_hundred_thousand_images_of_five_thousand_classes_are_drawn(store, tmp_path):
    dataset = large_dataset(tmp_path)
    app = open_data(tmp_path)
    job = finished_job(key_of(tmp_path), dataset)
    registry.services().scans._jobs[job.key] = job
    app.run()
    assert not app.exception, app.exception
    assert next(item.value for item in app.metric if item.label == "Images") == "100,000"
    assert f"1 to {data_views.PER_PAGE} of 5,000" in texts(app)
    assert max(len(trace["x"]) for trace in json.loads(job.once(figures.classes_figure).to_json())["data"]) <= 2000


def large_dataset(root: Path, num: int = 100_000, num_classes: int = 5_000) -> Dataset:
    """Of files that aren't there, of many sizes, one of a hundred equal to another; 20,000 more are skipped."""
    generator = np.random.default_rng(0)
    sides = generator.integers(20, 5000, (num, 2)).tolist()
    items = []
    for number, (width, height) in enumerate(sides):
        name = f"class {number % num_classes}/{number}.jpg"
        digest = f"{number - (number % 100 == 1):064x}"
        items.append(Item(root / name, name, number % num_classes, digest, width, height))
    return Dataset(
        root,
        [f"class {label}" for label in range(num_classes)],
        items[: num * 8 // 10],
        items[num * 8 // 10 :],
        [],
        [Skipped(f"bad/{number}.jpg", "truncated") for number in range(20_000)],
        [f"notes/{number}.txt" for number in range(20_000)],
        [f"warning {number}" for number in range(50)],
    )


def finished_job(key: ScanKey, dataset: Dataset) -> ScanJob:
    job = ScanJob(key)
    job.dataset, job.state = dataset, "done"
    job.end()
    return job


# scans


def test_a_scan_of_equal_settings_is_joined_and_the_last_four_are_remembered(folder, tmp_path):
    scans = Scans(tmp_path)
    jobs = [scans.scan(key_of(folder, seed)) for seed in range(6)]
    assert all(job.wait(WAIT_S) for job in jobs)
    assert [job.state for job in jobs] == ["done"] * 6
    scans.scan(key_of(folder, 6)).wait(WAIT_S)
    found = [scans.find(key_of(folder, seed)) is not None for seed in range(7)]
    assert sum(found) == 4 and found[-1]


def test_a_running_scan_is_joined(folder, tmp_path, monkeypatch):
    go = threading.Event()
    monkeypatch.setattr(ScanJob, "run", lambda job, home, anew: go.wait(WAIT_S))
    scans = Scans(tmp_path)
    first, second = scans.scan(key_of(folder)), scans.scan(key_of(folder), anew=True)
    go.set()
    assert first is second and first.wait(WAIT_S)


def test_two_scans_of_one_spec_take_turns(folder, tmp_path, monkeypatch):
    at_once: list[int] = []
    most = []

    def run(job: ScanJob, home: Path, anew: bool) -> None:
        at_once.append(job.number)
        most.append(len(at_once))
        threading.Event().wait(0.05)
        at_once.remove(job.number)

    monkeypatch.setattr(ScanJob, "run", run)
    scans = Scans(tmp_path)
    jobs = [scans.scan(key_of(folder, seed)) for seed in range(3)]
    assert all(job.wait(WAIT_S) for job in jobs)
    assert most == [1, 1, 1]


def test_a_stopped_scan_says_so(folder, tmp_path, monkeypatch):
    def run(job: ScanJob, home: Path, anew: bool) -> None:
        job.stop()
        job.tell("reading images", 1, 2)

    monkeypatch.setattr(ScanJob, "run", run)
    job = Scans(tmp_path).scan(key_of(folder))
    assert job.wait(WAIT_S) and (job.state, job.problem) == ("failed", "The scan was stopped.")


def test_an_exception_that_nobody_foresaw_is_told_in_one_line_and_logged(folder, tmp_path, monkeypatch, caplog):
    def run(job: ScanJob, home: Path, anew: bool) -> None:
        raise ZeroDivisionError("a\nb")

    monkeypatch.setattr(ScanJob, "run", run)
    job = Scans(tmp_path).scan(key_of(folder))
    assert job.wait(WAIT_S) and job.state == "failed"
    assert job.problem == "The scan failed: ZeroDivisionError: a" and "Traceback" in caplog.text


def test_what_is_made_of_a_data_set_is_made_once(folder, tmp_path):
    job = finished_job(key_of(folder), scanned(folder, tmp_path))
    assert job.once(figures.classes_figure) is job.once(figures.classes_figure)


# the preview


RECIPES = [
    {"augmentation": "none"},
    {"augmentation": "crop", "color_jitter": 0.4},
    {"augmentation": "resized_crop", "auto_augment": "randaugment", "random_erasing": 0.5},
    {"augmentation": "flip", "cutmix": 1.0, "sampling": "balanced"},
    {"augmentation": "resized_crop", "mixup": 1.0},
]


@pytest.mark.parametrize("changes", RECIPES, ids=lambda changes: "-".join(map(str, changes.values())))
@pytest.mark.parametrize("most", [3, 32])
def test_the_preview_is_the_first_batch_of_the_run(folder, tmp_path, changes, most):
    config = make_config(
        data=str(folder), model="timm/test_resnet", weights="none", image_size=32, batch_size=8, device="cpu", **changes
    )
    with ExitStack() as resources:
        (tmp_path / "run").mkdir()
        prepared = prepare(
            config, open_it=CpuDevice, home=tmp_path, folder=tmp_path / "run", emit=lambda _: None, resources=resources
        )
        batches = prepared.task.train.epoch(1)
        trained = next(batches)
        batches.close()
    pixels = trained.images
    if trained.mix is not None:
        pixels = mix_images(pixels.float(), trained.mix).round().byte()
    preview = first_batch(scanned(folder, tmp_path), config, most)
    assert preview.is_exact and preview.batch_size == 8
    shown = np.stack([image for image, _ in preview.images])
    assert np.array_equal(shown, pixels[:most].permute(0, 2, 3, 1).numpy())
    if trained.mix is None:
        assert [label for _, label in preview.images] == [("cat", "dog")[i] for i in trained.labels[:most].tolist()]
    else:
        assert any(" + " in label for _, label in preview.images)


def test_a_lost_file_has_another_in_its_place(folder, tmp_path):
    dataset = scanned(folder, tmp_path)
    for item in dataset.train:
        if item.label == 0:
            item.path.unlink()
    config = make_config(model="timm/test_resnet", image_size=32, batch_size=8, augmentation="none")
    preview = first_batch(dataset, config, 3)
    assert [label for _, label in preview.images] == ["dog"] * 3 and preview.lost


def test_a_batch_too_large_for_a_look_says_so(folder, tmp_path, monkeypatch):
    monkeypatch.setattr("core.output.preview.MOST_BYTES", 1)
    config = make_config(model="timm/test_resnet", image_size=32, batch_size=8)
    preview = first_batch(scanned(folder, tmp_path), config, 4)
    assert (preview.is_exact, preview.batch_size, len(preview.images)) == (False, 4, 4)


def test_the_recipe_is_told_in_words():
    assert recipe_in_words(make_config(augmentation="none")) == []
    config = make_config(augmentation="resized_crop", mixup=0.2, auto_augment="randaugment", random_erasing=0.1)
    assert recipe_in_words(config) == [
        "mirror",
        "random resized crop (from 35% of the area)",
        "RandAugment (2 x 9)",
        "random erasing (10%)",
        "MixUp 0.2",
    ]


@pytest.mark.parametrize(
    ("shape", "expected"), [((28, 28), (140, 140)), ((300, 600), (80, 160)), ((1, 2000), (1, 160))]
)
def test_a_thumbnail_fits(tmp_path, shape, expected):
    path = tmp_path / "picture.png"
    Image.fromarray(np.random.default_rng(0).integers(0, 255, (*shape, 3), dtype=np.uint8)).save(path)
    with Image.open(io.BytesIO(thumbnail(path, 160))) as small:
        assert small.size == expected[::-1]


def test_a_thumbnail_of_a_lost_file_is_refused(tmp_path):
    with pytest.raises(DataError):
        thumbnail(tmp_path / "nothing.png", 160)


# figures and files


def test_many_classes_are_ranked(tmp_path):
    dataset = large_dataset(tmp_path, 2_000, 100)
    figure = figures.classes_figure(dataset)
    assert [trace.type for trace in figure.data] == ["scatter", "scatter"]
    assert figure.data[0].customdata[0] == "class 0"


def test_few_and_empty_classes_are_marked(tmp_path):
    items = [Item(tmp_path / f"{n}", f"{n}", 0 if n < 12 else 1, f"{n:064x}", 9, 9) for n in range(15)]
    table = figures.class_table(Dataset(tmp_path, ["a", "b", "c"], items, items[:1], []))
    assert table["Note"] == ["", "few", "none"]
    assert table["Images"].tolist() == [13, 3, 0]


def test_sizes_are_dots_or_a_grid_where_they_are_many(tmp_path):
    [grid] = figures.sizes_figure(large_dataset(tmp_path, 5_000, 10)).data
    assert grid.type == "heatmap" and grid.customdata.sum() == 5_000
    items = [Item(tmp_path, f"{n}", 0, f"{n}", 3 + n // 2, 5) for n in range(3)]
    [dots] = figures.sizes_figure(Dataset(tmp_path, ["a"], items, [], [])).data
    assert (list(dots.x), list(dots.y), list(dots.customdata)) == ([3, 4], [5, 5], [2, 1])
    assert figures.sizes_figure(Dataset(tmp_path, ["a"], items[:2], [], [])) is None


def test_sizes_in_words():
    one = np.array([28, 28])
    assert figures.sizes_in_words(one, one) == "All images have 28 x 28 pixels."
    told = figures.sizes_in_words(np.array([10, 20, 4000]), np.array([10, 30, 3000]))
    assert told == "Median 20 x 30 px, smallest 10 x 10, largest 4,000 x 3,000."
    assert "1 of 3 images are smaller and are enlarged" in figures.enlarged_in_words(
        np.array([100, 300, 500]), np.array([400, 300, 500]), 256, 224
    )


def test_the_report_names_every_file(folder, tmp_path):
    dataset = scanned(folder, tmp_path)
    rows = list(csv.DictReader(io.StringIO(figures.report_csv(dataset))))
    assert len(rows) == 31 and {row["outcome"] for row in rows} == {"used", "skipped", "ignored"}
    [skipped] = [row for row in rows if row["outcome"] == "skipped"]
    assert skipped == {"file": "cat/broken.jpg", "outcome": "skipped", "reason": "truncated", "split": "", "class": ""}
    assert len(json.loads(figures.report_json(dataset))["files"]) == 29


def test_equal_files_in_two_splits_or_classes_come_first(tmp_path):
    def item(name: str, label: int, digest: str) -> Item:
        return Item(tmp_path / name, name, label, digest, 9, 9)

    train = [item("a1", 0, "1"), item("a2", 0, "1"), item("a3", 0, "1"), item("b1", 1, "2"), item("b2", 1, "3")]
    val = [item("v1", 0, "2"), item("v2", 1, "3")]
    table = figures.duplicates_table(Dataset(tmp_path, ["a", "b"], train, val, []))
    assert table["Beware"] == ["two classes, two splits", "two splits", ""]
    assert table["Copies"] == [2, 2, 3]


def test_text_is_shown_as_it_is():
    assert data_views.escaped("a*b_[c]\n$d$ :dog:") == r"a\*b\_\[c\] \$d\$ \:dog\:"


# a run's page


def test_a_runs_page_says_what_its_data_were(store):
    run_id = store.create_run(make_config("quick"))
    store.claim(run_id, "cpu")
    store.run_folder(run_id).mkdir(parents=True, exist_ok=True)
    (store.run_folder(run_id) / "split.csv").write_text("split,class,file,sha256\n")
    data = {
        "found": 12,
        "used": {"train": 8, "val": 2},
        "skipped_by_reason": {"truncated": 1},
        "ignored": 1,
        "warnings": ["beware of this"],
        "hints": [],
    }
    events = [
        RunPrepared("cpu", "A CPU", ["cat", "dog"], 8, 2, 1, 1, 1, 64, data=data),
        ImageLost("cat/3.png", "it changed after it was read"),
        RunEnded("finished", 1.0, Phases(), 0, 0.0),
    ]
    store.append_events(run_id, [(float(at), event) for at, event in enumerate(events)])
    store.end_run(run_id, "finished")
    app = open_page("runs", run=run_id)
    said = texts(app).replace("\\", "")
    assert "Cat/3.png was lost: it changed after it was read" in said
    assert "1 damaged or cut off" in said and "Beware of this" in said
    assert next(item.value for item in app.metric if item.label == "Skipped") == "1"


def test_a_run_without_a_scan_says_so(store):
    assert "is not known" in texts(open_page("runs", run=add_run(store)))

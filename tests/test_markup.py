"""Names that hold markup are shown as text: on every page in a real browser, in figures, and in what is exported."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from core.__main__ import main
from core.config import make_config
from core.data.dataset import Dataset
from core.data.split import Item
from core.events import Phases, RunEnded
from core.output import data_figures as figures
from core.output.exports import export
from core.running.trainer import train_run
from core.store import Store
from core.words import escaped, visible
from tests.browser import chromium_page, dashboard
from tests.test_groups import tiny

pytestmark = pytest.mark.long

IMAGE = "<img src=x onerror=alert(1)>"
NAME = f"{IMAGE} <script>alert(2)</script> <b>qqbold</b> **qqstars** [qqlink](javascript:alert(3)) :red[qqred] $qqmath$"
ON_DISK = NAME.replace("/", "_")
UNSHOWN = re.compile(r"(?<!<b>)qqbold|(?<!\*\*)qqstars|(?<!\[)qqlink|(?<!:red\[)qqred|(?<!\$)qqmath")
"""A word of the name that has lost the signs before it: somebody read them as markup."""
UNSEEN = re.compile("[\x07\x1b\u202e]")
FROM_NAMES = "img[onerror], img[src='x'], a[href^='javascript'], [data-testid='stMarkdownContainer'] .katex"
SHOWN = """() => {
    const seen = [...document.querySelectorAll("#root *")].flatMap((element) => [...element.childNodes])
        .filter((node) => node.nodeType === Node.TEXT_NODE && !/^(script|style)$/i.test(node.parentNode.nodeName));
    const fields = [...document.querySelectorAll("input, textarea")].map((field) => field.value);
    return [...seen.map((node) => node.data), ...fields].join("\\n");
}"""


@pytest.fixture(scope="module")
def store(tmp_path_factory):
    """Two finished runs of data with such names and a group of them, a failed run, one made from another."""
    root = tmp_path_factory.mktemp("markup")
    opened = Store(root / "home")
    rng = np.random.default_rng(0)
    data = root / ON_DISK
    for label, name in enumerate((f"0 {ON_DISK}", f"1 {ON_DISK}")):
        (data / name).mkdir(parents=True)
        for number in range(12):
            pixels = rng.integers(100 * label, 100 * label + 100, (40, 40, 3), dtype=np.uint8)
            Image.fromarray(pixels).save(data / name / f"{number} {ON_DISK[:150]}.png")
    (data / f"0 {ON_DISK}" / f"broken {ON_DISK[:150]}.jpg").write_bytes(b"\xff\xd8\xff\xe0 no more")
    runs = [opened.create_run(tiny(data, seed=seed), name=f"{NAME} {seed}") for seed in range(2)]
    for run_id in runs:
        train_run(opened, run_id)
        assert opened.get_run(run_id).state == "finished"
        opened.set_note(run_id, f"note {NAME}")
        opened.set_tags(run_id, [f"tag {NAME}"])
    opened.groups.of_past_runs(
        NAME, [(run_id, f"{place} {NAME}", "warm") for place, run_id in enumerate(runs)], note=NAME
    )
    lost = opened.create_run(make_config("quick", model=NAME, data=NAME), name=NAME, forked_from=runs[0])
    opened.claim(lost, "cpu")
    ended = RunEnded("failed", 1.0, Phases(), 0, 0.0, reason=f"No {NAME}.", fix=f"Take {NAME}.")
    opened.append_events(lost, [(1.0, ended)])
    opened.end_run(lost, "failed")
    opened.create_run(tiny(data), name=f"waits {NAME}", own=True)
    yield opened
    opened.close()


class Walk:
    """A browser that notes every dialog, and looks at what each page made of the names."""

    def __init__(self, page: Any, url: str) -> None:
        self.page, self.url = page, url
        self.dialogs: list[str] = []
        page.on("dialog", self._note)

    def _note(self, dialog: Any) -> None:
        self.dialogs.append(dialog.message)
        dialog.dismiss()

    def go(self, path: str, until: str) -> None:
        self.page.goto(f"{self.url}/{path}")
        self.page.get_by_text(until).first.wait_for(timeout=60_000)
        self.look()

    def hover(self, mark: str) -> None:
        """Rest on a mark of a chart until it says what it is."""
        found = self.page.locator(mark).first
        found.evaluate("mark => mark.scrollIntoView({block: 'center'})")
        self.page.wait_for_timeout(300)
        box = found.bounding_box()
        self.page.mouse.move(box["x"] + box["width"] / 2 - 3, box["y"] + box["height"] / 2)
        self.page.mouse.move(box["x"] + box["width"] / 2, box["y"] + box["height"] / 2, steps=3)
        self.page.locator(".hoverlayer text").first.wait_for()
        self.look()

    def look(self) -> str:
        """All text of the page, which must hold the name as it is."""
        self.page.locator("[data-testid='stSkeleton']").first.wait_for(state="detached")
        self.page.wait_for_timeout(700)
        text = str(self.page.evaluate(SHOWN))
        assert self.dialogs == [] and self.page.locator(FROM_NAMES).count() == 0
        around = [text[max(0, found.start() - 60) : found.end() + 20] for found in UNSHOWN.finditer(text)]
        assert around == []
        assert "<b>qqbold" in text and IMAGE in text
        return text


@pytest.mark.browser
def test_no_page_reads_a_name_as_markup(store, monkeypatch):
    finished, failed = (
        [record.run_id for record in store.list_runs() if record.state == state] for state in ("finished", "failed")
    )
    group = store.groups.list_all()[0].group_id
    monkeypatch.setenv("FINETUNE_ROOTS", str(store.home.parent))
    with dashboard(store.home) as running, chromium_page() as page:
        walk = Walk(page, running.url)
        walk.go(f"live?run={finished[0]}", "Training loss")
        walk.go(f"live?run={failed[0]}", "Take ")
        walk.go(f"live?run={NAME.replace('#', '')}", "There is no run")
        walk.go(f"runs?run={failed[0]}", "Made from")
        walk.go(f"runs?run={NAME}", "Choose one from the table")
        walk.go(f"runs?run={finished[0]}", "Best top-1")
        for tab in ("Where the time went", "Data", "Config", "Environment"):
            page.get_by_role("tab", name=tab).click()
            walk.look()
        page.get_by_text("Name, note and tags").click()
        walk.look()
        page.get_by_role("button", name="Delete").first.click()
        page.get_by_role("button", name="Keep it").wait_for()
        walk.look()
        page.get_by_role("button", name="Keep it").click()
        page.get_by_role("button", name="Run again with changes").click()
        page.get_by_text("changes are marked").wait_for(timeout=60_000)
        walk.look()
        page.get_by_role("link", name="Data").first.click()
        page.get_by_role("button", name="Look at it").click()
        page.get_by_text("files found =").wait_for(timeout=60_000)
        walk.look()
        page.get_by_role("button", name="Show the first batch").click()
        page.get_by_text("px", exact=False).first.wait_for()
        walk.look()
        walk.hover(".js-plotly-plot .bars path")
        walk.go(f"timings?group={group}", "What limits the answer")
        walk.hover(".js-plotly-plot .scatterlayer path.point")


@pytest.mark.browser
def test_runs_side_by_side_and_a_group_of_them_read_no_name_as_markup(store):
    with dashboard(store.home) as running, chromium_page() as page:
        walk = Walk(page, running.url)
        walk.go("runs", "Select one run")
        box = page.locator("[data-testid='stDataFrame'] canvas").first.bounding_box()
        for row in (3, 4):
            page.mouse.click(box["x"] + 15, box["y"] + 17 + 35 * row)
        page.get_by_text("side by side").wait_for(timeout=30_000)
        walk.look()
        assert page.locator(".js-plotly-plot .legendtext").count() == 2


@pytest.mark.browser
@pytest.mark.parametrize("what", ["run", "group"])
def test_a_report_reads_no_name_as_markup(store, tmp_path, what):
    finished = [record.run_id for record in store.list_runs() if record.state == "finished"]
    name = finished[0] if what == "run" else store.groups.list_all()[0].group_id
    (tmp_path / "report.html").write_text(export(store, name, "html"), encoding="utf-8")
    dialogs: list[str] = []
    with chromium_page() as page:
        page.on("dialog", lambda dialog: (dialogs.append(dialog.message), dialog.dismiss()))
        page.goto((tmp_path / "report.html").as_uri())
        page.locator(".js-plotly-plot .main-svg").first.wait_for()
        text = page.evaluate(SHOWN.replace("#root *", "body *"))
        assert dialogs == [] and page.locator(FROM_NAMES).count() == 0
        assert UNSHOWN.search(text) is None and NAME in text


@pytest.mark.parametrize("what", ["run", "group", "failed"])
def test_markdown_for_a_readme_holds_names_as_text(store, what):
    states = {"run": "finished", "failed": "failed"}
    found = [record.run_id for record in store.list_runs() if record.state == states.get(what)]
    text = export(store, found[0] if found else store.groups.list_all()[0].group_id, "markdown")
    # what stands between backticks is shown as it is
    assert not re.search(r"(?<!\\)[<\[$*]|(?<!\\):red", re.sub(r"`[^`\n]*`", "", text))
    assert {"run": "`timm/test_resnet`", "failed": f"`{NAME}`", "group": escaped(NAME)}[what] in text


def test_no_figure_of_data_holds_a_tag(tmp_path):
    items = [Item(tmp_path / f"{n}", f"{n}", n % 2, f"{n:064x}", 9 + n, 9) for n in range(6)]
    few = Dataset(tmp_path, [f"0 {NAME}", f"1 {NAME}"], items, items[:1], [])
    many = Dataset(tmp_path, [f"{n} {NAME}" for n in range(100)], items, items[:1], [])
    for dataset in (few, many):
        told = figures.classes_figure(dataset).to_json().replace("<b>%{customdata}</b>", "")
        assert "<" not in told and "&lt;img" in told


def test_markdown_signs_are_escaped_one_by_one():
    assert escaped("&lt; <b> a\n- **x** $y$ :red[z]") == (
        r"\&lt; \<b\> a \- \*\*x\*\* \$y\$ \:red\[z\]"
    )  # fmt: skip


STEERING = "a\x1b[31mred\x07 \u202egpj.exe"
WRITTEN_OUT = r"a\x1b[31mred\x07 \u202egpj.exe"


def test_what_steers_a_terminal_or_turns_the_writing_is_written_out():
    assert visible(STEERING) == WRITTEN_OUT
    assert not UNSEEN.search(escaped(STEERING))
    # letters of other scripts stay, and so do the marks that they need
    assert visible("日本語 שלום\u200f ملف\tx") == "日本語 שלום\u200f ملف\tx"
    assert visible("two\nlines\r") == r"two\nlines\r"


def test_the_command_line_hands_no_name_to_the_terminal_as_it_is(tmp_path, capsys):
    rng = np.random.default_rng(0)
    for label in ("b", STEERING):
        (tmp_path / "data" / label).mkdir(parents=True)
        for number in range(12):
            pixels = rng.integers(0, 255, (40, 40, 3), dtype=np.uint8)
            Image.fromarray(pixels).save(tmp_path / "data" / label / f"{number}.png")
        (tmp_path / "data" / label / f"broken {STEERING}.jpg").write_bytes(b"\xff\xd8\xff\xe0 no more")
    home = str(tmp_path / "home")
    assert main(["--home", home, "scan", str(tmp_path / "data")]) == 0
    told = capsys.readouterr()
    assert not UNSEEN.search(told.out + told.err) and WRITTEN_OUT in told.out
    assert main(["--home", home, "scan", str(tmp_path / f"none {STEERING}")]) == 2
    told = capsys.readouterr()
    assert not UNSEEN.search(told.out + told.err) and WRITTEN_OUT in told.err


def test_the_name_of_this_test_has_what_it_needs():
    assert UNSHOWN.search(NAME) is None and len(Path(ON_DISK).name.encode()) < 200

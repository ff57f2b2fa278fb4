"""Long runs, many runs and long evenings: what the server does for them stays small."""

from __future__ import annotations

import json
import math
import random
import sqlite3
from pathlib import Path

import numpy as np
import pytest

from core.analysis.summary import list_rows, summarise
from core.charts import figures
from core.events import PhaseChanged, StepLogged, payload_of
from core.output.exports import export
from core.series import RunSeries
from core.storage import step_blocks
from core.storage.step_blocks import COLUMNS
from core.store import Store
from tests.browser import dashboard
from tests.long_runs import ServerTime, add_steps, begin, ended, epoch_ended, long_run, many_runs, step, tell
from tests.test_pages import open_page, pages_store
from tests.viewer import Viewer, server_of

pytestmark = pytest.mark.long

LONG = 1_000_000
MANY = 1_000


@pytest.fixture
def small_blocks(monkeypatch) -> int:
    """Blocks of 7 events, and 10 that are read at once."""
    monkeypatch.setattr(step_blocks, "BLOCK", 7)
    monkeypatch.setattr(step_blocks, "CHUNK", 10)
    return 7


def blocks_of(store: Store, run_id: str) -> list[tuple[str, int]]:
    rows = store.database.read("SELECT kind, count FROM step_blocks WHERE run_id = ? ORDER BY first_event", (run_id,))
    return [(row["kind"], row["count"]) for row in rows]


def from_events(store: Store, run_id: str, kind: str, after: int = 0) -> dict[str, list]:
    """What `Store.columns` has to give, by the events alone."""
    events = store.events(run_id, after=after, kinds=[kind])
    own = {"id": [event.id for event in events], "at": [event.at for event in events]}
    return {name: own[name] if name in own else [event.payload[name] for event in events] for name in COLUMNS[kind]}


def as_lists(columns: dict[str, np.ndarray]) -> dict[str, list]:
    return {name: [None if math.isnan(value) else value for value in columns[name].tolist()] for name in columns}


# -- blocks ---------------------------------------------------------------------------------------------------------


def test_blocks_hold_to_the_last_digit_what_the_events_hold(store: Store, small_blocks: int):
    draw = random.Random(0)
    mine, other = begin(store), begin(store)
    number = 0
    for size in (1, 3, 20, 0, 6, 1, 41, 7):
        told = []
        for _ in range(size):
            number += 1
            loss = draw.choice([draw.random(), math.nan, 1e-05, 1e300, 5e-324, 0.1 + 0.2])
            rate = draw.choice([None, draw.random() * 1e4])
            told.append(StepLogged(number, 1, loss, draw.random(), draw.random() * 1e-7, 32, 0.5, 0.1, rate, 0))
            told.append(PhaseChanged("training"))
        tell(store, mine, *told)
        tell(store, other, *told[:1], epoch_ended(number + 1, number))
    assert blocks_of(store, mine) == [("StepLogged", 7)] * 11 and blocks_of(store, other) == [
        ("StepLogged", 7),
        ("EpochEnded", 7),
    ]
    for run_id in (mine, other):
        for after in [0, *(event.id for event in store.events(run_id))]:
            for kind in ("StepLogged", "EpochEnded"):
                assert as_lists(store.columns(run_id, kind, after=after)) == from_events(store, run_id, kind, after)
    assert as_lists(store.columns_of_all([other, mine], "EpochEnded")[other]) == from_events(store, other, "EpochEnded")


def test_an_ended_run_lies_in_blocks_and_goes_on_in_them_when_it_is_taken_up_again(store: Store, small_blocks: int):
    run_id = begin(store)
    tell(store, run_id, *map(step, range(1, 10)))
    assert blocks_of(store, run_id) == [("StepLogged", 7)]
    store.end_run(run_id, "stopped")
    assert blocks_of(store, run_id) == [("StepLogged", 7), ("StepLogged", 2)]
    # by another process
    with_it = Store(store.home)
    tell(with_it, run_id, *map(step, range(8, 17)), epoch_ended(1, 16))
    with_it.end_run(run_id, "finished")
    with_it.close()
    assert blocks_of(store, run_id) == [("StepLogged", n) for n in (7, 2, 7, 2)] + [("EpochEnded", 1)]
    assert as_lists(store.columns(run_id, "StepLogged")) == from_events(store, run_id, "StepLogged")


def test_a_transaction_that_is_undone_leaves_neither_events_nor_blocks(store: Store, small_blocks: int):
    run_id = begin(store)
    tell(store, run_id, *map(step, range(1, 6)))

    def fail() -> None:
        with store.database.write() as db:
            db.execute("INSERT INTO events (run_id, kind, at, payload) VALUES (?, 'StepLogged', 0, '{}')", (run_id,))
            store._blocks.follow(db, run_id, ["StepLogged"] * 9)
            raise RuntimeError("the disk is gone")

    with pytest.raises(RuntimeError, match="the disk is gone"):
        fail()
    assert blocks_of(store, run_id) == []
    tell(store, run_id, step(6))
    assert blocks_of(store, run_id) == []
    tell(store, run_id, *map(step, range(7, 16)))
    assert blocks_of(store, run_id) == [("StepLogged", 7)] * 2
    assert store.columns(run_id, "StepLogged")["step"].tolist() == list(range(1, 16))


def test_a_deleted_run_takes_its_blocks_along(store: Store, small_blocks: int):
    run_id = begin(store)
    tell(store, run_id, *map(step, range(1, 16)))
    store.end_run(run_id, "finished")
    store.delete(run_id)
    assert store.database.read("SELECT * FROM step_blocks") == []
    assert store.columns(run_id, "StepLogged")["id"].size == 0


def test_a_run_from_before_there_were_blocks_is_read_and_gets_them_bit_by_bit(store: Store, small_blocks: int):
    run_id = begin(store)
    tell(store, run_id, *map(step, range(1, 51)))
    with store.database.write() as db:
        db.execute("DELETE FROM step_blocks")
    store = Store(store.home)
    series = RunSeries(store, run_id)
    series.update()
    assert series.steps["step"] == list(range(1, 51)) and blocks_of(store, run_id) == []
    for number in range(51, 55):
        tell(store, run_id, step(number))
    assert blocks_of(store, run_id) == [("StepLogged", 7)] * 4
    store.end_run(run_id, "finished")
    assert as_lists(store.columns(run_id, "StepLogged")) == from_events(store, run_id, "StepLogged")
    store.close()


def test_exports_hold_every_step_of_a_run_that_is_read_bit_by_bit(store: Store, monkeypatch):
    monkeypatch.setattr("core.analysis.tables.PIECE", 1000)
    run_id = begin(store)
    steps = [step(number) for number in range(1, 11_001)]
    tell(store, run_id, *steps, epoch_ended(1, 11_000), *map(step, range(10_990, 11_003)))
    told = [payload_of(one) for one in steps] + [payload_of(step(number)) for number in range(10_990, 11_003)]
    assert json.loads(export(store, run_id, "json"))["steps"] == told
    lines = export(store, run_id, "csv").splitlines()
    assert len(lines) == 1 + len(told) + 1 and lines[11_001].startswith("epoch,1,11000,")
    table = export(store, run_id, "csv", "steps").splitlines()
    assert len(table) == 1 + 11_002 and table[-1].split(",")[3] == "11002"


# -- a run of a million logged steps --------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def long_home(tmp_path_factory) -> tuple[Path, str]:
    home = tmp_path_factory.mktemp("long")
    store = Store(home)
    # about as many looks at the machine as there are seconds in it
    run_id = long_run(store, LONG, samples=1000)
    store.close()
    return home, run_id


def check_opening(home: Path, run_id: str) -> RunSeries:
    """Open a run in a store of its own, which knows nothing yet."""
    store = Store(home)
    read: list[str] = []
    store.database.reader.set_trace_callback(read.append)
    with ServerTime() as opening:
        series = RunSeries(store, run_id)
        series.update()
        sent = series.since("")
        figures(series)
    assert opening.seconds < 1
    assert len(json.dumps(sent)) < 200_000
    read.clear()
    with ServerTime() as summing:
        summary = summarise(store, run_id)
    assert summing.seconds < 1
    assert summary["machine"]["samples"] == 20_000 and len(summary["epochs"]) == 20
    assert not [query for query in read if "StepLogged" in query]
    store.close()
    return series


def test_a_run_of_a_million_steps_opens_within_a_second_while_it_goes_on_when_resumed_and_when_ended(long_home):
    home, run_id = long_home
    series = check_opening(home, run_id)
    assert series.steps["step"][-1] == LONG and len(series.steps["step"]) <= 2048

    store = Store(home)
    cursor = series.since("")["cursor"]
    add_steps(store, run_id, LONG + 1, LONG + 20, 20)
    series._store = store
    with ServerTime() as polling:
        series.update()
        sent = series.since(cursor)
    assert polling.seconds < 0.1 and not sent["whole"] and len(json.dumps(sent)) < 1000

    # it is taken up again from a state before, and goes over some steps again
    add_steps(store, run_id, LONG - 5000, LONG + 5000, 20)
    resumed = check_opening(home, run_id)
    series.update()
    assert series.steps == resumed.steps and resumed.steps["step"][-1] == LONG + 5000

    tell(store, run_id, ended())
    store.end_run(run_id, "finished")
    store.close()
    steps = check_opening(home, run_id).steps
    assert len(steps["step"]) <= 2048 and steps["step"] == sorted(set(steps["step"]))
    assert (steps["step"][0], steps["step"][-1]) == (1, LONG + 5000)
    assert (min(steps["loss"]), max(steps["loss"])) == (1.0, 1.999)


# -- a thousand runs ------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def many_home(tmp_path_factory) -> Path:
    home = tmp_path_factory.mktemp("many")
    store = Store(home)
    many_runs(store, MANY)
    store.close()
    return home


def test_a_thousand_runs_are_listed_within_half_a_second(many_home: Path):
    store = Store(many_home)
    with ServerTime() as listing:
        rows = list_rows(store)
    assert listing.seconds < 0.5
    assert len(rows) == MANY and [row["run_id"] for row in rows] == [run.run_id for run in store.list_runs()]
    for row in (rows[0], rows[-1]):
        summary = summarise(store, row["run_id"])
        assert row["val_top1"] == [epoch["val_top1"] for epoch in summary["epochs"]] == [40.0 + n for n in range(1, 21)]
        assert (row["best_val_top1"], row["total_s"]) == (60.0, summary["total_s"])
        assert (row["device"], row["model"]) == ("cpu", summary["config"]["model"])
    store.close()


def test_the_runs_page_draws_a_thousand_runs_within_half_a_second(many_home: Path, monkeypatch):
    store = pages_store(many_home, monkeypatch)
    app = open_page("runs")
    took = []
    for _ in range(3):
        with ServerTime() as drawing:
            app.run()
        assert not app.exception and len(app.dataframe[0].value) == MANY
        took.append(drawing.seconds)
    assert min(took) < 0.5
    store.close()


def test_runs_are_listed_as_they_were_made_although_the_clock_was_put_back(store: Store, monkeypatch):
    first = begin(store)
    monkeypatch.setattr("core.store.time.time", lambda: 1e9)
    second = begin(store)
    assert [run.run_id for run in store.list_runs()] == [second, first]
    assert [row["run_id"] for row in list_rows(store)] == [second, first] and store.newest_run_id() == second
    assert store.list_runs()[0].created < store.list_runs()[1].created


def test_a_run_that_is_known_already_is_read_anew_when_it_has_changed(store: Store):
    run_id = begin(store)
    known = store.get_run(run_id)
    assert store.get_run(run_id) is known and store.list_runs()[0] is known
    another = Store(store.home)
    another.rename(run_id, "another name")
    another.close()
    assert store.get_run(run_id).name == "another name"


# -- a long evening -------------------------------------------------------------------------------------------------


def test_the_server_does_not_grow_while_the_live_page_is_refreshed(tmp_path: Path):
    home = tmp_path / "home"
    store = Store(home)
    run_id = long_run(store, 20_000)
    with dashboard(home) as app, Viewer(app.url, run_id) as viewer:
        server = server_of(app.url)
        number = 20_000

        def look(times: int) -> int:
            nonlocal number
            most = 0
            for _ in range(times):
                number += 1
                tell(store, run_id, step(number))
                sent, size = viewer.poll()
                viewer.refresh()
                most = max(most, 0 if sent["whole"] else size)
            assert sent["steps"]["values"]["step"][-1] == number
            return most

        # the libraries are loaded meanwhile
        quiet = 0
        while quiet < 3:
            before = server.memory_info().rss
            look(20)
            quiet = quiet + 1 if server.memory_info().rss < before + 1e6 else 0
        before = server.memory_info().rss
        most = look(200)
        assert server.memory_info().rss - before < 10e6
        assert most < 1000
    store.close()


def test_a_store_of_the_schema_before_gets_room_for_blocks_of_each_kind(tmp_path: Path):
    from core.migrations import MIGRATIONS

    old = sqlite3.connect(tmp_path / "runs.sqlite")
    old.executescript(";".join(MIGRATIONS[:3]) + "; PRAGMA user_version = 3;")
    old.close()
    store = Store(tmp_path)
    run_id = begin(store)
    tell(store, run_id, step(1), epoch_ended(1, 1))
    store.end_run(run_id, "finished")
    assert sorted(blocks_of(store, run_id)) == [("EpochEnded", 1), ("StepLogged", 1)]
    store.close()

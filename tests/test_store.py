"""The store keeps runs, events and requests, whoever asks and whoever dies."""

from __future__ import annotations

import json
import sqlite3
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from core.config import make_config
from core.errors import StoreError
from core.events import PhaseChanged
from core.migrations import MIGRATIONS
from core.store import Store


def test_a_run_is_read_back_as_it_was_queued(store: Store):
    config = make_config("quick", lr=0.5)
    record = store.get_run(store.create_run(config))
    assert (record.state, record.config) == ("queued", config)


def test_the_same_token_makes_one_run_from_many_threads(store: Store):
    others = [Store(store.home) for _ in range(4)]
    ids: list[str] = []
    threads = [
        threading.Thread(target=lambda s=s: ids.append(s.create_run(make_config(), request_token="t")))  # type: ignore[misc]
        for s in others
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for other in others:
        other.close()
    assert len(ids) == 4 and len(set(ids)) == 1
    assert len(store.list_runs()) == 1


def test_one_device_trains_one_run_at_a_time(store: Store):
    first, second = store.create_run(make_config()), store.create_run(make_config())
    assert store.claim(first, "cpu")
    assert not store.claim(second, "cpu")
    store.end_run(first, "finished")
    assert store.claim(second, "cpu")


def test_a_claimed_run_can_not_be_claimed_again(store: Store):
    run_id = store.create_run(make_config())
    store.claim(run_id, "cpu")
    with pytest.raises(StoreError, match="not queued"):
        store.claim(run_id, "cuda")


def test_events_come_back_in_order_and_after_a_cursor(store: Store):
    run_id = store.create_run(make_config())
    store.append_events(run_id, [(1.0, PhaseChanged("training", 1)), (2.0, PhaseChanged("validating", 1))])
    first, second = store.events(run_id)
    assert (first.payload["phase"], second.at) == ("training", 2.0)
    assert store.events(run_id, after=first.id) == [second]


def test_a_request_is_handed_out_once(store: Store):
    run_id = store.create_run(make_config())
    store.claim(run_id, "cpu")
    store.request(run_id, "stop")
    assert store.take_requests(run_id) == [("stop", {})]
    assert store.take_requests(run_id) == []


def test_stopping_a_queued_run_ends_it_at_once(store: Store):
    run_id = store.create_run(make_config())
    store.request(run_id, "stop")
    assert store.get_run(run_id).state == "stopped"


def test_an_active_run_is_not_deleted_and_an_ended_one_is(store: Store):
    run_id = store.create_run(make_config())
    with pytest.raises(StoreError, match="still active"):
        store.delete(run_id)
    store.end_run(run_id, "stopped")
    store.run_folder(run_id).mkdir(parents=True)
    store.delete(run_id)
    assert store.list_runs() == [] and not store.run_folder(run_id).exists()


def test_a_run_of_a_killed_process_is_interrupted_and_keeps_its_events(store: Store):
    run_id = store.create_run(make_config())
    script = (
        "import sys, os, signal; from pathlib import Path; from core.store import Store\n"
        "from core.events import PhaseChanged\n"
        "s = Store(Path(sys.argv[1])); s.claim(sys.argv[2], 'cpu')\n"
        "s.append_events(sys.argv[2], [(1.0, PhaseChanged('training', 1))]); os.kill(os.getpid(), signal.SIGKILL)"
    )
    subprocess.run([sys.executable, "-c", script, str(store.home), run_id], cwd=Path(__file__).parents[1], check=False)
    assert store.get_run(run_id).state == "running"
    assert store.recover() == [run_id]
    assert store.get_run(run_id).state == "interrupted"
    assert [event.kind for event in store.events(run_id)] == ["PhaseChanged", "RunEnded"]
    assert store.events(run_id)[-1].payload["reason"] == "The process that trained this run is gone."
    assert store.recover() == [] and len(store.events(run_id)) == 2
    assert store.claim(store.create_run(make_config()), "cpu")


def test_several_processes_may_open_a_new_store_at_once(tmp_path: Path):
    script = "import sys; from pathlib import Path; from core.store import Store; Store(Path(sys.argv[1])).list_runs()"
    command = [sys.executable, "-c", script, str(tmp_path / "new")]
    processes = [subprocess.Popen(command, cwd=Path(__file__).parents[1]) for _ in range(4)]
    assert [process.wait() for process in processes] == [0, 0, 0, 0]


def test_a_home_that_is_no_folder_is_told_in_one_line(tmp_path: Path):
    (tmp_path / "home").write_text("a file")
    with pytest.raises(StoreError, match="can't be used: File exists"):
        Store(tmp_path / "home")


def test_a_database_that_is_none_is_told_in_one_line(tmp_path: Path):
    (tmp_path / "runs.sqlite").write_text("no database, but words, and enough of them" * 10)
    with pytest.raises(StoreError, match="can't be used: file is not a database"):
        Store(tmp_path)


def test_a_store_of_the_first_schema_is_brought_up_to_date_with_its_runs(tmp_path: Path):
    database = sqlite3.connect(tmp_path / "runs.sqlite")
    database.executescript(MIGRATIONS[0])
    database.execute("PRAGMA user_version = 1")
    # what later options there are was not written down then
    database.execute(
        "INSERT INTO runs (run_id, name, state, config, created) VALUES ('old', 'An old run', 'finished', ?, 1.0)",
        (json.dumps({"epochs": 2}),),
    )
    database.commit()
    database.close()
    store = Store(tmp_path)
    record = store.get_run("old")
    assert (record.config.epochs, record.config.process, record.purpose) == (2, "shared", "train")
    assert store.groups.list_all() == [] and store.groups.of_past_runs("By hand", [("old", "a", "")])
    store.close()

"""The queue: who may begin, in which order, and how people change that."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import pytest

from core.__main__ import main
from core.analysis.comparison import compare
from core.analysis.repeats import group_of
from core.analysis.summary import summarise
from core.config import make_config
from core.errors import StoreError
from core.events import MachineSampled, StepLogged
from core.running.waiting import (
    COMPARED,
    DEFAULT_GIB,
    NEXT,
    PROBE,
    ActiveRun,
    Look,
    WaitingRun,
    entries_of,
    judge,
    look_at,
    take_out,
)
from core.storage.burial import last_words, log_head, log_of, oom_kills
from core.storage.records import PlannedRun
from core.store import Store
from tests.test_pages import add_run, button, open_page, pages_store

pytestmark = pytest.mark.long

ROOT = Path(__file__).parents[1]


def waits(name: str, kind: str | None = "cpu", **more) -> WaitingRun:
    return WaitingRun(f"run-{name}", name, kind, **more)


def trains(name: str, kind: str = "cpu", **more) -> ActiveRun:
    return ActiveRun(f"run-{name}", name, kind, **more)


def verdicts(waiting: list[WaitingRun], active: list[ActiveRun], free_gib: float = 100.0, **more):
    return judge(Look(waiting, active, free_gib), **more)


def processes(waiting: list[WaitingRun], active: list[ActiveRun], **more) -> list[str]:
    return [verdict.process for verdict in verdicts(waiting, active, **more)]


def words(waiting: list[WaitingRun], active: list[ActiveRun], **more) -> list[str]:
    return [verdict.words for verdict in verdicts(waiting, active, **more)]


def test_the_first_in_the_queue_trains_in_this_process_and_the_next_on_its_device_waits():
    first, second = verdicts([waits("a"), waits("b")], [])
    assert (first.process, first.words) == ("shared", "")
    assert (second.process, second.words) == ("", "Waits for device cpu: 'a' trains on it.")


def test_a_run_on_another_device_begins_beside_it_in_a_process_of_its_own_and_overtakes():
    queue = [waits("b"), waits("c", "cuda"), waits("d", "cuda")]
    assert processes(queue, [trains("a", is_here=True)]) == ["", "own", ""]


def test_beside_runs_of_other_processes_one_trains_in_this_process():
    assert processes([waits("b", "cuda")], [trains("a", is_here=False)]) == ["shared"]


@pytest.mark.parametrize("timed", [PROBE, "a warm-up run", COMPARED])
def test_a_timed_run_waits_till_it_is_alone_and_nothing_overtakes_it_or_begins_beside_it(timed: str):
    queue = [waits("timed", "cuda", timed=timed), waits("c", "xla")]
    first, second = words(queue, [trains("a")])
    assert first == f"Waits until 'a' has ended: {timed} is timed, so it runs alone."
    assert second == f"Waits behind {PROBE if timed == PROBE else repr('timed')}, which nothing may overtake."
    begins, waits_now = verdicts(queue, [])
    assert begins.process == "shared" and waits_now.words.endswith(f"{timed} is timed, so it runs alone.")
    assert processes([waits("c", "xla")], [trains("timed", "cuda", timed=timed)]) == [""]


def test_memory_is_asked_for_only_beside_others_and_told_with_where_the_figure_is_from():
    big = waits("big", "cuda", needs_gib=6.0)
    assert processes([big], [], free_gib=1.0) == ["shared"]
    [assumed] = words([big], [trains("a")], free_gib=5.0)
    assert assumed == (
        "Waits for memory: it may need 6.0 GiB, which is assumed, as none like it was measured, and 5.0 GiB are free "
        "beside 'a'."
    )
    [measured] = words([replace(big, is_measured=True)], [trains("a")], free_gib=5.0)
    assert "as much as a run like it took" in measured
    assert processes([big], [trains("a", is_here=True)], free_gib=6.5) == ["own"]


def test_what_others_have_not_taken_yet_is_not_free():
    [told] = words([waits("b", "cuda", needs_gib=3.0)], [trains("a", still_gib=4.0)], free_gib=6.0)
    assert "2.0 GiB are free" in told
    queue = [waits("b", "cuda", needs_gib=3.0), waits("c", "xla", needs_gib=3.0)]
    assert [bool(text) for text in words(queue, [trains("a")], free_gib=5.0)] == [False, True]


def test_a_run_that_waits_for_memory_is_not_overtaken():
    queue = [waits("big", "cuda", needs_gib=9.0), waits("small", "xla", needs_gib=1.0)]
    first, second = words(queue, [trains("a")], free_gib=5.0)
    assert first.startswith("Waits for memory") and second == "Waits behind 'big', which nothing may overtake."


def test_on_request_all_have_a_process_of_their_own_but_repeats_that_have_to_share_one():
    assert processes([waits("a")], [], own=True) == ["own"]
    assert processes([waits("a", timed=PROBE)], [], own=True) == ["own"]
    assert processes([waits("a", timed=COMPARED)], [], own=True) == ["shared"]
    assert processes([waits("a", timed=COMPARED, process="own")], [], own=True) == ["own"]
    assert processes([waits("a", process="own")], []) == ["own"]


def test_a_device_that_this_process_holds_is_trained_on_here_and_others_leave_room_for_it():
    held = {"only_here": {"xla"}}
    assert processes([waits("a"), waits("b", "xla")], [], **held) == ["own", "shared"]
    [told] = words([waits("b", "xla")], [trains("a", is_here=True)], **held)
    assert told == "Waits for 'a': this process holds the device, and trains one run at a time."
    assert processes([waits("a", timed=COMPARED)], [], **held) == ["shared"]


def test_a_run_whose_device_can_not_be_had_begins_at_once_to_tell_so():
    assert processes([waits("a", None)], [trains("b", is_here=True)]) == ["own"]


def queued(store: Store, *names: str) -> list[str]:
    return [store.create_run(make_config("quick", device="cpu"), name=name) for name in names]


def order(store: Store) -> list[str]:
    return [record.name for record in store.waiting_runs()]


def test_waiting_runs_are_moved_and_only_those_that_wait(store: Store):
    a, b, c = queued(store, "a", "b", "c")
    store.move(c, "first")
    assert order(store) == ["c", "a", "b"]
    store.move(c, "down")
    store.move(b, "up")
    assert order(store) == ["a", "b", "c"]
    store.move(a, "up")
    store.move(c, "down")
    assert order(store) == ["a", "b", "c"]
    queued(store, "d")
    assert order(store) == ["a", "b", "c", "d"]
    store.claim(a, "cpu")
    for nobody in (a, "no-such-run"):
        with pytest.raises(StoreError, match="doesn't wait"):
            store.move(nobody, "first")
    kept = store.create_run(make_config("quick"), own=True)
    with pytest.raises(StoreError, match="doesn't wait"):
        store.move(kept, "first")


def test_a_run_that_is_taken_up_again_stands_before_all_others(store: Store):
    a, b, c = queued(store, "a", "b", "c")
    store.move(c, "first")
    store.request(b, "stop")
    store.requeue(b)
    assert order(store) == ["b", "c", "a"]
    store.move(a, "first")
    assert order(store) == ["a", "b", "c"]


def test_a_probe_is_not_seen_and_moves_go_past_it(store: Store):
    a, b = queued(store, "a", "b")
    store.create_run(make_config("quick", device="cpu"), name="probe", purpose="probe")
    [c] = queued(store, "c")
    assert [entry.name for entry in entries_of(store)] == ["a", "b", "c"]
    store.move(c, "up")
    assert order(store) == ["a", "c", "b", "probe"]
    store.move(b, "first")
    assert [entry.name for entry in entries_of(store)] == ["b", "a", "c"]
    assert a in [record.run_id for record in store.waiting_runs()]


def compared(store: Store, count: int = 3) -> str:
    runs = [PlannedRun(make_config("quick", device="cpu"), "a", "warm", number) for number in range(count)]
    return store.groups.create("Mine", runs, plan={})


def test_the_runs_of_a_comparison_stand_and_move_together_in_their_order(store: Store):
    queued(store, "a")
    group_id = compared(store)
    [_, b] = queued(store, "x", "b")
    before = order(store)
    store.move(b, "up")
    store.move(b, "up")
    assert order(store) == ["a", "b", *before[1:4], "x"]
    store.move(store.groups.get(group_id).members[1].run_id, "first")
    assert order(store) == [*before[1:4], "a", "b", "x"]
    assert [(entry.entry_id == group_id, len(entry.runs)) for entry in entries_of(store)] == [
        (True, 3), (False, 1), (False, 1), (False, 1),
    ]  # fmt: skip
    assert take_out(store, store.groups.get(group_id).members[0].run_id) == 1
    assert take_out(store, group_id) == 2
    assert order(store) == ["a", "b", "x"]
    assert [member.state for member in store.groups.get(group_id).members] == ["stopped"] * 3
    with pytest.raises(StoreError, match="doesn't wait"):
        take_out(store, group_id)


def test_a_run_is_taken_out_by_stopping_it(store: Store):
    [a] = queued(store, "a")
    assert take_out(store, a) == 1 and store.get_run(a).state == "stopped"


def test_each_entry_says_what_it_waits_for(store: Store):
    assert entries_of(store) == []
    queued(store, "a")
    assert [entry.waits_for for entry in entries_of(store)] == [NEXT]
    going = store.create_run(make_config("quick", device="cpu"), name="going")
    store.claim(going, "cpu")
    compared(store)
    told = [entry.waits_for for entry in entries_of(store)]
    assert told == [
        "Waits for device cpu: 'going' trains on it.",
        "Waits until 'going' has ended: a run of a comparison is timed, so it runs alone.",
    ]


def test_memory_is_what_a_run_like_it_took_at_the_most(store: Store):
    config = make_config("quick", device="cpu")
    going, earlier, other = (store.create_run(config) for _ in range(3))
    for run_id, kind, gib in ((earlier, "cpu", 2.5), (other, "cuda", 9.0)):
        store.claim(run_id, kind)
        samples = [(time.time(), MachineSampled(own_memory_gib=value)) for value in (1.0, gib, None)]
        store.append_events(run_id, samples)
        store.end_run(run_id, "finished")
    store.claim(going, "xla")
    store.create_run(config)
    store.create_run(config.model_copy(update={"batch_size": 8}))
    store.create_run(config, purpose="probe")
    look = look_at(store)
    assert [(run.needs_gib, run.is_measured) for run in look.waiting] == [
        (2.5, True), (DEFAULT_GIB, False), (0.0, False),
    ]  # fmt: skip
    [active] = look.active
    assert active.is_here and active.still_gib == 9.0 and look.free_gib > 0
    store.beat(going, {"phase": "training", "step": 1})
    assert look_at(store).active[0].still_gib == 0.0


def test_runs_that_had_company_are_told_with_its_name(store: Store):
    a, b, c = queued(store, "a", "b", "c")
    store.claim(a, "cpu")
    store.claim(b, "cuda")
    store.end_run(b, "finished")
    store.claim(c, "xla")
    assert [[other["name"] for other in summarise(store, one)["company"]] for one in (a, b, c)] == [
        ["b", "c"], ["a"], ["a"],
    ]  # fmt: skip
    told = [{**summarise(store, add_run(store)), "company": company} for company in ([], [{"name": "b"}])]
    warnings = compare(group_of("g", told, ["one", "one"], ["warm", "warm"]))["warnings"]
    assert any("1 repeat shared the machine with other runs: b." in warning for warning in warnings)


def test_the_last_words_of_a_dead_process_add_up_and_say_what_is_known(tmp_path: Path):
    epoch = {"phases": {"setup_s": 1.0, "compute_s": 4.0}, "earlier": {"compute_s": 1.5}, "compile_count": 2}
    ended = last_words([epoch], seconds=10.0)
    assert ended.phases.total_s() == ended.total_s == 10.0 and ended.phases.compute_s == 2.5
    assert ended.reason == "The process that trained this run is gone." and "If memory ran out" in ended.fix
    full = last_words([], seconds=1.0, how="was ended by SIGKILL", ran_out=True, log="a log")
    assert "memory ran out" in full.reason and full.fix.startswith("Choose a smaller") and full.traceback == "a log"
    (tmp_path / "process.log").write_text(f"a warning of the loader\n{log_head(77)}it fell")
    assert log_of(tmp_path, 77).endswith("it fell") and log_of(tmp_path, 78) == "" == log_of(tmp_path / "no", 77)
    (tmp_path / "vmstat").write_text("nr_free 5\noom_kill 3\n")
    assert oom_kills(tmp_path) == 3 and oom_kills(tmp_path / "no") is None


def command(home: Path, *asked: str) -> subprocess.CompletedProcess:
    line = [sys.executable, "-m", "core", "--home", str(home), *asked]
    return subprocess.run(line, cwd=ROOT, capture_output=True, text=True, timeout=120, check=False)


def test_the_command_line_lists_moves_and_takes_out(store: Store, capsys: pytest.CaptureFixture[str]):
    def asked(*words_given: str) -> tuple[int, str, str]:
        status = main(["--home", str(store.home), *words_given])
        return status, *capsys.readouterr()

    a, b = queued(store, "a", "b")
    listed = json.loads(asked("queue", b, "--first", "--json")[1])
    assert [entry["run_ids"] for entry in listed["queue"]] == [[b], [a]] and listed["active"] == []
    assert listed["queue"][1]["waits_for"] == "Waits for device cpu: 'b' trains on it."
    assert asked("queue", b, "--remove") == (0, f"{a}  waits     a for cpu: {NEXT}\n", "")
    assert store.get_run(b).state == "stopped"
    store.claim(a, "cpu")
    assert asked("queue") == (0, f"{a}  running   a  on cpu\n", "")
    for words_given, problem in ((["queue", b, "--up"], f"{b} doesn't wait."), (["queue", "--up"], "Which run")):
        status, _, refused = asked(*words_given)
        assert status == 2 and refused.startswith(problem)


def test_the_command_line_stops_a_waiting_run_without_waiting_for_an_answer(store: Store):
    [a] = queued(store, "a")
    began = time.monotonic()
    told = command(store.home, "control", a, "--stop")
    assert (told.returncode, told.stdout.strip()) == (0, "The run is stopped.") and time.monotonic() - began < 14
    refused = command(store.home, "control", a, "--stop", "--free")
    assert refused.returncode == 2 and refused.stderr.startswith("--free says how to pause.")


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    opened = pages_store(tmp_path / "pages", monkeypatch)
    yield opened
    opened.close()


def texts(app) -> str:
    return " ".join(item.value for item in (*app.markdown, *app.caption)).replace("\\", "")


def titles(app) -> list[str]:
    return [item.label for item in app.expander if item.label.startswith("Queue")]


def test_the_live_page_shows_what_waits_and_its_buttons_change_the_order(home: Store):
    [going] = queued(home, "going")
    home.claim(going, "cpu")
    a, b = queued(home, "a", "b")
    group_id = compared(home)
    app = open_page("live")
    assert "Queue: 5 runs wait" in titles(app) and "Waits for device cpu: 'going' trains on it." in texts(app)
    assert app.button(key=f"queue_up_{a}").disabled and app.button(key=f"queue_down_{group_id}").disabled
    app.button(key=f"queue_first_{b}").click().run()
    assert order(home)[:2] == ["b", "a"]
    app.button(key=f"queue_up_{group_id}").click().run()
    assert [entry.name for entry in entries_of(home)] == ["b", "Mine", "a"]
    app.button(key=f"queue_remove_{group_id}").click().run()
    assert not app.exception and order(home) == ["b", "a"]
    assert "Queue: 2 runs wait" in titles(app)


def test_the_live_page_names_what_trains_beside_its_run(home: Store):
    first, second = queued(home, "first", "second")
    home.claim(first, "cpu")
    home.claim(second, "xla")
    home.append_events(second, [(time.time(), StepLogged(1, 1, 0.7, 50.0, 1e-3, 32, 0.5, 0.1, 60.0, 0))])
    app = open_page("live", run=first)
    assert "second" in texts(app) and "xla" in texts(app) and not titles(app)


def test_the_train_page_says_how_many_wait(home: Store):
    app = open_page("train")
    assert "wait" not in " ".join(item.value for item in app.markdown if "queue" in item.value)
    queued(home, "a", "b")
    app.run()
    assert any(item.value == ":material/queue: 2 runs wait." for item in app.markdown)
    assert not button(app, "Start").disabled

"""How long steps took, in bins and by the device's own account."""

from __future__ import annotations

import numpy as np
import pytest

from core.devices.executions import ExecutionWatch
from core.training.step_times import StepTimes


def test_quantiles_are_off_by_half_a_percent_at_most():
    seconds = np.random.default_rng(0).lognormal(-2, 0.4, 5000)
    times = StepTimes()
    for each in seconds:
        times.add(each)
    for share in (0.0, 0.05, 0.5, 0.95, 1.0):
        exact = np.quantile(seconds, share, method="lower")
        assert times.quantile(share) == pytest.approx(exact, rel=0.0051)


def test_epochs_add_up_through_their_counts():
    one, two, both = StepTimes(), StepTimes(), StepTimes()
    for each in (0.1, 0.2, 0.2):
        one.add(each), both.add(each)
    for each in (0.3, 0.1):
        two.add(each), both.add(each)
    assert StepTimes([one.counts(), two.counts()]).counts() == both.counts()
    assert len(both) == 5


def test_a_histogram_holds_each_step_once_and_counts_the_very_long_ones_apart():
    times = StepTimes()
    for each in (*np.linspace(0.09, 0.11, 50), 3.0, 9.0):
        times.add(each)
    summary = times.summary()
    histogram = summary["histogram"]
    assert sum(histogram["counts"]) == 50 and histogram["longer"] == 2
    assert len(histogram["edges_s"]) == len(histogram["counts"]) + 1
    assert histogram["edges_s"][0] <= 0.09 and 0.11 <= histogram["edges_s"][-1] < 0.12
    assert summary["steps"] == 52 and summary["max_s"] == pytest.approx(9, rel=0.006)


def test_equal_steps_are_one_bar_and_no_steps_none():
    times = StepTimes()
    for _ in range(3):
        times.add(0.1)
    assert times.summary()["histogram"]["counts"] == [3]
    assert StepTimes().summary() is None


class Runtime:
    """A record of executions as torch_xla keeps it, and a clock: set by hand."""

    def __init__(self, room: int = 100):
        self.room = room
        self.now, self.ended, self.sendings = 100.0, [], 0

    def run(self, sent: float, ended: float) -> None:
        self.ended.append((ended, ended - sent))

    def watch(self) -> ExecutionWatch:
        return ExecutionWatch(
            lambda: (len(self.ended), self.ended[-self.room :]), lambda: self.sendings, lambda: None, lambda: self.now
        )

    def step(
        self, watch: ExecutionWatch, has_batch: float, waited_s: float, sent: float, num_programs: int = 1
    ) -> None:
        self.now = has_batch
        watch.has_batch(waited_s)
        self.sendings += num_programs
        self.now = sent
        watch.sent()


def test_a_wait_counts_as_far_as_the_device_had_nothing_to_do_meanwhile():
    runtime = Runtime()
    watch = runtime.watch()
    runtime.step(watch, has_batch=101, waited_s=1, sent=101.5)
    runtime.run(sent=101.5, ended=104)
    # the host waits from 101.5 to 106; the device is busy until 104
    runtime.step(watch, has_batch=106, waited_s=4.5, sent=106.5)
    runtime.run(sent=106.5, ended=109)
    first, second = watch.done(is_all=True)
    assert (first.data_wait_s, first.idle_s, first.seconds) == (1, 1.5, 4)
    assert (second.data_wait_s, second.idle_s, second.seconds) == (2, 2.5, 5)


def test_a_device_that_is_busy_all_along_waits_for_nothing():
    runtime = Runtime()
    watch = runtime.watch()
    runtime.step(watch, has_batch=100, waited_s=0, sent=100.5)
    runtime.run(sent=100.5, ended=110)
    runtime.step(watch, has_batch=105, waited_s=4.5, sent=105.5)
    runtime.run(sent=105.5, ended=120)
    assert [(time.data_wait_s, time.seconds) for time in watch.done(is_all=True)] == [(0, 10), (0, 10)]


def test_a_step_is_told_once_when_its_programs_have_ended():
    runtime = Runtime()
    watch = runtime.watch()
    runtime.step(watch, has_batch=101, waited_s=0, sent=101.4, num_programs=2)
    runtime.run(sent=101.2, ended=102)
    assert watch.done() == []
    runtime.run(sent=101.4, ended=103)
    assert len(watch.done()) == 1 and watch.done(is_all=True) == []


def test_what_others_run_between_two_steps_is_no_step_and_no_idle_time():
    runtime = Runtime()
    watch = runtime.watch()
    runtime.step(watch, has_batch=101, waited_s=0, sent=101.4)
    runtime.run(sent=101.4, ended=102)
    assert len(watch.done()) == 1
    runtime.run(sent=102, ended=107)
    runtime.step(watch, has_batch=108, waited_s=6, sent=108.5)
    runtime.run(sent=108.5, ended=109)
    (step,) = watch.done()
    assert (step.data_wait_s, step.idle_s, step.seconds) == (1, 1.5, 2)


def test_a_program_that_is_handed_over_late_belongs_to_its_own_step():
    runtime = Runtime()
    watch = runtime.watch()
    runtime.step(watch, has_batch=101, waited_s=0, sent=101.4)
    runtime.step(watch, has_batch=101.5, waited_s=0, sent=101.9)
    # the first one's is sent when the next batch is there already
    runtime.run(sent=101.55, ended=102)
    runtime.run(sent=101.9, ended=103)
    assert [time.seconds for time in watch.done(is_all=True)] == [2, 1]


def test_several_programs_of_a_step_are_one_step():
    runtime = Runtime()
    watch = runtime.watch()
    runtime.step(watch, has_batch=101, waited_s=0, sent=102, num_programs=2)
    for sent, ended in ((101.5, 101.7), (102, 103)):
        runtime.run(sent, ended)
    runtime.step(watch, has_batch=103, waited_s=1, sent=104, num_programs=2)
    for sent, ended in ((103.5, 103.7), (104, 105)):
        runtime.run(sent, ended)
    first, second = watch.done(is_all=True)
    assert (first.seconds, second.seconds) == (3, 2)
    assert second.idle_s == pytest.approx(0.5 + 0.3)


def test_a_step_that_the_record_has_dropped_is_told_as_the_host_saw_it():
    runtime = Runtime(room=3)
    watch = runtime.watch()
    for step in range(5):
        runtime.step(watch, has_batch=101 + step, waited_s=0.5, sent=101.5 + step)
        runtime.run(sent=101.5 + step, ended=101.9 + step)
    times = watch.done(is_all=True)
    # three of the five are left in the record
    assert [time.seconds is None for time in times] == [True, True, False, False, False]
    assert all(time.data_wait_s == 0.5 for time in times[:2])

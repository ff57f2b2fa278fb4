"""The machine is really sampled, but for GPU and TPU: none is here, so that stand-ins speak for their libraries."""

from __future__ import annotations

import hashlib
import math
import subprocess
import sys
import threading
import time
from types import SimpleNamespace

import psutil
import pytest

from core.config import make_config
from core.events import MachineSampled, payload_of
from core.machine.accelerators import find_card
from core.machine.telemetry import Telemetry, summary_of

pytestmark = pytest.mark.long

CORES = psutil.cpu_count()
BURN = "import time\nend = time.monotonic() + {}\nwhile time.monotonic() < end: pass"


class Samples:
    """Takes what Telemetry emits, with the times at which it came."""

    def __init__(self, **options):
        self.events: list[MachineSampled] = []
        self.times, self.process_times, self.thread_times = [time.monotonic()], [time.process_time()], []
        self.telemetry = Telemetry(self.take, **options)

    def take(self, event):
        self.events.append(event)
        self.times.append(time.monotonic())
        self.process_times.append(time.process_time())
        self.thread_times.append(time.thread_time())

    def core_seconds(self, field: str) -> float:
        """What a field in percent of the machine comes to over the samples."""
        spans = [later - earlier for earlier, later in zip(self.times, self.times[1:], strict=False)]
        return sum(getattr(it, field) * span for it, span in zip(self.events, spans, strict=True)) / 100 * CORES


@pytest.fixture
def stranger():
    """A process that burns processor time and is not of this process's family."""
    command = f"{sys.executable} -c '{BURN.format(20)}' > /dev/null 2>&1 & echo $!"
    pid = int(subprocess.run(["sh", "-c", command], stdout=subprocess.PIPE, check=True).stdout)
    process = psutil.Process(pid)
    yield process
    process.kill()


def burn(seconds: float) -> None:
    # hashing lets other threads run meanwhile, as torch does
    end, block = time.monotonic() + seconds, bytes(1_000_000)
    while time.monotonic() < end:
        hashlib.sha256(block)


def used_s(process: psutil.Process) -> float:
    return sum(process.cpu_times()[:2])


def test_what_a_stranger_burns_is_others_and_not_this_runs(stranger):
    samples = Samples(interval_s=0.2)
    others = used_s(stranger)
    with samples.telemetry:
        time.sleep(3)
    others = used_s(stranger) - others
    own = samples.process_times[-1] - samples.process_times[0]
    assert others > 0.3
    assert samples.core_seconds("other_cpu_percent") > 0.8 * others
    assert samples.core_seconds("own_cpu_percent") < own + 0.1


def test_what_this_process_burns_is_its_own():
    samples = Samples(interval_s=0.2)
    with samples.telemetry:
        burn(2)
    own = samples.process_times[-1] - samples.process_times[0]
    assert own > 0.3
    assert samples.core_seconds("own_cpu_percent") == pytest.approx(own, rel=0.2)


@pytest.mark.parametrize("interval_s", [0.2, 2.0], ids=["living at a look", "ended before the first look"])
def test_what_a_child_burns_is_this_runs_own(interval_s: float):
    samples = Samples(interval_s=interval_s)
    before = psutil.Process().cpu_times()
    with samples.telemetry:
        subprocess.run([sys.executable, "-c", BURN.format(0.8)], check=True)
        time.sleep(1.6)
    after = psutil.Process().cpu_times()
    child = sum(after[2:4]) - sum(before[2:4])
    assert child > 0.2
    # neither forgotten, nor counted a second time when it ends
    assert samples.core_seconds("own_cpu_percent") == pytest.approx(child, rel=0.25)


def test_processor_figures_are_percent_of_the_whole_machine_and_add_up():
    samples = Samples(interval_s=0.1)
    with samples.telemetry:
        burn(1)
    assert len(samples.events) > 3
    for sample in samples.events:
        assert 0 <= sample.cpu_percent <= 100
        assert max(sample.cpu_percent, sample.own_cpu_percent) == pytest.approx(
            sample.own_cpu_percent + sample.other_cpu_percent
        )


def test_memory_is_as_psutil_tells_it():
    samples = Samples(interval_s=0.1)
    with samples.telemetry:
        time.sleep(0.35)
    last = samples.events[-1]
    assert last.memory_percent == pytest.approx(psutil.virtual_memory().percent, abs=10)
    family = [psutil.Process(), *psutil.Process().children(recursive=True)]
    assert last.own_memory_gib == pytest.approx(sum(it.memory_info().rss for it in family) / 2**30, rel=0.2)


def test_without_an_accelerator_its_figures_are_none():
    samples = Samples(interval_s=0.1, device_kind="cuda")
    with samples.telemetry:
        time.sleep(0.35)
    last = samples.events[-1]
    assert last.cpu_percent is not None
    assert {value for name, value in payload_of(last).items() if name.startswith(("gpu", "tpu"))} == {None}


def test_a_look_a_second_costs_less_than_a_hundredth_of_a_core():
    samples = Samples(interval_s=0.1)
    with samples.telemetry:
        time.sleep(2)
    used = samples.thread_times[-1] - samples.thread_times[0]
    assert used / (len(samples.thread_times) - 1) < 0.01


def test_samples_do_not_drift_however_long_a_look_takes():
    def slow():
        time.sleep(0.03)
        return {}

    samples = Samples(interval_s=0.1, readers=[slow])
    with samples.telemetry:
        time.sleep(2)
    # each comes as long after its tenth of a second as the look takes, not later and later
    late = [(at - samples.times[0] - 0.03) % 0.1 for at in samples.times[1:]]
    assert len(late) > 9
    assert sum(seconds < 0.025 for seconds in late) > 0.6 * len(late)


def test_a_reader_that_fails_twice_in_a_row_is_dropped_and_the_others_go_on():
    calls = []

    def broken():
        calls.append(1)
        raise OSError("the sensor is gone")

    samples = Samples(interval_s=0.05, readers=[broken, lambda: {"memory_percent": 50.0}])
    with samples.telemetry:
        time.sleep(0.6)
    assert len(calls) == 2
    assert len(samples.events) > 4
    assert {sample.memory_percent for sample in samples.events} == {50.0}


def test_a_reader_that_fails_now_and_then_stays_and_its_figure_is_none_then():
    turn = iter(range(1000))

    def flighty():
        if next(turn) % 2:
            raise OSError("not now")
        return {"memory_percent": 50.0}

    samples = Samples(interval_s=0.05, readers=[flighty])
    with samples.telemetry:
        time.sleep(0.6)
    assert len(samples.events) > 5
    assert [sample.memory_percent for sample in samples.events[:5]] == [50.0, None, 50.0, None, 50.0]


def test_leaving_ends_the_thread_at_once():
    samples = Samples(interval_s=30)
    with samples.telemetry:
        time.sleep(0.1)
        left = time.monotonic()
    assert time.monotonic() - left < 0.2
    assert "telemetry" not in {thread.name for thread in threading.enumerate()}


def test_a_reader_that_hangs_holds_up_nobody_and_nothing_is_emitted_after_leaving():
    hangs, may_go_on = threading.Event(), threading.Event()

    def hanging():
        hangs.set()
        may_go_on.wait(10)
        return {"memory_percent": 50.0}

    samples = Samples(interval_s=0.02, readers=[hanging])
    with samples.telemetry:
        assert hangs.wait(5)
        left = time.monotonic()
    assert time.monotonic() - left < 0.2
    may_go_on.set()
    time.sleep(0.1)
    assert samples.events == []


def test_an_emit_that_fails_ends_the_looks_and_nothing_else(caplog):
    calls = []

    def emit(event):
        calls.append(event)
        raise OSError("the disk is full")

    with Telemetry(emit, interval_s=0.05, readers=[]):
        time.sleep(0.4)
    assert len(calls) == 1
    assert "no longer sampled" in caplog.text


# -- accelerators ---------------------------------------------------------------------------------------------------


class Nvml:
    """Stands in for pynvml, with two cards; the second, GPU-b, doesn't tell its power."""

    NVML_CLOCK_SM, NVML_TEMPERATURE_GPU = 1, 0
    nvmlClocksThrottleReasonSwPowerCap = 0x4
    nvmlClocksThrottleReasonHwSlowdown = 0x8
    nvmlClocksThrottleReasonSwThermalSlowdown = 0x20
    nvmlClocksThrottleReasonHwThermalSlowdown = 0x40
    nvmlClocksThrottleReasonHwPowerBrakeSlowdown = 0x80

    def __init__(self, reasons: int = 0):
        self.reasons, self.opened = reasons, 0

    def nvmlInit(self):
        self.opened += 1

    def nvmlShutdown(self):
        self.opened -= 1

    def nvmlDeviceGetHandleByIndex(self, index):
        return ("GPU-a", "GPU-b")[index]

    def nvmlDeviceGetHandleByUUID(self, uuid):
        assert uuid in ("GPU-a", "GPU-b")
        return uuid

    def nvmlDeviceGetUtilizationRates(self, card):
        return SimpleNamespace(gpu={"GPU-a": 10, "GPU-b": 90}[card], memory=5)

    def nvmlDeviceGetClockInfo(self, card, clock):
        assert clock == self.NVML_CLOCK_SM
        return 1980

    def nvmlDeviceGetTemperature(self, card, sensor):
        assert sensor == self.NVML_TEMPERATURE_GPU
        return 61

    def nvmlDeviceGetPowerUsage(self, card):
        if card == "GPU-b":
            raise RuntimeError("Not Supported")
        return 350_500

    def nvmlDeviceGetMemoryInfo(self, card):
        return SimpleNamespace(total=80 * 2**30, free=77 * 2**30, used=3 * 2**30)

    def nvmlDeviceGetCurrentClocksThrottleReasons(self, card):
        return self.reasons


def gpu_sample(monkeypatch, nvml: Nvml, visible: str) -> MachineSampled:
    monkeypatch.setitem(sys.modules, "pynvml", nvml)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    samples = Samples(interval_s=0.1, device_kind="cuda")
    with samples.telemetry:
        time.sleep(0.45)
    return samples.events[-1]


def test_a_gpu_is_read_in_the_units_of_the_columns_and_let_go_of(monkeypatch):
    nvml = Nvml()
    sample = gpu_sample(monkeypatch, nvml, "0")
    told = {name: value for name, value in payload_of(sample).items() if name.startswith("gpu")}
    assert told == {
        "gpu_percent": 10.0,
        "gpu_clock_mhz": 1980.0,
        "gpu_temperature_c": 61.0,
        "gpu_power_w": 350.5,
        "gpu_memory_gib": 3.0,
        "gpu_throttled": 0.0,
    }
    assert nvml.opened == 0


def test_a_figure_that_a_card_does_not_tell_costs_the_others_nothing(monkeypatch):
    sample = gpu_sample(monkeypatch, Nvml(), "1")
    assert (sample.gpu_percent, sample.gpu_power_w, sample.gpu_memory_gib) == (90.0, None, 3.0)


@pytest.mark.parametrize(("reasons", "throttled"), [(0x0, 0.0), (0x4, 0.0), (0x8, 1.0), (0x20, 1.0), (0x84, 1.0)])
def test_heat_and_failing_power_throttle_and_the_power_cap_does_not(monkeypatch, reasons: int, throttled: float):
    assert gpu_sample(monkeypatch, Nvml(reasons), "0").gpu_throttled == throttled


@pytest.mark.parametrize(
    ("uuid", "visible", "card"),
    [
        ("", "", "GPU-a"),
        ("", "1,0", "GPU-b"),
        ("", "GPU-b", "GPU-b"),
        ("b", "", "GPU-b"),
        ("a", "1", "GPU-a"),
    ],
)
def test_the_card_is_the_one_that_torch_names_else_the_first_visible_one(uuid: str, visible: str, card: str):
    assert find_card(Nvml(), uuid, visible) == card


class RpcError(Exception):
    def code(self):
        return "unavailable"


class Grpc:
    """Stands in for grpc and for tpu-info's client: two chips, of which nothing is known at the first two calls."""

    RpcError, StatusCode = RpcError, SimpleNamespace(UNAVAILABLE="unavailable")
    local_channel_credentials = MetricRequest = staticmethod(SimpleNamespace)

    def __init__(self):
        self.calls, self.is_open = 0, False

    def secure_channel(self, address, credentials, options):
        assert address == "localhost:8431"
        return self

    def __enter__(self):
        self.is_open = True
        return self

    def __exit__(self, *_):
        self.is_open = False

    def RuntimeMetricServiceStub(self, channel):
        return self

    def GetRuntimeMetric(self, request, timeout):
        self.calls += 1
        if self.calls <= 2:
            raise RpcError
        gauges = {
            "tpu.runtime.tensorcore.dutycycle.percent": [{"as_double": 40.0}, {"as_double": 60.0}],
            "tpu.runtime.hbm.memory.usage.bytes": [{"as_int": 2 * 2**30}, {"as_int": 3 * 2**30}],
        }[request.metric_name]
        metrics = [SimpleNamespace(gauge=SimpleNamespace(**gauge)) for gauge in gauges]
        return SimpleNamespace(metric=SimpleNamespace(metrics=metrics))


def test_a_tpu_is_waited_for_until_its_runtime_answers(monkeypatch):
    grpc = Grpc()
    for name in ("grpc", "tpu_info.proto.tpu_metric_service_pb2", "tpu_info.proto.tpu_metric_service_pb2_grpc"):
        monkeypatch.setitem(sys.modules, name, grpc)
    monkeypatch.setenv("TPU_ACCELERATOR_TYPE", "v5e-1")
    samples = Samples(interval_s=0.1, device_kind="xla")
    with samples.telemetry:
        time.sleep(0.65)
    told = [(sample.tpu_duty_percent, sample.tpu_memory_gib) for sample in samples.events]
    assert told[:2] == [(None, None)] * 2
    assert told[2:] == [(50.0, 5.0)] * len(told[2:])
    assert len(told) > 3
    assert not grpc.is_open


# -- what samples come to -------------------------------------------------------------------------------------------


def sampled(at: float, **values: float) -> tuple[float, MachineSampled]:
    return at, MachineSampled(**values)


@pytest.fixture
def come_to(store):
    """What samples come to when they have gone through the store."""

    def come_to(*samples: tuple[float, MachineSampled]) -> dict | None:
        run_id = store.create_run(make_config())
        store.append_events(run_id, samples)
        return summary_of(store.columns(run_id, "MachineSampled"))

    return come_to


def test_samples_come_to_mean_least_and_most_of_the_columns_that_have_values(come_to):
    summary = come_to(
        sampled(100.0, cpu_percent=10.0, gpu_power_w=300.0),
        sampled(101.0, cpu_percent=20.0),
        # after a pause
        sampled(161.0, cpu_percent=60.0, gpu_power_w=math.nan),
        sampled(162.0, cpu_percent=30.0, gpu_power_w=200.0),
    )
    assert summary == {
        "samples": 4,
        "interval_s": 1.0,
        "cpu_percent": {"mean": 30.0, "min": 10.0, "max": 60.0},
        "gpu_power_w": {"mean": 250.0, "min": 200.0, "max": 300.0},
    }


def test_one_sample_has_no_interval_and_none_have_no_summary(come_to):
    assert come_to(sampled(5.0, cpu_percent=1.0)) == {
        "samples": 1,
        "interval_s": None,
        "cpu_percent": {"mean": 1.0, "min": 1.0, "max": 1.0},
    }
    assert come_to() is None

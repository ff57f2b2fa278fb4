"""What a GPU or a TPU is doing, as its maker's own library tells, where that is installed and a card answers.

NVIDIA's cards are read by NVML (package nvidia-ml-py), TPUs by the service that libtpu opens on this machine (package
tpu-info, which is no requirement).
"""

from __future__ import annotations

import importlib
import logging
import os
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from functools import cache
from typing import Any

Reader = Callable[[], dict[str, float]]
"""Gives fields of `MachineSampled`; one that isn't known just now is left out."""

TPU_ADDRESS = "localhost:8431"
"""Where libtpu answers once a process uses the chips."""
TPU_TIMEOUT_S = 0.5

_log = logging.getLogger(__name__)


def gpu_facts() -> dict[str, str]:
    """`gpu_driver`, and `cuda`: the version that torch was built for; empty where no NVIDIA card answers."""
    import torch

    cuda = torch.version.cuda
    if not cuda or not torch.cuda.is_available():
        return {}
    with open_nvml() as nvml:
        return {"gpu_driver": str(nvml.nvmlSystemGetDriverVersion()), "cuda": cuda}


def accelerator_readers(device_kind: str, resources: ExitStack) -> list[Reader]:
    """What can be read of the card that a run on this kind of device uses; often nothing.

    Args:
        device_kind: cpu, cuda, mps, xla or tpu.
        resources: closes what the readers hold.
    """
    try:
        if device_kind == "cuda":
            return gpu_readers(resources.enter_context(open_nvml()))
        if device_kind in ("xla", "tpu"):
            # here, since core.devices needs core.machine.facts, which needs this module
            from core.machine.tpu import find_tpu

            return [resources.enter_context(open_tpu())] if find_tpu() else []
    except Exception:  # each library has errors of its own, and a run does without its figures
        _log.info("The %s device tells no figures.", device_kind, exc_info=True)
    return []


# -- NVIDIA ---------------------------------------------------------------------------------------------------------


@contextmanager
def open_nvml() -> Iterator[Any]:
    """NVIDIA's management library.

    Raises:
        ImportError: nvidia-ml-py is not installed.
        pynvml.NVMLError: there is no driver, or no card.
    """
    nvml = importlib.import_module("pynvml")
    nvml.nvmlInit()
    try:
        yield nvml
    finally:
        nvml.nvmlShutdown()


def gpu_readers(nvml: Any) -> list[Reader]:
    """One reader a field, since cards differ in what they tell, of the card that torch calls cuda:0."""
    slowed = (
        nvml.nvmlClocksThrottleReasonHwSlowdown
        | nvml.nvmlClocksThrottleReasonHwThermalSlowdown
        | nvml.nvmlClocksThrottleReasonSwThermalSlowdown
        | nvml.nvmlClocksThrottleReasonHwPowerBrakeSlowdown
    )
    cuda = importlib.import_module("torch.cuda")

    @cache
    def card(is_started: bool) -> Any:
        # asking torch sooner would start CUDA, which takes memory on the card
        uuid = str(cuda.get_device_properties(0).uuid) if is_started else ""
        return find_card(nvml, uuid, os.environ.get("CUDA_VISIBLE_DEVICES", ""))

    def reader(field: str, read: Callable[[Any], float]) -> Reader:
        return lambda: {field: float(read(card(cuda.is_initialized())))}

    return [
        reader("gpu_percent", lambda it: nvml.nvmlDeviceGetUtilizationRates(it).gpu),
        reader("gpu_clock_mhz", lambda it: nvml.nvmlDeviceGetClockInfo(it, nvml.NVML_CLOCK_SM)),
        reader("gpu_temperature_c", lambda it: nvml.nvmlDeviceGetTemperature(it, nvml.NVML_TEMPERATURE_GPU)),
        reader("gpu_power_w", lambda it: nvml.nvmlDeviceGetPowerUsage(it) / 1000),
        reader("gpu_memory_gib", lambda it: nvml.nvmlDeviceGetMemoryInfo(it).used / 2**30),
        # the power cap is not among the reasons: at full work a card meets it all the time
        reader("gpu_throttled", lambda it: bool(nvml.nvmlDeviceGetCurrentClocksThrottleReasons(it) & slowed)),
    ]


def find_card(nvml: Any, uuid: str, visible: str) -> Any:
    """NVML's handle of the card that torch calls cuda:0.

    Args:
        uuid: as torch tells it; empty as long as this process has not started CUDA.
        visible: CUDA_VISIBLE_DEVICES, whose first card it then is. Numbers count in NVML's order, which is CUDA's
            where the cards are alike or CUDA_DEVICE_ORDER is PCI_BUS_ID.
    """
    name = f"GPU-{uuid}" if uuid else visible.split(",")[0].strip() or "0"
    return nvml.nvmlDeviceGetHandleByIndex(int(name)) if name.isdigit() else nvml.nvmlDeviceGetHandleByUUID(name)


# -- TPU ------------------------------------------------------------------------------------------------------------


@contextmanager
def open_tpu(address: str = TPU_ADDRESS) -> Iterator[Reader]:
    """Reads the mean duty cycle of this machine's chips, and their memory in use, added up.

    Raises:
        ImportError: tpu-info is not installed.
    """
    grpc = importlib.import_module("grpc")
    messages = importlib.import_module("tpu_info.proto.tpu_metric_service_pb2")
    service = importlib.import_module("tpu_info.proto.tpu_metric_service_pb2_grpc")
    # tpu_info.metrics.get_chip_usage opens a channel a call and waits without limit
    options = [("grpc.max_reconnect_backoff_ms", 1000)]
    with grpc.secure_channel(address, grpc.local_channel_credentials(), options=options) as channel:
        client = service.RuntimeMetricServiceStub(channel)

        def gauges(name: str) -> list[Any]:
            request = messages.MetricRequest(metric_name=name)
            return [one.gauge for one in client.GetRuntimeMetric(request, timeout=TPU_TIMEOUT_S).metric.metrics]

        def read() -> dict[str, float]:
            try:
                duty = gauges("tpu.runtime.tensorcore.dutycycle.percent")
                memory = gauges("tpu.runtime.hbm.memory.usage.bytes")
            except grpc.RpcError as error:
                if error.code() == grpc.StatusCode.UNAVAILABLE:
                    return {}  # no process uses the chips yet
                raise
            if not duty or not memory:
                return {}
            return {
                "tpu_duty_percent": sum(gauge.as_double for gauge in duty) / len(duty),
                "tpu_memory_gib": sum(gauge.as_int for gauge in memory) / 2**30,
            }

        yield read

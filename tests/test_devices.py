"""Every device keeps the same promises, one that runs behind the host in a time of its own among them."""

from __future__ import annotations

import json
import shutil
import time

import pytest
import torch
from torch import nn

from core.devices import check_precision, list_devices, open_device, resolve_kind
from core.devices.local import CpuDevice
from core.devices.xla import xla_info
from core.errors import DeviceError
from tests.test_behind import BehindDevice, HostClock


@pytest.fixture(params=["behind", "cpu", pytest.param("xla", marks=pytest.mark.xla)])
def device(request: pytest.FixtureRequest):
    opened = BehindDevice(HostClock()) if request.param == "behind" else open_device(request.param)
    yield opened
    opened.close()


class TestDeviceContract:
    def test_it_has_a_kind_and_a_name(self, device):
        assert device.kind in ("cpu", "cuda", "mps", "xla") and device.name

    def test_model_and_batch_land_on_it(self, device):
        model = device.place_model(nn.Conv2d(3, 2, 1))
        images, labels = device.place_batch(
            torch.zeros(2, 3, 4, 4, dtype=torch.uint8), torch.zeros(2, dtype=torch.long)
        )
        assert next(model.parameters()).device.type == images.device.type == device.torch_device.type
        assert images.dtype == torch.uint8 and labels.dtype == torch.int64

    def test_it_tells_of_each_step_once_and_no_wait_longer_than_the_host_waited(self, device):
        watch, told = device.watch_steps(time.perf_counter), []
        weight = device.place(torch.ones(64, 64))
        for _ in range(4):
            watch.has_batch(0.05)
            weight = weight @ weight / 64
            device.flush()
            watch.sent()
            told += watch.done()
        told += watch.done(is_all=True)
        assert len(told) == 4 and watch.done(is_all=True) == []
        assert all(0 <= step.data_wait_s <= 0.05 and step.seconds is not None for step in told)

    def test_a_step_changes_the_weights(self, device):
        model = device.place_model(nn.Linear(2, 1))
        optimizer = device.make_optimizer("sgd", model.parameters(), lr=0.1)
        before = model.weight.detach().cpu().clone()
        model(torch.ones(1, 2).to(device.torch_device)).sum().backward()
        device.optimizer_step(optimizer)
        device.flush()
        device.wait()
        assert torch.allclose(before - model.weight.detach().cpu(), torch.full((1, 2), 0.1))

    def test_bf16_computes_in_bf16_and_fp32_in_fp32(self, device):
        model = device.place_model(nn.Linear(2, 1))
        inputs = torch.ones(1, 2).to(device.torch_device)
        with device.autocast("bf16"):
            assert model(inputs).dtype == torch.bfloat16
        with device.autocast("fp32"):
            assert model(inputs).dtype == torch.float32

    def test_fp16_is_refused_where_it_does_not_work(self, device):
        with pytest.raises(DeviceError, match="fp16"):
            check_precision(device.kind, "fp16")

    def test_figures_come_as_they_were_sent(self, device):
        with device.turn():
            fetch = device.fetch(device.place(torch.tensor([1.0, 2.5, -3.0])))
            assert fetch.values() == [1.0, 2.5, -3.0]

    def test_copies_on_the_host_do_not_change_with_what_they_were_copied_from(self, device):
        with device.turn():
            placed = device.place(torch.ones(2))
            copies = device.to_host({"a": [placed], "step": 3})
            placed.add_(1)
            device.flush()
        assert copies["step"] == 3 and copies["a"][0].device.type == "cpu"
        assert copies["a"][0].tolist() == [1.0, 1.0]

    def test_zero_and_one_are_placed_as_they_are(self, device):
        with device.turn():
            assert [device.place(torch.tensor(value)).item() for value in (0, 1)] == [0, 1]

    def test_what_can_change_its_speed_is_plain_json(self, device):
        assert json.loads(json.dumps(device.facts())) == device.facts()

    def test_it_tells_full_memory_from_other_errors(self, device):
        assert not device.out_of_memory(RuntimeError("shape mismatch"))
        words = "RESOURCE_EXHAUSTED: out of memory while trying to allocate 9 bytes"
        assert device.out_of_memory(RuntimeError(words))

    def test_counts_of_compiling_never_fall(self, device):
        count, seconds = device.compile_count(), device.compile_seconds()
        (torch.ones(3, 5).to(device.torch_device) * 3).sum()
        device.wait()
        assert device.compile_count() >= count >= 0 and device.compile_seconds() >= seconds >= 0


def test_every_kind_is_listed_and_an_unavailable_one_says_why():
    infos = list_devices()
    assert [info.kind for info in infos] == ["cpu", "cuda", "mps", "xla"]
    assert all(info.available or info.reason for info in infos)


def test_a_kind_that_is_not_there_names_those_that_are():
    missing = next(info.kind for info in list_devices() if not info.available)
    with pytest.raises(DeviceError, match="Choose one of cpu"):
        resolve_kind(missing)


def test_a_torch_xla_made_for_another_torch_is_refused(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("importlib.metadata.version", lambda _: "2.8.1")
    info = xla_info()
    assert not info.available and "torch_xla 2.8.1 does not fit torch" in info.reason


def test_a_silent_precision_switch_is_refused(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("importlib.metadata.version", lambda _: torch.__version__)
    monkeypatch.setenv("XLA_USE_BF16", "1")
    info = xla_info()
    assert not info.available and "XLA_USE_BF16" in info.reason


class Curved(nn.Module):
    """Something for a compiler to translate."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4)

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        return torch.relu(self.layer(inputs)) * 2


@pytest.mark.skipif(shutil.which("g++") is None, reason="torch.compile needs a C++ compiler on the CPU")
def test_a_translated_model_computes_the_same_and_its_compiling_is_counted():
    device, model = CpuDevice(), Curved()
    inputs = torch.rand(3, 4)
    expected, names = model(inputs), list(model.state_dict())
    device.compile_model(model)
    torch.testing.assert_close(model(inputs), expected)
    assert device.compile_count() >= 1 and device.compile_seconds() > 0
    assert list(model.state_dict()) == names
    device.close()


@pytest.mark.xla
def test_xla_refuses_torch_compile_in_one_line():
    device = open_device("xla")
    with pytest.raises(DeviceError, match="XLA compiles every model by itself"):
        device.compile_model(Curved())
    device.close()


def test_choosing_how_products_are_computed_is_undone_when_the_device_closes():
    # no GPU is here, but its settings are
    from core.devices.local import CudaDevice

    device = CudaDevice.__new__(CudaDevice)
    device._undo = []
    before = torch.backends.cuda.matmul.fp32_precision, torch.backends.cudnn.conv.fp32_precision
    assert device.set_matmul_precision("high") == "TF32"
    assert torch.backends.cuda.matmul.fp32_precision == torch.backends.cudnn.conv.fp32_precision == "tf32"
    assert device.set_matmul_precision("highest") == "fp32"
    assert torch.backends.cuda.matmul.fp32_precision == torch.backends.cudnn.conv.fp32_precision == "ieee"
    while device._undo:
        device._undo.pop()()
    assert (torch.backends.cuda.matmul.fp32_precision, torch.backends.cudnn.conv.fp32_precision) == before

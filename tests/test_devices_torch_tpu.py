"""torch_tpu can't run here: it has no CPU to fall back on and needs another torch.

So its package is planted (metadata as its wheel has them), and the CPU stands in for the chip.
"""

from __future__ import annotations

import importlib
import os
import sys
from datetime import timedelta
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from torch import nn

from core.devices import torch_tpu
from core.devices.torch_tpu import START, TorchTpuDevice, start, torch_tpu_info
from core.errors import DeviceError
from core.machine.tpu import TpuFound, trial_start

V6E = TpuFound("v6e", 4, 32.0, "PCI bus", nodes=("/dev/vfio/0", "/dev/vfio/1", "/dev/vfio/2", "/dev/vfio/3"))


class StandIn(TorchTpuDevice):
    """All that it adds to a device, on the CPU; torch names a device after its kind, so the kind goes too."""

    kind = "cpu"

    def __init__(self) -> None:
        super().__init__(start=lambda: None)


class Plant:
    """Writes a package torch_tpu whose import is counted and whose loading may fail."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        (folder / "torch_tpu").mkdir(parents=True)
        (folder / "torch_tpu" / "__init__.py").write_text("")
        (folder / "torch_tpu" / "_loader.py").write_text("loads = []\ndef load():\n    loads.append(1)\n")
        info = folder / "torch_tpu-0.2.0.dist-info"
        info.mkdir()
        (info / "entry_points.txt").write_text("[torch.backends]\ntorch_tpu = torch_tpu._loader:load\n")
        self.needs_torch(">=2.9,<=2.15.0")

    def needs_torch(self, versions: str) -> None:
        (self.folder / "torch_tpu-0.2.0.dist-info" / "METADATA").write_text(
            "Metadata-Version: 2.1\nName: torch_tpu\nVersion: 0.2.0\n"
            f"Requires-Dist: numpy>=2\nRequires-Dist: torch{versions}\n"
        )

    def is_imported(self) -> bool:
        return "torch_tpu" in sys.modules


@pytest.fixture
def planted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    plant = Plant(tmp_path / "site")
    monkeypatch.syspath_prepend(plant.folder)
    (tmp_path / "libtpu.so").touch()
    monkeypatch.setenv("TPU_LIBRARY_PATH", str(tmp_path / "libtpu.so"))
    yield plant
    for name in [name for name in sys.modules if name.split(".")[0] == "torch_tpu"]:
        del sys.modules[name]
    start.cache_clear()
    importlib.invalidate_caches()


@pytest.fixture
def waits(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """How often the device was waited for; torch's own function refuses where no accelerator is."""
    counted: list[int] = []
    monkeypatch.setattr(torch.accelerator, "synchronize", lambda: counted.append(1))
    return counted


@pytest.fixture
def device(waits: list[int]):
    opened = StandIn()
    yield opened
    opened.close()


class TestWhatIsSaidOfIt:
    def test_without_the_package_it_is_not_available(self):
        info = torch_tpu_info(lambda: V6E)
        assert (info.kind, info.available, info.reason) == ("tpu", False, "torch_tpu is not installed.")

    def test_with_a_torch_that_it_was_not_built_for_it_names_both(self, planted: Plant):
        planted.needs_torch(">=99.1,<=99.2")
        reason = torch_tpu_info(lambda: V6E).reason
        assert reason == f"torch_tpu 0.2.0 needs torch<=99.2,>=99.1, and torch {torch.__version__} is installed."

    def test_without_a_tpu_it_is_not_available(self, planted: Plant):
        assert torch_tpu_info(lambda: None).reason == "No TPU shows on this machine."

    def test_with_a_tpu_it_is_offered_as_experimental_and_nothing_is_imported(self, planted: Plant):
        info = torch_tpu_info(lambda: V6E)
        assert info.available and info.reason == "" and info.note.startswith("Experimental")
        assert (info.name, info.memory_gib, info.count) == ("TPU v6e through torch_tpu", 32.0, 4)
        assert not planted.is_imported()

    def test_what_speaks_against_the_tpu_speaks_against_it(self, planted: Plant):
        held = TpuFound("v6e", 1, 32.0, "PCI bus", "It is held.", ("/dev/vfio/0",))
        assert torch_tpu_info(lambda: held).reason == "It is held."

    @pytest.mark.parametrize(
        "found",
        [
            TpuFound("v3", 4, 32.0, "PCI bus", nodes=("/dev/accel0",)),
            TpuFound("v5e", 1, 16.0, "TPU_ACCELERATOR_TYPE", nodes=("/dev/vfio/0",)),
        ],
    )
    def test_chips_that_it_does_not_look_for_are_refused(self, planted: Plant, found: TpuFound):
        assert f"this {found.name} is none" in torch_tpu_info(lambda: found).reason

    def test_without_libtpu_it_is_not_available(self, planted: Plant, monkeypatch: pytest.MonkeyPatch):
        monkeypatch.setenv("TPU_LIBRARY_PATH", "/nowhere/libtpu.so")
        assert "/nowhere/libtpu.so" in torch_tpu_info(lambda: V6E).reason


class TestTheStart:
    @pytest.fixture
    def chip(self, planted: Plant, monkeypatch: pytest.MonkeyPatch) -> Plant:
        """As if a chip were here: torch_tpu_info says so."""
        info = torch_tpu_info(lambda: V6E)
        monkeypatch.setattr(torch_tpu, "torch_tpu_info", lambda: info)
        return planted

    def test_what_is_not_available_is_not_started(self):
        with pytest.raises(DeviceError, match=r"can't be used: torch_tpu is not installed\."):
            TorchTpuDevice()

    def test_a_trial_that_fails_keeps_it_out_of_this_process(self, chip: Plant, monkeypatch: pytest.MonkeyPatch):
        # a start that fails here would abort the process
        monkeypatch.setattr(torch_tpu, "trial_start", lambda program: "It is held.")
        with pytest.raises(DeviceError, match=r"The TPU does not start: It is held\."):
            start()
        assert not chip.is_imported()

    def test_after_a_trial_it_is_loaded_and_its_refusal_is_told(self, chip: Plant, monkeypatch: pytest.MonkeyPatch):
        monkeypatch.setattr(torch_tpu, "trial_start", lambda program: "")
        with pytest.raises(DeviceError, match="The TPU did not start: Expected one of cpu, cuda"):
            start()
        assert chip.is_imported() and sys.modules["torch_tpu._loader"].loads == [1]

    def test_a_runtime_that_is_up_needs_no_trial(self, chip: Plant, monkeypatch: pytest.MonkeyPatch):
        monkeypatch.setattr(torch, "tpu", SimpleNamespace(is_initialized=lambda: True), raising=False)
        monkeypatch.setattr(torch_tpu, "trial_start", lambda program: pytest.fail("a trial was made"))
        with pytest.raises(DeviceError, match="The TPU did not start"):
            start()

    def test_the_trial_loads_it_and_copies_a_tensor_over(self, planted: Plant):
        # a torch is planted too, for the child alone, which says what it was asked
        (planted.folder / "torch.py").write_text(
            "import sys\n"
            "class ones:\n"
            "    def __init__(self, count): pass\n"
            "    def to(self, kind): raise RuntimeError(kind, sys.modules['torch_tpu._loader'].loads)\n"
        )
        said = trial_start(30, program=START, environ={**os.environ, "PYTHONPATH": str(planted.folder)})
        assert said == "RuntimeError: ('tpu', [1])."


class TestTheDevice:
    def test_model_and_batch_land_on_it(self, device: StandIn):
        model = device.place_model(nn.Conv2d(3, 2, 1))
        images, labels = device.place_batch(torch.zeros(2, 3, 4, 4, dtype=torch.uint8), torch.zeros(2).long())
        assert {model.weight.device, images.device, labels.device} == {device.torch_device}
        assert (images.dtype, labels.dtype) == (torch.uint8, torch.int64)

    @pytest.mark.parametrize("name", ["adam", "adamw", "sgd"])
    def test_a_step_changes_the_weights(self, device: StandIn, name: str):
        model = device.place_model(nn.Linear(2, 1))
        optimizer = device.make_optimizer(name, model.parameters(), lr=0.1)
        before = model.weight.detach().clone()
        model(device.place(torch.ones(1, 2))).sum().backward()
        device.optimizer_step(optimizer)
        assert torch.allclose(before - model.weight.detach(), torch.full((1, 2), 0.1), atol=1e-3)

    def test_bf16_computes_in_bf16_and_fp32_in_fp32(self, device: StandIn):
        model = device.place_model(nn.Linear(2, 1))
        for precision, dtype in [("bf16", torch.bfloat16), ("fp32", torch.float32)]:
            with device.autocast(precision):
                assert model(torch.ones(1, 2)).dtype == dtype

    def test_it_runs_behind_and_is_waited_for(self, waits: list[int]):
        device = StandIn()
        device.flush()
        assert device.runs_behind and waits == []
        device.wait()
        assert waits == [1]
        device.close()
        assert waits == [1, 1]

    def test_compiling_is_read_from_its_cache(self, device: StandIn, monkeypatch: pytest.MonkeyPatch):
        assert (device.compile_count(), device.compile_seconds()) == (0, 0.0)
        entries = [SimpleNamespace(compilation_duration=timedelta(seconds=seconds)) for seconds in (0.5, 2)]
        stats = SimpleNamespace(num_compilations=2, per_entry_stats=entries)
        monkeypatch.setattr(torch.cpu, "_get_cache_stats", lambda: stats, raising=False)
        assert (device.compile_count(), device.compile_seconds()) == (2, 2.5)

    def test_the_precision_of_products_is_given_back(self, waits: list[int]):
        before = torch.get_float32_matmul_precision()
        device = StandIn()
        assert device.set_matmul_precision("default") == "bf16"
        assert device.set_matmul_precision("highest").startswith("fp32")
        assert torch.get_float32_matmul_precision() == "highest"
        device.close()
        assert torch.get_float32_matmul_precision() == before

    def test_torch_compile_uses_its_own_compiler(self, device: StandIn, monkeypatch: pytest.MonkeyPatch):
        asked: list[dict] = []
        monkeypatch.setattr(nn.Module, "compile", lambda self, **options: asked.append(options))
        device.compile_model(nn.Linear(2, 1))
        assert asked == [{"backend": "tpu", "dynamic": False}]

    def test_a_full_memory_is_recognised(self, device: StandIn):
        assert device.out_of_memory(RuntimeError("RESOURCE_EXHAUSTED: Attempting to allocate 3.2G"))
        assert not device.out_of_memory(RuntimeError("INVALID_ARGUMENT"))

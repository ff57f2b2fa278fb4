"""Fixtures that fail a test which leaves something behind."""

from __future__ import annotations

import os
import threading
import time
from pathlib import Path

import pytest
import torch

from core.store import Store


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--without",
        action="append",
        default=[],
        choices=["browser", "xla", "long"],
        help="skip the tests with this marker, because what they need is absent on purpose or they were run already",
    )


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Skip what `--without` names, and XLA's tests where it can't be used; but in CI those fail unless named."""
    from core.devices.xla import xla_info

    reasons = {marker: f"left out by --without {marker}" for marker in config.getoption("without")}
    info = xla_info()
    if not info.available and os.environ.get("CI") != "true":
        reasons.setdefault("xla", info.reason)
    for item in items:
        for marker, reason in reasons.items():
            if item.get_closest_marker(marker):
                item.add_marker(pytest.mark.skip(reason=reason))


@pytest.fixture(autouse=True)
def _nothing_hangs_about():
    """No new thread, environment variable or changed torch setting outlives a test."""
    threads, environment = set(threading.enumerate()), dict(os.environ)
    settings = (torch.get_num_threads(), torch.is_grad_enabled(), torch.get_default_dtype())
    yield
    deadline = time.monotonic() + 3
    while time.monotonic() < deadline and _left(threads):
        time.sleep(0.02)
    changed = {name for name in os.environ.keys() | environment if os.environ.get(name) != environment.get(name)}
    assert _left(threads) == []
    assert changed - _SET_BY_LIBRARIES == set()
    assert (torch.get_num_threads(), torch.is_grad_enabled(), torch.get_default_dtype()) == settings


_SET_BY_LIBRARIES = {
    # pytest's own
    "PYTEST_CURRENT_TEST",
    # XLA's runtime is started once a process, see core.devices.xla.initialise
    "PJRT_DEVICE",
    "GRPC_VERBOSITY",
    "TPU_LIBRARY_PATH",
    "TPU_ML_PLATFORM",
    "TPU_ML_PLATFORM_VERSION",
    "TPU_MEGACORE",
    "LIBTPU_INIT_ARGS",
    "PTXLA_LIBTPU_PATH",
    "CUDA_MODULE_LOADING",
    "KMP_INIT_AT_FORK",
    "KMP_DUPLICATE_LIB_OK",
    "ENABLE_RUNTIME_UPTIME_TELEMETRY",
    "OMP_WAIT_POLICY",
    "XLA_FLAGS",
    # torch.compile, whose parts an optimizer imports before its first step
    "_TORCHINDUCTOR_PYOBJECT_TENSOR_DATA_PTR",
    "TORCHINDUCTOR_CACHE_DIR",
}
_POOLS = ("ThreadPoolExecutor", "asyncio_", "AnyIO", "ScriptRunner", "MainThread", "tqdm")


def _left(before: set[threading.Thread]) -> list[str]:
    new = set(threading.enumerate()) - before
    return [thread.name for thread in new if thread.is_alive() and not thread.name.startswith(_POOLS)]


@pytest.fixture(scope="session", autouse=True)
def _xla_starts_before_any_backward():
    """XLA must be up before the first backward on the CPU, see core.devices.xla.initialise."""
    from core.devices.xla import initialise, xla_info

    # nothing here is timed, and programs that aren't optimised compile in half the time; also those of children
    os.environ.setdefault("XLA_FLAGS", "--xla_backend_optimization_level=0")
    if xla_info().available:
        initialise()


@pytest.fixture(scope="session", autouse=True)
def _dashboards_may_read_what_tests_make(tmp_path_factory):
    """The folder below which `tmp_path` lies is one that paths of browsers may lead into."""
    os.environ.setdefault("FINETUNE_ROOTS", str(tmp_path_factory.getbasetemp()))


@pytest.fixture
def store(tmp_path: Path):
    opened = Store(tmp_path / "home")
    yield opened
    opened.close()


@pytest.fixture
def pictures(tmp_path: Path) -> Path:
    """Two classes told apart by brightness: 17 training images, 9 validation images, 40 px."""
    import numpy as np
    from PIL import Image

    rng = np.random.default_rng(0)
    for split, counts in {"train": (9, 8), "val": (5, 4)}.items():
        for label, count in enumerate(counts):
            folder = tmp_path / "pictures" / split / ("dark", "light")[label]
            folder.mkdir(parents=True)
            for index in range(count):
                pixels = rng.integers(0, 100, (40, 40, 3)) + 150 * label
                Image.fromarray(pixels.astype("uint8")).save(folder / f"{index}.png")
    return tmp_path / "pictures"

"""What the doctor finds. A TPU, a GPU and a broken disk can't be had here: what they would tell is given as values."""

from __future__ import annotations

import errno
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import psutil
import pytest

from core.backup import BackupStatus
from core.config import make_config
from core.devices.base import DeviceInfo
from core.health import checks, doctor, home_checks
from core.health.doctor import device, examine
from core.health.findings import Finding, Report, by_state
from core.health.product import Product, ask
from core.machine import packages
from core.machine.packages import Mismatch
from core.store import Store
from tests.test_devices_tpu import COLAB

pytestmark = pytest.mark.long

ROOT = Path(__file__).parents[1]
GIB = home_checks.GIB
LOCAL = {"kind": "nvme", "filesystem": "ext4"}


def only(findings: list[Finding]) -> Finding:
    [finding] = findings
    return finding


def state_of(findings: list[Finding]) -> str:
    return only(findings).state


# -- the command ----------------------------------------------------------------------------------------------------


def test_the_command_looks_at_everything_and_says_what_to_do(tmp_path: Path):
    """On the real machine, the device cpu with a real product in a child."""
    command = [sys.executable, "-m", "core", "--home", str(tmp_path / "home"), "doctor", "--json"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=200)
    told = json.loads(done.stdout)
    states = {finding["check"]: finding["state"] for finding in told["checks"]}
    assert told["ok"] and done.returncode == 0, told
    assert {"versions", "packages", "device cpu", "memory", "disk", "home folder", "database", "tpu", "environment",
            "backup", "tunnel", "network huggingface.co", "network pypi.org"} <= states.keys()  # fmt: skip
    assert all(finding["fix"] for finding in told["checks"] if finding["state"] != "ok")
    [cpu] = [finding for finding in told["checks"] if finding["check"] == "device cpu"]
    assert "A matrix product took" in cpu["found"]
    assert [path.name for path in (tmp_path / "home").iterdir() if path.name.startswith(".doctor")] == []
    assert told["home"] == str(tmp_path / "home")


def test_a_problem_is_the_first_line_and_makes_the_status_1(tmp_path: Path):
    environment = {**os.environ, "XLA_USE_BF16": "1"}
    command = [sys.executable, "-m", "core", "--home", str(tmp_path), "doctor"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=200, env=environment)
    assert done.returncode == 1
    lines = done.stdout.splitlines()
    assert lines[1] == (
        "problem  environment: XLA_USE_BF16=1 silently changes every number that XLA computes. Unset XLA_USE_BF16."
    )
    assert lines[-1].startswith("1 problem, ")


def test_a_home_that_cannot_be_made_is_a_problem_and_the_rest_is_looked_at_all_the_same(tmp_path: Path, monkeypatch):
    (tmp_path / "file").write_text("no folder")
    monkeypatch.setattr(doctor, "ask", lambda kind, limit_s: Product("A CPU", 1.0, 0.1))
    monkeypatch.setattr(checks, "network", list)
    names: list[str] = []
    report = examine(tmp_path / "file" / "home", tell=lambda name, done, total: names.append(f"{name} {done} {total}"))
    wrong = {finding.check: finding for finding in report.findings if finding.state == "problem"}
    assert wrong.keys() == {"home folder", "database"} and not report.ok
    assert "can't be written: Not a directory." in wrong["home folder"].found
    assert "--home" in wrong["home folder"].fix
    assert len(names) == len(set(names)) and names[-1].endswith(f" {len(names)} {len(names)}")


def test_a_look_that_fails_is_a_finding_and_stops_nothing(tmp_path: Path, monkeypatch):
    def broken(kind: str) -> list[Finding]:
        raise ImportError("libcudart.so.12: cannot open shared object file\nmore")

    monkeypatch.setattr(checks, "versions", broken)
    monkeypatch.setattr(checks, "network", list)
    monkeypatch.setattr(doctor, "_DEVICES", ())
    first, *others = examine(tmp_path).findings
    assert (first.check, first.state, first.fix) == ("packages", "problem", "Run python -m core.runtime --install.")
    assert "ImportError: libcudart.so.12: cannot open shared object file." in first.found
    assert {"memory", "disk", "database"} <= {finding.check for finding in others}


def test_findings_stand_worst_first_and_else_in_their_order():
    found = [Finding(name, state, "") for name, state in (("a", "ok"), ("b", "warning"), ("c", "problem"), ("d", "ok"))]
    assert [finding.check for finding in by_state(found)] == ["c", "b", "a", "d"]
    report = Report(by_state(found), "this machine", "/home", 1.0)
    assert (report.ok, report.counts) == (False, {"problem": 1, "warning": 1, "ok": 2})


@pytest.mark.parametrize(("package", "kind", "state"), [
    ("timm", "cpu", "problem"), ("torch_xla", "gpu", "warning"), ("torch_xla", "tpu", "problem")
])  # fmt: skip
def test_packages_that_do_not_fit_are_told_with_the_command(monkeypatch, package: str, kind: str, state: str):
    wrong = [Mismatch(package, f"{package} doesn't fit.", "python -m pip install it")]
    monkeypatch.setattr(packages, "mismatches", lambda versions, kind: wrong)
    versions, finding = checks.versions(kind)
    assert versions.state == "ok" and "torch " in versions.found
    assert (finding.state, finding.found, finding.fix) == (
        state,
        f"{package} doesn't fit.",
        "Run python -m pip install it",
    )


# -- devices --------------------------------------------------------------------------------------------------------


def test_a_product_is_computed_in_a_child_and_checked():
    product = ask("cpu", 120)
    assert product.problem == "" and product.name and 0 < product.off < 1e-5


@pytest.mark.xla
def test_xla_is_tried_in_a_child_too():
    product = ask("xla", 180)
    assert product.problem == "" and product.off < 1e-5


def test_a_device_that_is_not_there_is_a_problem_in_a_line():
    assert ask("tpu", 120).problem.startswith("Device tpu is not available")


def test_a_child_that_hangs_is_killed_with_its_own_children(tmp_path: Path):
    hanging = "import subprocess, sys, time; print(subprocess.Popen(['sleep', '600']).pid, file=open(sys.argv[1], 'w'),"
    began = time.monotonic()
    product = ask(str(tmp_path / "pid"), 2.0, ("-c", f"{hanging} flush=True); time.sleep(600)"))
    assert product.problem == "it did not answer within 2 s" and time.monotonic() - began < 20
    grandchild = int((tmp_path / "pid").read_text())
    until = time.monotonic() + 5
    while psutil.pid_exists(grandchild) and psutil.Process(grandchild).status() != psutil.STATUS_ZOMBIE:
        assert time.monotonic() < until
        time.sleep(0.05)


@pytest.mark.parametrize(
    ("program", "words"),
    [
        (f"import os; os.kill(os.getpid(), {int(signal.SIGSEGV)})", "its process was ended by SIGSEGV"),
        ("import sys; sys.exit('the driver is too old')", "the driver is too old"),
        ("import os; os._exit(3)", "its process ended with status 3"),
    ],
)
def test_a_child_that_crashes_says_how(program: str, words: str):
    assert ask("cpu", 30, ("-c", program)).problem == words


def test_a_wrong_product_is_a_problem():
    info = DeviceInfo("cuda", "NVIDIA T4", True, memory_gib=15.0)
    wrong = Product("NVIDIA T4", 3.0, 0.1, 0.4, "its product is off by 0.4 of the largest value")
    finding = only(device(info, "gpu", multiply=lambda kind, limit_s: wrong))
    assert finding.state == "problem" and "off by 0.4" in finding.found and "another device" in finding.fix


def test_a_device_that_a_run_has_is_not_tried(store: Store, tmp_path: Path):
    run_id = store.create_run(make_config("quick"))
    assert store.claim(run_id, "cpu")
    for given in (store, None):
        finding = only(doctor._device("cpu", "cpu", store.home, given))
        assert finding.state == "ok" and finding.found.endswith("A run has it, so it was not tried.")


def test_a_tpu_is_not_tried_while_a_run_waits_that_might_want_it(store: Store, monkeypatch):
    # no TPU is here: that XLA's device is one is pretended
    monkeypatch.setattr("core.devices.xla.wants_tpu", lambda: True)
    info = DeviceInfo("xla", "TPU v5e", True)
    store.create_run(make_config("quick"))
    with doctor._turn(info, store.home, store) as why:
        assert why == "Runs are under way or wait, so it was not tried."
    monkeypatch.setattr("core.devices.xla.holds_tpu", lambda: True)
    with doctor._turn(info, store.home, store) as why:
        assert why.startswith("This process has started it")


@pytest.mark.parametrize("is_open", [True, False])
def test_a_run_that_begins_while_a_tpu_is_tried_waits_for_it_and_nothing_is_left(store: Store, monkeypatch, is_open):
    monkeypatch.setattr("core.devices.xla.wants_tpu", lambda: True)
    with doctor._turn(DeviceInfo("xla", "TPU v5e", True), store.home, store if is_open else None) as why:
        assert why == ""
        run_id = store.create_run(make_config("quick"))
        assert not store.claim(run_id, "xla")
        # another look meanwhile leaves it alone too
        with doctor._turn(DeviceInfo("xla", "TPU v5e", True), store.home, store) as other:
            assert other == "A run has it, so it was not tried."
    assert store.claim(run_id, "xla")
    assert [record.run_id for record in store.list_runs(with_probes=True)] == [run_id]


def test_an_accelerator_that_shows_and_cannot_be_used_is_a_problem_and_one_that_is_not_there_is_none():
    off = DeviceInfo("cuda", "NVIDIA GPU", False, "This torch has no CUDA. Install one that has.")
    finding = only(device(off, "gpu"))
    assert (finding.state, finding.fix) == ("problem", "Install one that has.")
    assert state_of(device(off, "cpu")) == "ok"
    assert state_of(device(DeviceInfo("xla", "TPU", False, "torch_xla is not installed."), "tpu")) == "problem"


def test_a_device_gets_the_time_that_its_start_takes():
    limits = []
    for info, kind in ((DeviceInfo("cpu", "A", True), "tpu"), (DeviceInfo("xla", "TPU v5e", True), "tpu")):
        device(info, kind, multiply=lambda kind, limit_s: limits.append(limit_s) or Product("A", 1.0, 0.1))
    assert limits == [doctor.PRODUCT_S, doctor.TPU_PRODUCT_S]


# -- memory, disk, home ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("gib", "state"), [(0.5, "problem"), (1.5, "warning"), (8.0, "ok")])
def test_little_memory_is_told(gib: float, state: str):
    assert state_of(home_checks.memory(int(gib * GIB))) == state


@pytest.mark.parametrize(("gib", "state"), [(0.5, "problem"), (3.0, "warning"), (8.0, "ok")])
def test_a_disk_that_is_nearly_full_is_told(gib: float, state: str):
    assert state_of(home_checks.disk(Path("/home/me/runs"), int(gib * GIB))) == state


@pytest.mark.parametrize(
    ("disk", "state", "words"),
    [
        (LOCAL, "ok", "nvme (ext4)"),
        ({"kind": "unknown", "filesystem": "overlay"}, "ok", "unknown kind (overlay)"),
        ({"kind": "network", "filesystem": "nfs4"}, "warning", "--backup"),
        ({"kind": "memory", "filesystem": "tmpfs"}, "warning", "switched off"),
    ],
)
def test_the_home_folder_is_written_read_back_and_left_as_it_was(tmp_path: Path, disk: dict, state: str, words: str):
    finding = only(home_checks.home_folder(tmp_path / "home", lambda folder: disk))
    assert finding.state == state and words in f"{finding.found} {finding.fix}"
    assert list((tmp_path / "home").iterdir()) == []


def test_a_drive_folder_on_colab_is_no_place_for_the_database(monkeypatch):
    # there is no /content here: the write is pretended
    monkeypatch.setattr(home_checks, "_write_and_read", lambda home: 0.01)
    monkeypatch.setattr(Path, "mkdir", lambda *args, **options: None)
    drive = Path("/content/drive/MyDrive/runs")
    assert (
        state_of(home_checks.home_folder(drive, lambda folder: {"kind": "unknown", "filesystem": "fuse"})) == "warning"
    )


def test_a_disk_that_is_full_is_told_with_what_to_do(tmp_path: Path, monkeypatch):
    def full(home: Path) -> float:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(home_checks, "_write_and_read", full)
    finding = only(home_checks.home_folder(tmp_path, lambda folder: LOCAL))
    assert finding.state == "problem" and "No space left" in finding.found and finding.fix.startswith("Free some space")


def test_sqlite_is_tried_with_a_writer_and_a_reader_and_nothing_is_left(tmp_path: Path):
    assert state_of(home_checks.database(tmp_path)) == "ok"
    assert list(tmp_path.iterdir()) == []


# -- network, TPU, environment, programs, backup ---------------------------------------------------------------------


def test_all_hosts_are_asked_at_once_and_one_that_hangs_costs_no_more_than_the_limit():
    hosts = {"good": "this", "gone": "weights", "slow": "packages"}

    def reach(host: str, limit_s: float) -> None:
        if host == "gone":
            raise OSError(errno.ENETUNREACH, "Network is unreachable")
        if host == "slow":
            time.sleep(1.0)

    began = time.monotonic()
    found = {finding.check: finding for finding in checks.network(hosts, 0.3, reach)}
    assert time.monotonic() - began < 0.9
    assert {check: finding.state for check, finding in found.items()} == {
        "network good": "ok",
        "network gone": "warning",
        "network slow": "warning",
    }
    assert "Network is unreachable" in found["network gone"].found and "weights" in found["network gone"].found
    assert "no answer within 0.3 s" in found["network slow"].found
    assert "quick start" in found["network gone"].fix


def test_the_tpus_own_problem_is_told_with_its_fix():
    assert state_of(checks.tpu(None, "")) == "ok"
    good = SimpleNamespace(problem="", name="TPU v5e", chips=1, source="TPU_ACCELERATOR_TYPE")
    assert only(checks.tpu(good, "")).found.startswith("TPU v5e, 1 chip, told by TPU_ACCELERATOR_TYPE")
    held = SimpleNamespace(problem="/dev/vfio/0 is held by process 7 (python). End it, or wait until it has ended.")
    finding = only(checks.tpu(held, ""))
    assert (finding.state, finding.fix) == ("problem", "End it, or wait until it has ended.")
    finding = only(checks.tpu(good, "libtpu is not installed. Install it with torch_xla[tpu]."))
    assert (finding.state, finding.fix) == ("problem", "Install it with torch_xla[tpu].")


@pytest.mark.parametrize(
    ("environ", "kind", "state"),
    [
        ({}, "cpu", "ok"),
        (COLAB, "tpu", "ok"),
        ({"XLA_USE_BF16": "1"}, "cpu", "problem"),
        ({"XLA_DOWNCAST_BF16": "1"}, "tpu", "problem"),
        ({"PJRT_DEVICE": "TPU"}, "tpu", "ok"),
        ({"PJRT_DEVICE": "TPU"}, "cpu", "problem"),
        ({"PJRT_DEVICE": "CPU"}, "cpu", "ok"),
        ({"PJRT_DEVICE": "CPU"}, "tpu", "warning"),
        ({"PJRT_DEVICE": "CUDA"}, "gpu", "problem"),
        ({"CUDA_VISIBLE_DEVICES": ""}, "gpu", "warning"),
        ({"CUDA_VISIBLE_DEVICES": "0"}, "gpu", "ok"),
    ],
)
def test_variables_that_spoil_a_run_are_named(environ: dict[str, str], kind: str, state: str):
    finding = only(checks.environment(environ, kind))
    assert finding.state == state
    assert state == "ok" or (finding.found.startswith(f"{next(iter(environ))}=") and finding.fix.startswith("Unset "))


def test_tunnel_programs_are_found_with_their_version(tmp_path: Path):
    for name, words in (("cloudflared", "cloudflared version 2026.10.0 (built 2026-10-02)"), ("ngrok", "")):
        program = tmp_path / name
        program.write_text(f"#!/bin/sh\necho '{words}'\n")
        program.chmod(0o755)
    finding = only(checks.tunnels("plain", "", tmp_path))
    assert f"{tmp_path}/cloudflared (2026.10.0)" in finding.found and "ngrok (version not told)" in finding.found
    assert state_of(checks.tunnels("plain", "", tmp_path / "none")) == "ok"
    assert state_of(checks.tunnels("colab", "", tmp_path / "none")) == "warning"


def test_a_backup_folder_that_is_named_and_was_never_used_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("FINETUNE_BACKUP", str(tmp_path / "backup"))
    finding = only(doctor._backup(tmp_path, "colab"))
    assert finding.found == f"Not made yet, in {tmp_path / 'backup'}. Nothing looks after it now."
    monkeypatch.delenv("FINETUNE_BACKUP")
    assert state_of(doctor._backup(tmp_path, "plain")) == "ok"


def test_how_the_backup_stands_is_told():
    kept = {"folder": "/drive/runs", "at": 1000.0, "runs": 2, "is_kept": True}
    assert state_of(checks.backup(None, "plain", 1060.0)) == "ok"
    assert state_of(checks.backup(None, "colab", 1060.0)) == "warning"
    finding = only(checks.backup(BackupStatus(**kept), "colab", 1060.0))
    assert (finding.state, finding.found) == ("ok", "Last made 60 s ago, 2 runs, in /drive/runs.")
    failing = BackupStatus(**kept, problem="Drive is full.", fix="Empty its bin.")
    finding = only(checks.backup(failing, "colab", 1060.0))
    assert (finding.state, finding.fix) == ("problem", "Empty its bin.") and finding.found.startswith("Drive is full.")
    assert "--backup" in only(checks.backup(BackupStatus("/drive/runs"), "colab", 1060.0)).fix

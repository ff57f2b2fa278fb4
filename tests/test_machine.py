"""What is recorded of a machine; disks and control groups are told from files as the kernel writes them."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import psutil
import pytest

from core.machine.accelerators import gpu_facts
from core.machine.facts import cpu_limit, cpu_max_mhz, disk_of, environment, load


class Kernel:
    """Folders that stand for /proc and /sys."""

    def __init__(self, root: Path) -> None:
        self.proc, self.sysfs, self.home = root / "proc", root / "sys", root / "some home"
        for folder in (self.proc / "self", self.sysfs / "dev/block", self.sysfs / "class/block", self.home):
            folder.mkdir(parents=True)
        self.mount(Path("/"), "0:99", "overlay", "overlay")

    def mount(self, point: Path, device: str, filesystem: str, source: str) -> None:
        written = str(point).replace(" ", "\\040")
        line = f"36 35 {device} / {written} rw,noatime shared:1 master:2 - {filesystem} {source} rw,errors=continue\n"
        with (self.proc / "self/mountinfo").open("a") as file:
            file.write(line)

    def disk(self, number: str, name: str, rotational: int, *, made_of: tuple[Path, ...] = ()) -> Path:
        folder = self.sysfs / "devices" / name
        (folder / "queue").mkdir(parents=True)
        (folder / "queue/rotational").write_text(f"{rotational}\n")
        (folder / "slaves").mkdir()
        for part in made_of:
            (folder / "slaves" / part.name).symlink_to(part)
        return self._list(folder, number)

    def partition(self, number: str, disk: Path, name: str) -> Path:
        folder = disk / name
        folder.mkdir()
        (folder / "partition").write_text("1\n")
        return self._list(folder, number)

    def _list(self, folder: Path, number: str) -> Path:
        (folder / "dev").write_text(number + "\n")
        (self.sysfs / "dev/block" / number).symlink_to(folder)
        (self.sysfs / "class/block" / folder.name).symlink_to(folder)
        return folder

    def told(self) -> dict[str, str]:
        return disk_of(self.home, self.proc, self.sysfs)


@pytest.fixture
def kernel(tmp_path: Path) -> Kernel:
    return Kernel(tmp_path)


@pytest.mark.parametrize(
    ("name", "rotational", "kind"),
    [("nvme0n1", 0, "nvme"), ("sda", 0, "ssd"), ("sda", 1, "hdd"), ("zram0", 0, "memory")],
)
def test_a_folder_lies_on_the_disk_of_its_partition(kernel: Kernel, name: str, rotational: int, kind: str):
    kernel.partition("8:1", kernel.disk("8:0", name, rotational), f"{name}p1")
    kernel.mount(kernel.home, "8:1", "ext4", f"/dev/{name}p1")
    assert kernel.told() == {"kind": kind, "filesystem": "ext4"}


def test_mapped_devices_are_followed_to_their_disk(kernel: Kernel):
    partition = kernel.partition("259:2", kernel.disk("259:0", "nvme0n1", 0), "nvme0n1p2")
    encrypted = kernel.disk("253:0", "dm-0", 0, made_of=(partition,))
    kernel.disk("253:1", "dm-1", 0, made_of=(encrypted,))
    kernel.mount(kernel.home, "253:1", "xfs", "/dev/mapper/data")
    assert kernel.told() == {"kind": "nvme", "filesystem": "xfs"}


@pytest.mark.parametrize(("second", "kind"), [(1, "hdd"), (0, "unknown")])
def test_an_array_is_of_a_kind_where_all_its_disks_are(kernel: Kernel, second: int, kind: str):
    disks = (kernel.disk("8:0", "sda", 1), kernel.disk("8:16", "sdb", second))
    kernel.disk("9:0", "md0", 1, made_of=disks)
    kernel.mount(kernel.home, "9:0", "ext4", "/dev/md0")
    assert kernel.told()["kind"] == kind


def test_a_file_system_with_a_number_of_its_own_is_found_by_its_source(kernel: Kernel):
    kernel.partition("8:2", kernel.disk("8:0", "sda", 0), "sda2")
    kernel.mount(kernel.home, "0:25", "btrfs", "/dev/sda2")
    assert kernel.told() == {"kind": "ssd", "filesystem": "btrfs"}


@pytest.mark.parametrize(
    ("filesystem", "kind"),
    [
        ("tmpfs", "memory"),
        ("nfs4", "network"),
        ("cifs", "network"),
        ("fuse.sshfs", "network"),
        ("fuse.portal", "unknown"),
        ("9p", "unknown"),
        ("overlay", "unknown"),
    ],
)
def test_where_no_disk_is_told_the_file_system_tells_or_nothing(kernel: Kernel, filesystem: str, kind: str):
    kernel.mount(kernel.home, "0:50", filesystem, "somewhere:/data")
    assert kernel.told() == {"kind": kind, "filesystem": filesystem}


def test_the_innermost_mount_counts_and_of_two_on_one_folder_the_later(kernel: Kernel):
    kernel.disk("8:0", "sda", 1)
    kernel.mount(kernel.home.parent, "8:0", "ext4", "/dev/sda")
    kernel.mount(kernel.home / "inside", "0:51", "nfs", "far:/away")
    kernel.mount(kernel.home.with_name("some"), "0:52", "nfs", "far:/away")
    assert kernel.told() == {"kind": "hdd", "filesystem": "ext4"}
    kernel.mount(kernel.home.parent, "0:53", "tmpfs", "tmpfs")
    assert kernel.told() == {"kind": "memory", "filesystem": "tmpfs"}


@pytest.mark.parametrize(("name", "flags"), [("vda", ""), ("sda", "fpu vme hypervisor lahf_lm")])
def test_a_virtual_disk_that_says_nothing_passes_for_no_turning_one(kernel: Kernel, name: str, flags: str):
    (kernel.proc / "cpuinfo").write_text(f"model name\t: Some\nflags\t\t: {flags}\nbogomips\t: 1\n")
    kernel.disk("254:0", name, 1)
    kernel.mount(kernel.home, "254:0", "ext4", f"/dev/{name}")
    assert kernel.told()["kind"] == "unknown"


def test_without_the_kernels_files_a_disk_is_unknown(tmp_path: Path):
    assert disk_of(tmp_path, tmp_path / "none", tmp_path / "none") == {"kind": "unknown", "filesystem": ""}


def test_the_disk_of_a_real_folder_is_told_in_one_of_the_words(tmp_path: Path):
    told = disk_of(tmp_path)
    assert told["kind"] in ("nvme", "ssd", "hdd", "network", "memory", "unknown")
    if Path("/proc/self/mountinfo").exists():
        assert told["filesystem"] == filesystem_of(tmp_path)


def filesystem_of(folder: Path) -> str:
    """The file system as psutil knows it."""
    around = [part for part in psutil.disk_partitions(all=True) if folder.resolve().is_relative_to(part.mountpoint)]
    return max(reversed(around), key=lambda part: len(part.mountpoint)).fstype


@pytest.mark.parametrize(
    ("files", "limit"),
    [
        ({"cpu.max": "150000 100000"}, 1.5),
        ({"cpu.max": "max 100000"}, None),
        ({"app/job/cpu.max": "max 100000", "app/cpu.max": "400000 100000", "cpu.max": "800000 100000"}, 4.0),
        ({}, None),
    ],
)
def test_the_smallest_quota_above_a_process_is_its_limit(tmp_path: Path, files: dict[str, str], limit: float | None):
    write(tmp_path / "proc", {"self/cgroup": "0::/app/job\n"})
    write(tmp_path / "groups", files)
    assert cpu_limit(tmp_path / "proc", tmp_path / "groups") == limit


@pytest.mark.parametrize(("quota", "limit"), [("50000", 0.5), ("-1", None)])
def test_control_groups_of_version_1_limit_too(tmp_path: Path, quota: str, limit: float | None):
    write(tmp_path / "proc", {"self/cgroup": "4:memory:/\n3:cpu,cpuacct:/docker/abc\n1:name=systemd:/\n0::/\n"})
    write(tmp_path / "groups", {"cpu/cpu.cfs_quota_us": quota, "cpu/cpu.cfs_period_us": "100000"})
    assert cpu_limit(tmp_path / "proc", tmp_path / "groups") == limit


def write(root: Path, files: dict[str, str]) -> None:
    for name, text in files.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(text)


def test_the_highest_clock_is_told_in_mhz_where_it_can_be_read(tmp_path: Path):
    assert cpu_max_mhz(tmp_path) is None
    write(tmp_path, {"devices/system/cpu/cpu0/cpufreq/cpuinfo_max_freq": "3700000\n"})
    assert cpu_max_mhz(tmp_path) == 3700.0


def test_the_load_is_that_of_other_processes():
    told = load()
    assert 0 <= told["cpu_percent"] <= 100
    assert told["load_1m"] == pytest.approx(psutil.getloadavg()[0], abs=1)


def test_the_record_keeps_its_old_keys_and_is_plain_json(tmp_path: Path):
    record = environment(tmp_path)
    assert {"python", "system", "cpu", "cores", "threads", "memory_gib", "torch"} <= record.keys()
    assert record["disk"] == disk_of(tmp_path)
    assert record["load_at_start"].keys() == {"cpu_percent", "load_1m"}
    assert record.get("physical_cores", 1) <= record["cores"]
    assert json.loads(json.dumps(record)) == record
    assert "disk" not in environment()


def test_a_fact_that_cannot_be_read_is_left_out_and_fails_nothing(tmp_path: Path, monkeypatch):
    def broken():
        raise OSError("not here")

    monkeypatch.setattr("psutil.getloadavg", broken)
    record = environment(tmp_path)
    assert "load_at_start" not in record
    assert record["disk"] == disk_of(tmp_path)


def test_where_a_card_answers_its_driver_is_told(monkeypatch):
    """No card is here: a stand-in speaks for torch and for NVIDIA's library."""

    class Nvml:
        def nvmlInit(self):
            pass

        def nvmlShutdown(self):
            pass

        def nvmlSystemGetDriverVersion(self):
            return "570.86.15"

    monkeypatch.setattr("torch.cuda.is_available", lambda: True)
    monkeypatch.setattr("torch.version.cuda", "12.8")
    monkeypatch.setitem(sys.modules, "pynvml", Nvml())
    assert gpu_facts() == {"gpu_driver": "570.86.15", "cuda": "12.8"}
    assert environment()["gpu_driver"] == "570.86.15"

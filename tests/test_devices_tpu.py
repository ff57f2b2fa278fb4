"""A TPU is found, and found wanting, from files alone. No TPU is here: the files are as the kernel writes them."""

from __future__ import annotations

import os
import signal
import subprocess
import time
from pathlib import Path

import pytest

from core.machine.tpu import XLA_START, TpuFound, find_tpu, library_problem, trial_start

# as the three platforms set them
COLAB = {
    "COLAB_TPU_1VM": "1",
    "TPU_ACCELERATOR_TYPE": "v5e-1",
    "TPU_CHIPS_PER_HOST_BOUNDS": "2,2,1",
    "TPU_HOST_BOUNDS": "1,1,1",
    "TPU_SKIP_MDS_QUERY": "1",
    "TPU_WORKER_HOSTNAMES": "localhost",
}
KAGGLE = {
    "TPU_PROCESS_ADDRESSES": "local",
    "TPU_ACCELERATOR_TYPE": "v5litepod-8",
    "TPU_HOST_BOUNDS": "1,1,1",
    "TPU_WORKER_HOSTNAMES": "localhost",
}
COLAB_WITHOUT_TPU = {"COLAB_TPU_1VM": ""}


class Machine:
    """Folders that stand for /sys/bus/pci/devices, /dev and /proc."""

    def __init__(self, root: Path) -> None:
        self.sysfs, self.dev, self.proc = root / "devices", root / "dev", root / "proc"
        for folder in (self.sysfs, self.dev, self.proc):
            folder.mkdir()

    def chip(self, address: str, device: str, *, subsystem: str = "0x0000", vendor: str = "0x1ae0", group: str = ""):
        folder = self.sysfs / address
        folder.mkdir()
        (folder / "vendor").write_text(vendor + "\n")
        (folder / "device").write_text(device + "\n")
        (folder / "subsystem_device").write_text(subsystem + "\n")
        if group:
            (folder / "iommu_group").symlink_to(f"../../../../kernel/iommu_groups/{group}")

    def node(self, name: str) -> Path:
        path = self.dev / name
        path.parent.mkdir(exist_ok=True)
        path.touch()
        return path

    def process(self, pid: int, *, holds: Path, command: str = "", comm: str = "", parent: int = 1) -> None:
        folder = self.proc / str(pid)
        (folder / "fd").mkdir(parents=True)
        (folder / "fd" / "0").symlink_to("/dev/null")
        (folder / "fd" / "7").symlink_to(holds)
        (folder / "cmdline").write_text("".join(word + "\0" for word in command.split()))
        (folder / "comm").write_text(comm + "\n")
        (folder / "stat").write_text(f"{pid} (a (b) c) S {parent} 1 1 0 -1")

    def find(self, environ: dict[str, str] | None = None, **options) -> TpuFound | None:
        return find_tpu(self.sysfs, self.dev, environ or {}, proc=self.proc, **options)


@pytest.fixture
def machine(tmp_path: Path) -> Machine:
    return Machine(tmp_path)


@pytest.fixture
def v5e(machine: Machine) -> Machine:
    """Four chips of v5e, passed through by VFIO."""
    for place in range(4):
        machine.chip(f"0000:00:0{place + 4}.0", "0x0063", group=str(place))
        machine.node(f"vfio/{place}")
    machine.node("vfio/vfio")
    return machine


class TestWhatIsHere:
    def test_a_machine_without_one_has_none(self, machine: Machine):
        machine.chip("0000:00:03.0", "0x0042")  # Google's network card
        machine.chip("0000:00:04.0", "0x0063", vendor="0x10de")
        machine.node("vfio/3")  # something else that is passed through
        (machine.dev / "accel").mkdir()  # other vendors' accelerators have a folder of this name
        machine.node("accel/accel0")
        assert machine.find(COLAB_WITHOUT_TPU) is None

    def test_a_machine_without_any_of_the_folders_has_none(self, tmp_path: Path):
        assert find_tpu(tmp_path / "a", tmp_path / "b", {}, proc=tmp_path / "c") is None

    @pytest.mark.parametrize(
        ("device", "subsystem", "kind", "memory_gib"),
        [
            ("0x0027", "0x004e", "v2", 16),
            ("0x0027", "0x004f", "v3", 32),
            ("0x0027", "0x0001", "v2 or v3", None),
            ("0x005e", "0x0000", "v4", 32),
            ("0x0063", "0x0000", "v5e", 16),
            ("0x0062", "0x0000", "v5p", 95),
            ("0x006f", "0x0000", "v6e", 32),
            ("0x0076", "0x0000", "v7", 192),
        ],
    )
    def test_the_bus_tells_kind_and_memory(self, machine: Machine, device, subsystem, kind, memory_gib):
        machine.chip("0000:00:04.0", device, subsystem=subsystem)
        node = machine.node("accel0")
        expected = TpuFound(kind, 1, memory_gib, "PCI bus", nodes=(str(node),))
        assert machine.find() == expected and expected.name == f"TPU {kind}"

    def test_where_the_bus_leaves_it_open_the_environment_decides(self, machine: Machine):
        machine.chip("0000:00:04.0", "0x0027")
        machine.node("accel0")
        assert machine.find({"TPU_ACCELERATOR_TYPE": "v3-8"}).kind == "v3"

    def test_chips_are_counted_by_the_files_that_are_there(self, v5e: Machine):
        assert v5e.find().chips == 4
        (v5e.dev / "vfio" / "3").unlink()  # a container was given three of them
        assert v5e.find().chips == 3 and v5e.find().problem == ""

    def test_two_functions_of_one_address_are_one_chip_of_v7(self, machine: Machine):
        for address, group in [("0000:00:04.0", "8"), ("0000:00:04.1", "9"), ("0000:00:05.0", "10")]:
            machine.chip(address, "0x0076", group=group)
            machine.node(f"vfio/{group}")
        found = machine.find()
        assert (found.kind, found.chips, len(found.nodes)) == ("v7", 2, 3)

    def test_a_process_sees_the_chips_it_is_given(self, v5e: Machine):
        found = v5e.find({"TPU_VISIBLE_CHIPS": "1,3"})
        assert found.chips == 2 and [Path(node).name for node in found.nodes] == ["1", "3"]
        assert "TPU_VISIBLE_DEVICES=7" in v5e.find({"TPU_VISIBLE_DEVICES": "7"}).problem

    @pytest.mark.parametrize(
        ("environ", "kind", "chips"),
        [
            (COLAB, "v5e", 1),
            (KAGGLE, "v5e", 8),
            ({"TPU_PROCESS_ADDRESSES": "local"}, "", 1),
            ({"COLAB_TPU_1VM": "1"}, "", 1),
            ({"TPU_ACCELERATOR_TYPE": "v6e-8"}, "v6e", 8),
            # the number counts cores here, two a chip
            ({"TPU_ACCELERATOR_TYPE": "v2-8"}, "v2", 4),
            ({"TPU_ACCELERATOR_TYPE": "v4-8"}, "v4", 4),
            ({"TPU_ACCELERATOR_TYPE": "v5p-8"}, "v5p", 4),
            ({"TPU_ACCELERATOR_TYPE": "tpu7x-8"}, "v7", 4),
            ({"TPU_ACCELERATOR_TYPE": "tpu7x"}, "v7", 1),
            # a slice over several hosts; this one holds its share
            ({"TPU_ACCELERATOR_TYPE": "v5litepod-16", "TPU_HOST_BOUNDS": "2,2,1"}, "v5e", 4),
            ({"TPU_ACCELERATOR_TYPE": "v4-16", "TPU_WORKER_HOSTNAMES": "a,b"}, "v4", 4),
        ],
    )
    def test_the_environment_tells_where_the_bus_is_hidden(self, machine: Machine, environ, kind, chips):
        found = machine.find(environ)
        assert (found.kind, found.chips) == (kind, chips) and found.source in environ

    def test_files_count_more_than_the_environment(self, machine: Machine):
        machine.node("vfio/0")
        found = machine.find(KAGGLE)
        assert (found.chips, found.problem) == (1, "") and found.nodes == (str(machine.dev / "vfio" / "0"),)

    def test_numbered_files_alone_are_a_tpu_of_unknown_kind(self, machine: Machine):
        for place in (0, 1, 2, 10):
            machine.node(f"accel{place}")
        found = machine.find()
        assert (found.name, found.chips, found.memory_gib_per_chip, found.source) == ("TPU", 4, None, "/dev")
        assert [Path(node).name for node in found.nodes] == ["accel0", "accel1", "accel2", "accel10"]


class TestWhatSpeaksAgainstIt:
    def test_a_chip_without_its_file_can_not_be_reached(self, machine: Machine):
        machine.chip("0000:00:04.0", "0x0063", group="0")
        found = machine.find()
        assert found.chips == 1 and "has no file for it" in found.problem and "--privileged" in found.problem

    def test_a_variable_without_a_chip_is_named(self, machine: Machine):
        assert machine.find(COLAB).problem.startswith("TPU_ACCELERATOR_TYPE names a TPU, but none shows")

    @pytest.mark.parametrize("closed", ["2", "vfio"])
    def test_a_file_that_may_not_be_opened_is_named(self, v5e: Machine, closed: str):
        # root, who runs some test suites, may open everything; so the answer is planted
        found = v5e.find(access=lambda path, mode: path.name != closed and mode == os.R_OK | os.W_OK)
        assert f"{v5e.dev / 'vfio' / closed} may not be opened" in found.problem and "chmod" in found.problem

    def test_a_closed_file_of_a_chip_that_is_not_ours_does_not_matter(self, v5e: Machine):
        found = v5e.find({"TPU_VISIBLE_CHIPS": "0"}, access=lambda path, _: path.name != "2")
        assert found.problem == ""

    @pytest.mark.parametrize(
        ("command", "shown"),
        [
            ("/usr/bin/python3.11 -u /home/me/train.py --token secret", "python3.11 train.py"),
            ("python -m core train", "python -m core"),
            ("python -c pass", "python -c"),
            ("/opt/server --password secret", "server"),
            ("", "kernel name"),
        ],
    )
    def test_who_holds_a_chip_is_named_without_its_arguments(self, v5e: Machine, command: str, shown: str):
        node = v5e.dev / "vfio" / "1"
        v5e.process(4711, holds=node, command=command, comm="kernel name")
        expected = f"{node} is held by process 4711 ({shown}). End it, or wait until it has ended."
        assert v5e.find().problem == expected

    def test_this_process_and_its_children_may_hold_it(self, v5e: Machine):
        node = v5e.dev / "vfio" / "1"
        v5e.process(os.getpid(), holds=node)
        v5e.process(4711, holds=node, parent=os.getpid())
        v5e.process(4712, holds=node, parent=4711)
        assert v5e.find().problem == ""

    @pytest.mark.skipif(not Path("/proc/self/fd").is_dir(), reason="this system has no /proc")
    def test_a_real_holder_is_seen_in_proc_and_the_file_stays_closed(self, machine: Machine):
        machine.chip("0000:00:04.0", "0x005e")
        os.mkfifo(machine.dev / "accel0")  # opening it for reading would block for ever
        opened = os.open(machine.dev / "accel0", os.O_RDWR)
        child = subprocess.Popen(["sleep", "30"], pass_fds=(opened,))
        # its parent, the shell, ends at once, so that it is no descendant of ours any more
        command = ["sh", "-c", "sleep 30 >/dev/null 2>&1 & echo $!"]
        stranger = int(subprocess.run(command, pass_fds=(opened,), capture_output=True, check=True).stdout)
        os.close(opened)
        try:
            assert f"held by process {stranger} (sleep)" in find_tpu(machine.sysfs, machine.dev, {}).problem
            os.kill(stranger, signal.SIGKILL)
            assert _is_gone(stranger)
            assert find_tpu(machine.sysfs, machine.dev, {}).problem == ""
        finally:
            child.kill()
            child.wait()


class TestTheLibrary:
    def test_a_named_library_must_be_there(self, tmp_path: Path):
        assert "which is not there" in library_problem({"TPU_LIBRARY_PATH": str(tmp_path / "libtpu.so")})
        (tmp_path / "libtpu.so").touch()
        assert library_problem({"TPU_LIBRARY_PATH": str(tmp_path / "libtpu.so")}) == ""

    def test_an_installed_package_is_enough(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
        (tmp_path / "libtpu").mkdir()
        (tmp_path / "libtpu" / "__init__.py").write_text("raise RuntimeError('was imported')")
        monkeypatch.syspath_prepend(tmp_path)
        assert library_problem({}) == ""


class TestTheTrialStart:
    def test_a_start_that_works_says_nothing(self):
        program = "import os\nassert os.environ['PJRT_DEVICE'] == 'TPU' and 'TPU_SKIP_MDS_QUERY' not in os.environ"
        kept = {name: value for name, value in os.environ.items() if name != "TPU_SKIP_MDS_QUERY"}
        assert trial_start(30, program=program, environ=kept) == ""

    @pytest.mark.parametrize(
        ("program", "reason"),
        [
            ("raise OSError('libtpu not found')", "OSError: libtpu not found. Install libtpu"),
            (
                "raise RuntimeError('TPU initialization failed: open(/dev/vfio/0): Device or resource busy')",
                "RuntimeError: TPU initialization failed: open(/dev/vfio/0): Device or resource busy. End the process",
            ),
            ("print('E0000 a line'); raise ValueError('x' * 500)", "ValueError: " + "x" * 285 + "."),
            ("import os; os.abort()", "Aborted (signal 6)."),
            (
                "import os; print('F0000 x.cc:533] Check failed: no device', '@ 0x7f: frame', sep='\\n', flush=True);"
                "os.abort()",
                "Check failed: no device.",
            ),
            ("import sys; sys.exit(3)", "status 3."),
            ("import sys; sys.exit('No chip.')", "No chip."),
        ],
    )
    def test_a_start_that_fails_gives_its_reason_in_one_line(self, program: str, reason: str):
        said = trial_start(30, program=program)
        assert said.startswith(reason) and "\n" not in said

    def test_a_start_that_blocks_holding_the_interpreter_is_ended_with_its_children(self, tmp_path: Path):
        # libtpu does this where no metadata server answers: no signal handler and no thread of Python gets a turn
        program = (
            "import ctypes, os, subprocess\n"
            "child = subprocess.Popen(['sleep', '60'])\n"
            f"open({str(tmp_path / 'pids')!r}, 'w').write(f'{{os.getpid()}} {{child.pid}}')\n"
            "ctypes.PyDLL(None).sleep(60)"
        )
        began = time.monotonic()
        said = trial_start(2.5, program=program)
        assert said == "The runtime did not answer within 2.5 s."
        assert time.monotonic() - began < 6
        for pid in map(int, (tmp_path / "pids").read_text().split()):
            assert _is_gone(pid)

    def test_a_child_that_outlives_its_parent_does_not_hold_the_answer_up(self):
        began = time.monotonic()
        said = trial_start(
            30, program="import subprocess; print(subprocess.Popen(['sleep', '3']).pid); raise OSError(1)"
        )
        assert "OSError: 1" in said and time.monotonic() - began < 3

    @pytest.mark.xla
    def test_torch_xla_itself_is_ended_in_time(self):
        # wherever it is by then: importing, or asking for metadata
        began = time.monotonic()
        assert "within 0.5 s" in trial_start(0.5)
        assert time.monotonic() - began < 5

    @pytest.mark.xla
    def test_the_program_takes_no_other_device_for_a_tpu(self):
        with pytest.raises(RuntimeError, match="torch_xla took CPU:0 for the TPU"):
            exec(XLA_START, {})


def _is_gone(pid: int) -> bool:
    """Whether a process has ended; one that nobody has waited for yet counts."""
    deadline = time.monotonic() + 3
    while time.monotonic() < deadline:
        try:
            state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
        except OSError:
            return True
        if state == "Z":
            return True
        time.sleep(0.02)
    os.kill(pid, signal.SIGKILL)
    return False

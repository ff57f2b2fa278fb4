"""What a runtime is, lacks and needs. No TPU, GPU or Colab is here: their signs and versions are given as values."""

from __future__ import annotations

import os
import subprocess
import sys
import venv
import zipfile
from pathlib import Path
from types import SimpleNamespace

import pytest

from core import runtime
from core.errors import AppError
from core.machine.packages import PIP, WHEELS, Mismatch, fits, installed, mismatches, needed
from core.runtime import Plan, carry_out, find_runtime, main, plan

ROOT = Path(__file__).parents[1]
COMMON = {item.name.lower(): next(iter(item.specifier)).version for item in needed(ROOT / "requirements-common.txt")}
GOOD = {**COMMON, "torch": "2.9.1", "torchvision": "0.24.1", "torch-xla": "2.9.0"}
COLAB_GPU = {**COMMON, "torch": "2.8.0+cu126", "torchvision": "0.23.0+cu126"}
ASKS = {"0.24.1": ["torch (==2.9.1)"], "0.23.0+cu126": ["torch (==2.8.0)"], "0.23.0": ["torch (==2.8.0)"]}


def asking(versions: dict[str, str], **more: list[str]):
    """What wheels of these versions ask for, of torchvision as its releases do."""
    return lambda name: more.get(name) or (ASKS[versions["torchvision"]] if name == "torchvision" else [])


def found(tmp_path: Path, environ: dict[str, str], *, tpu: object = None, smi: str = "", colab: bool = False):
    return find_runtime(
        environ, tmp_path, find_tpu=lambda: tpu, which=lambda name: smi or None, has_module=lambda name: colab
    )


def test_signs_tell_kind_and_place(tmp_path: Path):
    tpu = SimpleNamespace(problem="")
    assert found(tmp_path, {}).words == "this machine with no accelerator"
    colab = found(tmp_path, {"COLAB_RELEASE_TAG": "release-colab_20261105"}, tpu=tpu)
    assert (colab.kind, colab.place) == ("tpu", "colab")
    assert found(tmp_path, {}, colab=True, smi="/usr/bin/nvidia-smi").words == "Google Colab with an NVIDIA GPU"
    assert found(tmp_path, {"KAGGLE_KERNEL_RUN_TYPE": "Interactive"}).place == "kaggle"
    (tmp_path / "driver/nvidia/gpus/0000:00:04.0").mkdir(parents=True)
    assert found(tmp_path, {}).kind == "gpu"


def test_a_tpu_that_cannot_be_used_is_told(tmp_path: Path):
    held = SimpleNamespace(problem="/dev/vfio/0 is held by process 7 (python). End it.")
    assert found(tmp_path, {}, tpu=held).problem.startswith("/dev/vfio/0 is held")


def test_it_can_be_asked_before_anything_is_installed(tmp_path: Path):
    """A Python of its own, with nothing but what venv gives."""
    venv.create(tmp_path / "bare", with_pip=True)
    python = tmp_path / "bare" / "bin" / "python"
    done = subprocess.run([python, "-m", "core.runtime"], cwd=ROOT, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    assert "torch is not installed." in done.stdout
    assert done.stdout.splitlines()[-1] == "python -m pip install -r requirements.txt"


def test_what_fits_is_left_alone():
    for kind in ("cpu", "gpu", "tpu"):
        assert mismatches(GOOD, asking(GOOD), kind=kind) == []
        assert plan(kind, GOOD, asking(GOOD)).commands == ()
    assert mismatches() == [] and plan("cpu").commands == (), "this very environment"


def test_torchvision_that_asks_for_another_torch_is_named_with_the_command_that_mends_it():
    versions = {**GOOD, "torch": "2.8.0+cu126", "torch-xla": "2.8.0"}
    [wrong] = mismatches(versions, asking(versions))
    assert wrong.found == "torchvision 0.24.1 asks for torch==2.9.1, and 2.8.0+cu126 is installed."
    index = "--extra-index-url https://download.pytorch.org/whl/cu126"
    assert wrong.command == f"python -m pip install torchvision torch==2.8.0+cu126 {index}"


def test_torch_and_torch_xla_must_agree_in_their_first_two_numbers():
    assert fits("2.9.1+cu126", "2.9.0") and not fits("2.10.0", "2.9.0")
    versions = {**GOOD, "torch-xla": "2.8.1"}
    [wrong] = mismatches(versions, asking(versions), kind="tpu")
    assert "torch_xla 2.8.1 doesn't fit torch 2.9.1" in wrong.found and "-r requirements.txt" in wrong.command
    [wrong] = mismatches(versions, asking(versions), kind="gpu")
    assert wrong.command == "python -m pip uninstall -y torch_xla"


def test_what_is_missing_or_too_old_of_the_requirements_file_is_named(tmp_path: Path):
    versions = {name: version for name, version in {**GOOD, "plotly": "5.24.1"}.items() if name != "streamlit"}
    wrong = {item.package: item for item in mismatches(versions, asking(versions))}
    assert wrong.keys() == {"streamlit", "plotly"}
    assert wrong["plotly"].found == "plotly is 5.24.1, and plotly<8,>=7.1 is needed."
    assert wrong["plotly"].command.startswith("python -m pip install 'plotly<8,>=7.1' torch==2.9.1")


def test_a_package_that_asks_for_another_version_of_any_other_is_named():
    wrong = mismatches(GOOD, asking(GOOD, streamlit=["numpy (<1.25)", "rich (<1) ; extra == 'all'"]))
    assert [item.found for item in wrong] == [
        f"streamlit {GOOD['streamlit']} asks for numpy<1.25, and {GOOD['numpy']} is installed."
    ]


def test_the_torch_of_a_gpu_runtime_stays_whatever_else_comes():
    versions = {name: version for name, version in COLAB_GPU.items() if name != "streamlit"}
    made = plan("gpu", versions, asking(versions))
    assert made.words[0] == "torch 2.8.0+cu126 stays."
    pins = ("torch==2.8.0+cu126", "torchvision==0.23.0+cu126")
    assert made.commands == ((*PIP, "-r", "requirements-common.txt", *pins),)


def test_a_missing_torchvision_is_taken_from_where_builds_of_that_torch_lie():
    versions = {name: version for name, version in COLAB_GPU.items() if name != "torchvision"}
    [command] = plan("gpu", versions, asking(versions)).commands
    assert command[4:] == ("torchvision", "torch==2.8.0+cu126", "--extra-index-url", f"{WHEELS}cu126")


def test_without_torch_all_of_the_requirements_come():
    assert plan("cpu", COMMON, asking(COMMON)).commands == ((*PIP, "-r", "requirements.txt"),)


def test_a_tpu_runtime_keeps_a_torch_xla_that_fits_and_else_gets_the_matched_set():
    older = {**GOOD, "torch": "2.8.0", "torchvision": "0.23.0", "torch-xla": "2.8.1", "plotly": "5.24.1"}
    made = plan("tpu", older, asking(older))
    assert made.words[0] == "torch 2.8.0 stays, with torch_xla 2.8.1."
    assert [command[4:6] for command in made.commands] == [("-r", "requirements-common.txt")]
    assert "torch-xla==2.8.1" in made.commands[0]
    whole = (*PIP, "-r", "requirements.txt", "torch_xla[tpu]")
    newer = {**COLAB_GPU, "torch": "2.11.0", "torch-tpu": "0.2.0"}
    for versions, commands in (
        (COLAB_GPU, (whole,)),
        ({**GOOD, "torch-xla": "2.8.1"}, (whole,)),
        (newer, (("python", "-m", "pip", "uninstall", "-y", "torch_tpu"), whole)),
    ):
        assert plan("tpu", versions, asking({**versions, "torchvision": "0.23.0"})).commands == commands


def test_the_requirements_are_read_from_the_files_themselves():
    names = {item.name for item in needed(ROOT / "requirements.txt")}
    assert {"torch", "torchvision", "timm", "streamlit"} <= names
    assert not {item.name for item in needed(ROOT / "requirements-common.txt")} & {"torch", "torchvision"}


def wheel(folder: Path, name: str, version: str, *asks: str) -> None:
    """A wheel with nothing in it but what it is and what it asks for."""
    info = f"{name}-{version}.dist-info"
    metadata = [f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}", *(f"Requires-Dist: {ask}" for ask in asks)]
    with zipfile.ZipFile(folder / f"{name}-{version}-py3-none-any.whl", "w") as archive:
        archive.writestr(f"{info}/METADATA", "\n".join(metadata) + "\n")
        archive.writestr(f"{info}/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
        archive.writestr(f"{info}/RECORD", f"{info}/METADATA,,\n{info}/WHEEL,,\n{info}/RECORD,,\n")


@pytest.fixture
def elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """A Python of its own, a folder of empty wheels in place of PyPI, and a way to run pip on both.

    The wheels bear the names and versions of torch and torchvision: the real ones have gigabytes.
    """
    wheels = tmp_path / "wheels"
    wheels.mkdir()
    for torch, torchvision in (("2.8.0", "0.23.0"), ("2.9.1", "0.24.1"), ("2.10.0", "0.25.0")):
        wheel(wheels, "torch", torch)
        wheel(wheels, "torchvision", torchvision, f"torch (=={torch})")
    wheel(wheels, "timm", "1.0.31", "torch", "torchvision")
    (tmp_path / "requirements-common.txt").write_text("timm==1.0.31\n")
    venv.create(tmp_path / "venv")
    python = str(tmp_path / "venv" / "bin" / "python")
    environ = {**os.environ, "PIP_NO_INDEX": "1", "PIP_FIND_LINKS": str(wheels), "PIP_CONFIG_FILE": os.devnull}

    def run(command: list[str], **options):
        assert command[1:3] == ["-m", "pip"]
        words = [word for word in command[3:] if not word.startswith(("--extra-index-url", WHEELS))]
        return subprocess.run([sys.executable, "-m", "pip", "--python", python, *words], env=environ, **options)

    def versions() -> dict[str, str]:
        code = "from core.machine.packages import installed; print(installed())"
        done = subprocess.run([python, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True)
        told: dict[str, str] = eval(done.stdout)
        return {name: told[name] for name in ("torch", "torchvision", "timm") if name in told}

    return SimpleNamespace(root=tmp_path, run=run, versions=versions)


def test_carrying_the_plan_out_leaves_torch_alone_and_makes_the_rest_fit(elsewhere):
    """Also a build of torch that PyPI hasn't got."""
    wheel(elsewhere.root / "wheels", "torch", "2.8.0+cu126")
    carry_out(Plan(((*PIP, "torch==2.8.0+cu126"),), ()), root=elsewhere.root, run=elsewhere.run)
    (elsewhere.root / "wheels" / "torch-2.8.0+cu126-py3-none-any.whl").unlink()
    made = plan("gpu", elsewhere.versions(), asking({}), root=elsewhere.root)
    assert len(made.commands) == 2
    carry_out(made, root=elsewhere.root, run=elsewhere.run)
    after = elsewhere.versions()
    assert after == {"torch": "2.8.0+cu126", "torchvision": "0.23.0", "timm": "1.0.31"}
    assert plan("gpu", after, asking(after), root=elsewhere.root).commands == ()


def test_a_torchvision_that_does_not_fit_is_changed_and_torch_is_not(elsewhere):
    alone = (*PIP, "--no-deps", "torch==2.8.0", "torchvision==0.24.1", "timm==1.0.31")
    carry_out(Plan((alone,), ()), root=elsewhere.root, run=elsewhere.run)
    before = elsewhere.versions()
    carry_out(plan("gpu", before, asking(before), root=elsewhere.root), root=elsewhere.root, run=elsewhere.run)
    assert elsewhere.versions() == {**before, "torchvision": "0.23.0"}


def test_pips_own_reason_is_told_in_a_line_where_it_fails(elsewhere):
    with pytest.raises(AppError) as error:
        carry_out(Plan(((*PIP, "torch==9.9"),), ()), root=elsewhere.root, run=elsewhere.run)
    assert error.value.problem == "pip failed: No matching distribution found for torch==9.9"
    assert error.value.fix == "Run python -m pip install torch==9.9 to see all of it."


def test_the_command_prints_and_installs_nothing_unless_asked(monkeypatch, capsys):
    monkeypatch.setattr(runtime, "carry_out", lambda plan: pytest.fail("nobody asked for it"))
    assert main([]) == 0
    out = capsys.readouterr().out
    assert f"torch {installed()['torch']} stays." in out and "Everything that is needed is here and fits." in out


def test_an_install_that_does_not_help_ends_with_status_1_and_the_mismatch(monkeypatch, capsys):
    wrong = [Mismatch("timm", "timm is not installed.", "python -m pip install timm")]
    monkeypatch.setattr(runtime, "mismatches", lambda *args, **options: wrong)
    monkeypatch.setattr(runtime, "carry_out", lambda plan: None)
    assert main(["--install"]) == 1
    assert capsys.readouterr().err == "timm is not installed. Mend it with: python -m pip install timm\n"

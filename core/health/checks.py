"""The doctor's looks: each function looks at one thing and gives its findings, without changing anything."""

from __future__ import annotations

import contextlib
import os
import platform
import queue
import re
import shutil
import ssl
import subprocess
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from core.health.findings import Finding
from core.machine import packages
from core.words import counted, time_in_words

if TYPE_CHECKING:
    from core.backup import BackupStatus

NETWORK_S = 3.0
HOSTS = {
    "huggingface.co": "timm's weights and hf: data sets",
    "download.pytorch.org": "torchvision's weights",
    "pypi.org": "packages",
}
TUNNELS = {"cloudflared": ("--version",), "ngrok": ("version",)}
PROGRAM_S = 5.0
_SHOWN = ("torch", "torchvision", "torch_xla", "torch_tpu", "libtpu", "timm", "streamlit", "plotly")


def versions(kind: str) -> list[Finding]:
    """What is installed, and what of it doesn't fit.

    Args:
        kind: of the runtime, as `core.runtime` tells it.
    """
    found = packages.installed()
    names = [f"{name} {found[name.replace('_', '-')]}" for name in _SHOWN if name.replace("_", "-") in found]
    told = [Finding("versions", "ok", f"Python {platform.python_version()}, {', '.join(names)}.")]
    for item in packages.mismatches(found, kind=kind):
        # without a TPU nothing needs it, and the device xla says that it is not there
        state = "warning" if item.package == "torch_xla" and kind != "tpu" else "problem"
        told.append(Finding(f"package {item.package}", state, item.found, f"Run {item.command}"))
    if len(told) == 1:
        told.append(Finding("packages", "ok", "All that is needed is installed, and the versions fit each other."))
    return told


def backup(state: BackupStatus | None, place: str, now: float) -> list[Finding]:
    """Whether runs are kept elsewhere too.

    Args:
        state: as `core.backup.status.status` gives it.
        place: of the runtime: colab, kaggle or plain.
        now: Unix seconds.
    """
    if state is None or not state.folder:
        fix = "Name a folder elsewhere with --backup, on Colab one of Drive."
        if place == "plain":
            return [Finding("backup", "ok", "No backup folder is set.")]
        return [Finding("backup", "warning", "No backup folder is set, and this disk goes when the runtime ends.", fix)]
    last = f"Last made {time_in_words(max(0.0, now - state.at))} ago, {counted(state.runs, 'run')}"
    found = f"{last if state.at else 'Not made yet'}, in {state.folder}."
    if state.problem:
        return [Finding("backup", "problem", f"{state.problem} {found}", state.fix)]
    if state.is_busy:
        return [Finding("backup", "ok", f"It is being made now. {found}")]
    if not state.is_kept:
        fix = f"Start the dashboard with --backup {state.folder}."
        return [Finding("backup", "warning", f"{found} Nothing looks after it now.", fix)]
    return [Finding("backup", "ok", found)]


# -- the network ----------------------------------------------------------------------------------------------------


def network(
    hosts: Mapping[str, str] = HOSTS, limit_s: float = NETWORK_S, reach: Callable[[str, float], None] | None = None
) -> list[Finding]:
    """Which hosts answer, all asked at once.

    Args:
        hosts: with what each is for.
        limit_s: in all.
        reach: asks a host; raises OSError where it can't.
    """
    answers: queue.SimpleQueue[tuple[str, float | None, str]] = queue.SimpleQueue()

    def look(host: str) -> None:
        began = time.monotonic()
        try:
            (reach or _reach)(host, limit_s)
            answers.put((host, time.monotonic() - began, ""))
        except OSError as error:
            answers.put((host, None, _why(error)))

    for host in hosts:
        # looking a name up can't be broken off: such a thread is left behind
        threading.Thread(target=look, args=(host,), name=f"network-{host}", daemon=True).start()
    until, got = time.monotonic() + limit_s, dict[str, tuple[float | None, str]]()
    with contextlib.suppress(queue.Empty):
        while len(got) < len(hosts):
            host, took_s, why = answers.get(timeout=max(0.0, until - time.monotonic()))
            got[host] = took_s, why
    return [
        _answer(host, use, *got.get(host, (None, f"no answer within {limit_s:g} s"))) for host, use in hosts.items()
    ]


def _answer(host: str, use: str, took_s: float | None, why: str) -> Finding:
    if took_s is not None:
        return Finding(f"network {host}", "ok", f"It answers, in {1000 * took_s:.0f} ms.")
    found = f"It can't be reached ({why}), so {use} can't be fetched."
    fix = (
        "The quick start, your own images and what was fetched before work without it; else look at network and proxy."
    )
    return Finding(f"network {host}", "warning", found, fix)


def _reach(host: str, limit_s: float) -> None:
    request = urllib.request.Request(f"https://{host}/", method="HEAD")
    try:
        urllib.request.urlopen(request, timeout=limit_s).close()
    except urllib.error.HTTPError:
        return  # an answer all the same


def _why(error: OSError) -> str:
    reason = error.reason if isinstance(error, urllib.error.URLError) else error
    if isinstance(reason, ssl.SSLError):
        return f"its certificate is not trusted: {reason.reason or reason}"
    return str(getattr(reason, "strerror", None) or reason)


# -- the TPU, variables, programs -----------------------------------------------------------------------------------


def tpu(found: Any, library_problem: str) -> list[Finding]:
    """The state of this machine's TPU.

    Args:
        found: as `core.machine.tpu.find_tpu` gives it.
        library_problem: as `core.machine.tpu.library_problem` gives it.
    """
    if found is None:
        return [Finding("tpu", "ok", "No TPU shows on this machine.")]
    if problem := found.problem or library_problem:
        said, _, fix = problem.partition(". ")
        return [Finding("tpu", "problem", f"{said.rstrip('.')}.", fix)]
    chips = f"{found.chips} chip{'s' if found.chips > 1 else ''}"
    return [Finding("tpu", "ok", f"{found.name}, {chips}, told by {found.source}; nothing holds it.")]


def environment(environ: Mapping[str, str], kind: str) -> list[Finding]:
    """Variables that spoil a run.

    Args:
        kind: of the runtime: tpu, gpu or cpu.
    """
    told = []

    def tell(name: str, state: str, why: str, fix: str = "") -> None:
        told.append(Finding("environment", state, f"{name}={environ[name]} {why}", fix or f"Unset {name}."))

    for name in ("XLA_USE_BF16", "XLA_DOWNCAST_BF16"):
        if environ.get(name):
            tell(name, "problem", "silently changes every number that XLA computes.")
    wanted = environ.get("PJRT_DEVICE", "")
    if wanted == "TPU" and kind != "tpu":
        tell("PJRT_DEVICE", "problem", "asks for a TPU, and none shows: XLA would wait for it for minutes.")
    elif wanted == "CPU" and kind == "tpu":
        tell("PJRT_DEVICE", "warning", "keeps XLA on the CPU, though a TPU is here.")
    elif wanted not in ("", "CPU", "TPU"):
        tell("PJRT_DEVICE", "problem", "names a kind that torch_xla does not train on here.")
    if kind == "gpu" and environ.get("CUDA_VISIBLE_DEVICES") in ("", "-1"):
        tell("CUDA_VISIBLE_DEVICES", "warning", "hides every GPU.")
    return told or [Finding("environment", "ok", "No variable is set that would spoil a run.")]


def tunnels(place: str, path: str, own: Path, names: Mapping[str, Sequence[str]] = TUNNELS) -> list[Finding]:
    """Which programs can give the dashboard a public address.

    Args:
        place: of the runtime: colab, kaggle or plain.
        path: where programs are looked for, as in PATH.
        own: a folder that is looked in besides.
        names: of the programs, with what makes them tell their version.
    """
    found = []
    for name, option in names.items():
        if program := shutil.which(name, path=os.pathsep.join([path, str(own)])):
            found.append(f"{program} ({_version_of(program, option)})")
    if found:
        return [Finding("tunnel", "ok", f"{', '.join(found)} can give the dashboard a public address.")]
    words = "Neither cloudflared nor ngrok is installed, so the dashboard can be opened on this machine alone."
    if place == "plain":
        return [Finding("tunnel", "ok", words)]
    return [Finding("tunnel", "warning", words, "Run the notebook's first cell, which fetches cloudflared.")]


def _version_of(program: str, option: Sequence[str]) -> str:
    try:
        done = subprocess.run([program, *option], capture_output=True, text=True, timeout=PROGRAM_S, errors="replace")
    except (OSError, subprocess.TimeoutExpired):
        return "it does not start"
    match = re.search(r"\d+(\.\d+)+", done.stdout + done.stderr)
    return match[0] if match else "version not told"

"""One matrix product on a device, checked against the CPU's in double precision: python -m core.health.product KIND

A child process does it under a time limit, so that what hangs or crashes there takes nothing else with it, and so that
no device is started in the process that asks.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from dataclasses import asdict, dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
SIDE = 512
MOST_OFF = 1e-3
"""More than fp32 is ever off, and less than anything that computes wrongly."""


@dataclass(frozen=True)
class Product:
    """What came of it.

    Attributes:
        name: the device's.
        start_s: seconds until the device was open, libraries loaded.
        seconds: of the first product, with whatever is compiled for it.
        off: the largest difference from the exact product, as a share of its largest value.
        problem: why there is none, in one line; "" where all is well.
    """

    name: str = ""
    start_s: float = 0.0
    seconds: float = 0.0
    off: float = 0.0
    problem: str = ""


def ask(kind: str, limit_s: float, program: tuple[str, ...] = ("-m", "core.health.product")) -> Product:
    """Have a child multiply on this device kind, and kill it with its own children after `limit_s`.

    Args:
        program: what Python runs; the kind is its argument.
    """
    with tempfile.TemporaryFile() as answer, tempfile.TemporaryFile() as log:
        child = subprocess.Popen(
            [sys.executable, *program, kind, str(limit_s)],
            cwd=ROOT,
            stdin=subprocess.DEVNULL,
            stdout=answer,
            stderr=log,
            start_new_session=True,
        )
        try:
            status = child.wait(limit_s)
        except subprocess.TimeoutExpired:
            return Product(problem=f"it did not answer within {limit_s:g} s")
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(child.pid, signal.SIGKILL)
            with contextlib.suppress(subprocess.TimeoutExpired):
                child.wait(5)
        answer.seek(0)
        lines = answer.read().decode(errors="replace").splitlines()
        log.seek(max(0, os.fstat(log.fileno()).st_size - 65536))
        said = [line.strip() for line in log.read().decode(errors="replace").splitlines() if line.strip()]
    with contextlib.suppress(ValueError, IndexError, TypeError):
        return Product(**json.loads(lines[-1]))
    if status < 0:
        return Product(problem=f"its process was ended by {signal.Signals(-status).name}")
    return Product(problem=(said or [f"its process ended with status {status}"])[-1][:300])


def multiply(kind: str) -> Product:
    """Multiply in this process.

    Raises:
        DeviceError: the device is not there or does not start.
    """
    began = time.monotonic()
    import torch

    from core.devices import open_device

    device = open_device(kind)
    start_s = time.monotonic() - began
    generator = torch.Generator().manual_seed(0)
    left, right = (torch.randn(SIDE, SIDE, generator=generator) for _ in range(2))
    exact = left.double() @ right.double()
    began = time.monotonic()
    with device.turn():
        device.set_matmul_precision("highest")
        sent = device.place(left) @ device.place(right)
        device.flush()
        device.wait()
        seconds = time.monotonic() - began
        [product] = device.to_host([sent])
    off = float((product.double() - exact).abs().max() / exact.abs().max())
    # not a number is no small difference
    problem = "" if off <= MOST_OFF else f"its product is off by {off:.2g} of the largest value"
    name = device.name
    device.close()
    return Product(name, start_s, seconds, off if off == off else 1.0, problem)


def main(kind: str, limit_s: str) -> int:
    """Print the product as one line of JSON."""
    from core.errors import AppError

    # it ends even if the process that asked was killed meanwhile
    signal.alarm(int(float(limit_s)) + 10)
    # libraries that print must not get in the way of the answer
    out = os.dup(1)
    os.dup2(2, 1)
    try:
        found = multiply(kind)
    except (AppError, RuntimeError, ImportError, OSError) as error:
        found = Product(problem=(str(error).strip().splitlines() or [type(error).__name__])[0][:300])
    os.write(out, (json.dumps(asdict(found)) + "\n").encode())
    return 0


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))

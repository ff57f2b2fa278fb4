"""All checks in order, stopping at the first failure: python -m tests [OPTIONS OF PYTEST]."""

from __future__ import annotations

import subprocess
import sys

# two files at a time: many tests wait for a server or a process, and XLA keeps the programs of a process by file
SIDE_BY_SIDE = ["-n", "2", "--dist", "loadfile"]
STEPS = [
    ["ruff", "check", "."],
    ["ruff", "format", "--check", "."],
    ["mypy"],
    ["pytest", "-rs", *SIDE_BY_SIDE, *sys.argv[1:]],
]

for step in STEPS:
    print("+", " ".join(step), flush=True)
    status = subprocess.run([sys.executable, "-m", *step], check=False).returncode
    if status:
        sys.exit(status)

"""All checks in order, stopping at the first failure: python -m tests [OPTIONS OF PYTEST]."""

from __future__ import annotations

import subprocess
import sys

STEPS = [
    ["ruff", "check", "."],
    ["ruff", "format", "--check", "."],
    ["mypy"],
    ["tests.run", *sys.argv[1:]],
]

for step in STEPS:
    print("+", " ".join(step), flush=True)
    status = subprocess.run([sys.executable, "-m", *step], check=False).returncode
    if status:
        sys.exit(status)

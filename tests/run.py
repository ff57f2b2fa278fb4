"""All tests, two files at a time, and what failed then once more, alone: python -m tests.run [OPTIONS OF PYTEST].

Many tests wait for real servers, processes and browsers, some for no longer than a person would; beside another file on
a busy machine that may fail what holds. A test that fails alone, too, has failed.
"""

from __future__ import annotations

import subprocess
import sys

# many tests wait for a server or a process, and XLA keeps the programs of a process by file
SIDE_BY_SIDE = ["-n", "2", "--dist", "loadfile"]
ONCE_MORE = ["--last-failed", "--last-failed-no-failures", "none", "--maxfail", "3"]
TESTS_FAILED = 1


def main(options: list[str]) -> int:
    command = [sys.executable, "-m", "pytest", "-rsfE"]
    status = subprocess.run([*command, *SIDE_BY_SIDE, *options], check=False).returncode
    if status != TESTS_FAILED:
        return status
    print("+ what failed, once more and alone", flush=True)
    return subprocess.run([*command, *ONCE_MORE, *options], check=False).returncode


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

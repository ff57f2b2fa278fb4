"""The errors that a person may meet, each with its problem and its fix.

AppError
├── ConfigError   an option is out of its limits or clashes with another
├── DataError     the images can't be read or split
├── PathError     a path that came from a browser leads to where it may not
├── ModelError    no such model, or its weights are not at hand
├── DeviceError   the device is not there or can't do what is asked
├── StoreError    no such run, or the run is in the wrong state
│   └── StoreWriteError   the store can't be written now
│       └── GivenUpError  so a run's end was not written
├── TrainingError the training itself went wrong (a loss that is not finite)
├── MemoryFullError a step does not fit into the device's memory
├── CheckpointError  a checkpoint can't be written or read
└── BackupError   the backup folder can't be used, or holds something else
"""

from __future__ import annotations


class AppError(Exception):
    """A mistake or a lack that a person can mend.

    Args:
        problem: one sentence, with the offending value in it.
        fix: one sentence that says what to do.
    """

    def __init__(self, problem: str, *, fix: str) -> None:
        super().__init__(f"{problem} {fix}")
        self.problem = problem
        self.fix = fix


class ConfigError(AppError):
    """An option is out of its limits or clashes with another."""


class DataError(AppError):
    """The images can't be read or split."""


class PathError(AppError):
    """A path that came from a browser leads to where it may not."""


class ModelError(AppError):
    """No such model, or its weights are not at hand."""


class DeviceError(AppError):
    """The device is not there or can't do what is asked."""


class StoreError(AppError):
    """No such run, or the run is in the wrong state."""


class StoreWriteError(StoreError):
    """The store can't be written now, and may be later: its disk is full, read-only, failing, or it is locked."""


class GivenUpError(StoreWriteError):
    """A run's end could not be written for so long that it was given up."""


class TrainingError(AppError):
    """The training itself went wrong."""


class MemoryFullError(AppError):
    """A step does not fit into the device's memory."""


class CheckpointError(AppError):
    """A checkpoint can't be written or read."""


class BackupError(AppError):
    """The backup folder can't be used, or holds something else."""


class ServeError(AppError):
    """The dashboard or its tunnel can't be started, or can't be reached."""

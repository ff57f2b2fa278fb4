"""The weights of a run as the start of another: `run:RUN_ID` is its best checkpoint, `run:RUN_ID:last` its last."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

from safetensors import SafetensorError

from core.checkpoint import read_about
from core.errors import ModelError
from core.models.catalogue import resolve

PREFIX = "run:"
_SPEC = re.compile(r"run:([A-Za-z0-9][A-Za-z0-9_-]*)(?::(best|last))?")
_WHICH_WORDS = {"best": "best weights", "last": "last weights"}


@dataclass(frozen=True)
class RunWeights:
    """A run's checkpoint that another run of the same model starts from.

    Attributes:
        classes: of the run, in the order of the head's outputs.
        is_shifted: the model was told to normalise its pictures otherwise, see `build`.
    """

    path: Path
    run_id: str
    which: str
    epoch: int
    classes: list[str]
    is_shifted: bool

    def in_words(self, *, keeps_head: bool) -> str:
        """ "the best weights of run X (epoch 3), with its head" """
        head = "with its head" if keeps_head else "with a new head, since the classes differ"
        return f"the {_WHICH_WORDS[self.which]} of run {self.run_id} (epoch {self.epoch}), {head}"


def run_of(weights: str) -> str:
    """The id of the run that the weights are of; "" where they are none of a run."""
    found = _SPEC.fullmatch(weights)
    return found[1] if found else ""


def find_run_weights(weights: str, runs: Path, model: str) -> RunWeights:
    """The checkpoint that `weights` names.

    Args:
        weights: run:RUN_ID or run:RUN_ID:last.
        runs: the folder that holds a folder a run, by its id.
        model: that is to start from it, as `catalogue.resolve` takes it.

    Raises:
        ModelError: no such run or checkpoint is there, or it is of another model.
    """
    found = _SPEC.fullmatch(weights)
    if found is None:
        raise ModelError(f"'{weights}' names no weights of a run.", fix="Write run:RUN_ID, or run:RUN_ID:last.")
    run_id, which = found[1], found[2] or "best"
    path = runs / run_id / f"{which}.safetensors"
    if not path.is_file():
        raise _nothing_there(run_id, which, runs)
    try:
        about = read_about(path)
        theirs, classes = str(about["config"]["model"]), list(about["classes"])
    except (SafetensorError, OSError, ValueError, KeyError, TypeError) as error:
        raise ModelError(f"The checkpoint '{path}' can't be read: {error}", fix="Choose other weights.") from error
    if theirs != model and resolve(theirs) != resolve(model):
        raise ModelError(
            f"Run {run_id} trained {theirs}, not {model}.", fix=f"Choose --model {theirs}, or other weights."
        )
    is_shifted = about.get("transform_input", about["config"].get("weights") == "default")
    return RunWeights(path, run_id, which, int(about.get("epoch", 0)), classes, bool(is_shifted))


def check_weights(weights: str, runs: Path, model: str) -> None:
    """Refuse weights that can't be there, without reading them; what is fetched is not looked for.

    Args:
        weights, runs, model: as `build_model` takes them.

    Raises:
        ModelError: there is no such run, checkpoint or file, or it is of another model.
    """
    if weights.startswith(PREFIX):
        find_run_weights(weights, runs, model)
    elif weights not in ("default", "none") and not Path(weights).expanduser().is_file():
        raise ModelError(f"There is no weight file '{weights}'.", fix="Give --weights default, none, or a file's path.")


def _nothing_there(run_id: str, which: str, runs: Path) -> ModelError:
    if not (runs / run_id).is_dir():
        return ModelError(f"No run '{run_id}' has left weights here.", fix="See python -m core runs for the ids.")
    if which == "best" and (runs / run_id / "last.safetensors").is_file():
        return ModelError(f"Run {run_id} has no best checkpoint.", fix=f"Take its last one: {PREFIX}{run_id}:last.")
    return ModelError(f"Run {run_id} has no {which} checkpoint.", fix="Choose a run that finished an epoch.")

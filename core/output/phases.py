"""The phases of a run, in words and colours."""

from __future__ import annotations

PHASE_TITLES = {
    "setup_s": "Set-up",
    "data_wait_s": "Data wait",
    "transfer_s": "Transfer",
    "compile_s": "Compile",
    "compute_s": "Compute",
    "evaluation_s": "Evaluation",
    "checkpoint_s": "Checkpoint",
    "other_s": "Other",
}
PHASE_HELP = {
    "setup_s": "Starting the device, fetching, scanning and packing the data, building the model, loading its weights.",
    "data_wait_s": "The device had nothing to do, and the trainer no batch; what loader threads do does not count.",
    "transfer_s": "Handing batches to the device; on CUDA only the call, since the copy itself is queued.",
    "compile_s": "XLA or torch.compile building programs, taken out of the phase in which it fell.",
    "compute_s": "Forward, backward and optimizer, with the wait for their figures.",
    "evaluation_s": "The pass over the validation images, with its own data wait.",
    "checkpoint_s": "Writing the best and the last weights.",
    "other_s": "The rest, chiefly writing down figures.",
}
PHASE_COLOURS = {
    "setup_s": "#9671d8",
    "data_wait_s": "#de770c",
    "transfer_s": "#114ba8",
    "compile_s": "#ba1434",
    "compute_s": "#22816a",
    "evaluation_s": "#92c3f3",
    "checkpoint_s": "#d5cb9c",
    "other_s": "#9ea3a6",
}
"""Told apart with each kind of colour blindness; what one can do something about, data wait and compile, stands out."""
SETUP_TITLES = {
    "device_start_s": "Starting the device",
    "source_s": "Fetching the data",
    "scan_s": "Scanning the data",
    "cache_build_s": "Packing images",
    "cache_open_s": "Opening the cache",
    "weights_s": "Loading weights",
    "model_s": "Building the model",
    "preflight_s": "Tracing the model",
    "placement_s": "Placing the model",
}


def setup_title(name: str) -> str:
    """ "scan_s" -> "Scanning the data"; a part that is not known by its name."""
    return SETUP_TITLES.get(name) or name.removesuffix("_s").replace("_", " ").capitalize()

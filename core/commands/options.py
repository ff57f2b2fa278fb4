"""The command line's options: what can be written after python -m core, and the help for it."""

from __future__ import annotations

import argparse
import types
import typing
from pathlib import Path
from typing import Any, NoReturn

from core.config import AUTO, PRESETS, DeviceKind, RunConfig
from core.errors import ConfigError
from core.serve.tunnels import KINDS, NO_TUNNEL

_BACKUP_HELP = "folder to back runs and checkpoints up to, and to restore them from (default: $FINETUNE_BACKUP)"


class Parser(argparse.ArgumentParser):
    """Argparse with our one-line errors."""

    def error(self, message: str) -> NoReturn:
        raise ConfigError(f"{message[:1].upper()}{message[1:]}.", fix=f"See {self.prog} --help.")


def parser() -> Parser:
    """The parser of all commands; what it returns says in `command` which one was given."""
    whole = Parser(prog="python -m core", description="Fine-tune an image classifier on the machine at hand.")
    whole.add_argument("--home", type=Path, help="folder of runs and caches (default: $FINETUNE_HOME, else ./runs)")
    whole.add_argument("--backup", type=Path, metavar="DIR", help=_BACKUP_HELP)
    commands = whole.add_subparsers(title="commands", required=True, metavar="COMMAND", parser_class=Parser)

    def command(name: str, help_text: str) -> argparse.ArgumentParser:
        sub = commands.add_parser(name, help=help_text, description=help_text)
        sub.add_argument("--json", action="store_true", help="print one JSON object")
        sub.add_argument("--home", type=Path, default=argparse.SUPPRESS, help=argparse.SUPPRESS)
        sub.add_argument("--backup", type=Path, default=argparse.SUPPRESS, help=argparse.SUPPRESS)
        sub.set_defaults(command=name)
        return sub

    train = command("train", "Train a run and print its figures.")
    train.add_argument("--name", default="", help="the run's name")
    train.add_argument("--print-config", action="store_true", help="print the config and run nothing")
    train.add_argument("--again", default="", metavar="RUN_ID", help="start from the options of this run")
    train.add_argument(
        "--follow-changes", action="store_true", help="with --again: make the changes that were made while it ran"
    )
    _add_config_options(train)
    _add_serve_options(command("serve", "Start the dashboard, on a public address with --tunnel."))
    compare = command("compare", "Run configs against each other, or gather past runs, and compare them.")
    compare.add_argument("--name", default="", help="the group's name")
    _add_compare_options(compare)
    _add_config_options(compare)
    find_lr = command("find-lr", "Train some steps with a growing learning rate, and say which one to take.")
    _add_config_options(find_lr)
    command("groups", "List the run groups, newest first.")
    forecast = command("forecast", "Say how long a run would take.")
    forecast.add_argument("--probe", action="store_true", help="time a few steps of it first")
    _add_config_options(forecast)
    scan = command("scan", "Read a data set and say what is in it.")
    scan.add_argument("spec", help="a folder, an archive or its URL, or a named set, see --help of train")
    scan.add_argument("--files", action="store_true", help="list every image with its label and split")
    scan.add_argument("--seed", type=int, default=0, help="seed of the split")
    scan.add_argument("--val-percent", type=int, default=20, help="validation share where the data bring none")
    scan.add_argument(
        "--val-duplicates", choices=["keep", "drop"], default="keep", help="validation images that are also in training"
    )
    scan.add_argument("--rescan", action="store_true", help="decode again what is remembered from an earlier scan")
    show = command("show", "Write an image as the loader reads it.")
    show.add_argument("spec", help="the data set")
    show.add_argument("file", help="the image, relative to the data set's root")
    show.add_argument("--out", type=Path, required=True, help="the PNG to write")
    command("devices", "List the devices and why one is not available.")
    command("doctor", "Try everything that a run needs, and say what to do about what is wrong.")
    models = command("models", "List the models.")
    models.add_argument("--search", default="", help="a part of the name")
    sweep = command("sweep-models", "Train two steps of a small model of each family and compare.")
    sweep.add_argument("--device", required=True, choices=["cpu", "cuda", "mps", "xla"], help="compared with the CPU")
    sweep.add_argument("--search", default="", help="a part of the family's name, as timm/resnet")
    sweep.add_argument("--out", type=Path, help="a Markdown file for the table; a .json is put beside it")
    sweep.add_argument("--resume", action="store_true", help="go on where the .json beside --out ends")
    sweep.add_argument("--limit-s", type=float, default=600.0, help="seconds that a family may take")
    command("runs", "List all runs, newest first.")
    run = command("run", "Print one run.")
    run.add_argument("run_id")
    resume = command("resume", "Take up a run that ended, from what it kept.")
    resume.add_argument("run_id")
    resume.add_argument("--plan", action="store_true", help="say from where and by which rule, and run nothing")
    resume.add_argument("--device", choices=list(typing.get_args(DeviceKind)), default="", help="another device")
    resume.add_argument(
        "--leave-out-changes", action="store_true", help="don't make changes again that came after what was kept"
    )
    _add_changes(resume)
    control = command("control", "Change, pause, resume, stop or abort a run that goes on.")
    control.add_argument("run_id")
    _add_changes(control)
    asked = control.add_mutually_exclusive_group()
    for name, words in (
        ("pause", "stand still"),
        ("resume", "go on"),
        ("stop", "save and end"),
        ("abort", "end without saving"),
    ):
        asked.add_argument(f"--{name}", action="store_const", dest="ask", const=name, help=words)
    control.add_argument("--free", action="store_true", help="with --pause: save and free the device, also once paused")
    queue = command("queue", "List the runs that wait and what for, or move one.")
    queue.add_argument("run_id", nargs="?", default="", metavar="RUN_OR_GROUP_ID")
    moved = queue.add_mutually_exclusive_group()
    for name, words in (
        ("first", "to the front"),
        ("up", "by one"),
        ("down", "by one"),
        ("remove", "stop it; it keeps its place among the runs"),
    ):
        moved.add_argument(f"--{name}", action="store_const", dest="to", const=name, help=words)
    backup = command("backup", "Make one backup of runs and checkpoints now, or look whether one is whole.")
    backup.add_argument("folder", type=Path, metavar="DIR")
    backup.add_argument("--verify", action="store_true", help="read what is there and compare; change nothing")
    predict = command("predict", "Say what a run's best checkpoint sees in pictures.")
    predict.add_argument("run_id")
    predict.add_argument("files", nargs="+", type=Path, metavar="FILE")
    predict.add_argument("--device", default="auto", choices=list(typing.get_args(DeviceKind)), help="where it runs")
    predict.add_argument("--top", type=int, default=5, help="classes to name for each picture")
    export = command("export", "Write a run's or a group's figures.")
    export.add_argument("run_id", metavar="RUN_OR_GROUP_ID")
    export.add_argument("--to", choices=["csv", "json", "parquet", "html", "markdown"], default="csv")
    export.add_argument("--table", choices=["epochs", "steps", "phases"], default="", help="for csv and parquet")
    export.add_argument("--out", type=Path, help="the file to write; without one it goes to standard output")
    return whole


def _add_config_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--preset", choices=list(PRESETS), default="default", help="where the options start from")
    for name, field in RunConfig.model_fields.items():
        kind, choices = _option_type(field.annotation)
        can_be_auto = name == "batch_size"
        parser.add_argument(
            f"--{name.replace('_', '-')}",
            type=_number_or_auto if can_be_auto else kind,
            choices=choices,
            default=argparse.SUPPRESS,
            metavar=None if choices else "INT|auto" if can_be_auto else kind.__name__.upper(),
            help=(field.description or "").replace("%", "%%"),
        )


def _add_changes(parser: argparse.ArgumentParser) -> None:
    """What can be changed between two steps; None where nothing is asked."""
    parser.add_argument("--lr", type=float, help="the learning rate of the next step; the schedule goes on from it")
    parser.add_argument("--lr-factor", type=float, help="what multiplies the schedule's learning rates")
    parser.add_argument("--weight-decay", type=float)
    parser.add_argument("--epochs", type=int, help="how many in all")
    parser.add_argument("--patience", type=int, help="epochs without a better one, 0: no end")
    parser.add_argument("--log-every", type=int, help="steps between two logged figures")


def _add_compare_options(parser: argparse.ArgumentParser) -> None:
    """What compare takes besides the options of train."""
    parser.add_argument(
        "--vary",
        action="append",
        default=[],
        metavar="OPTION=A,B",
        help="an option and the values to compare; repeatable",
    )
    parser.add_argument("--devices", default="", metavar="A,B", help="the same as --vary device=A,B")
    parser.add_argument("--repeats", type=int, default=5, help="of each config; 5 are advised")
    parser.add_argument(
        "--start",
        choices=["cold", "warm", "both"],
        default="warm",
        help="cold: each repeat in a new process with caches made anew; warm: all in this process, after a warm-up run",
    )
    parser.add_argument("--order-seed", type=int, default=0, help="fixes the order, which is drawn anew in each round")
    parser.add_argument(
        "--runs", nargs="+", default=[], metavar="RUN_ID", help="compare these past runs, and run nothing"
    )
    parser.add_argument("--group", default="", metavar="GROUP_ID", help="compare this group, and run nothing")
    parser.add_argument(
        "--measure",
        default="total_s",
        help="what is compared: total_s, epoch_s, step_s, images_per_s, time_to_accuracy_s or a phase, as compile_s",
    )
    parser.add_argument("--accuracy", type=float, help="validation top-1 in percent, for time_to_accuracy_s")
    parser.add_argument("--baseline", help="the label that the others are compared with; the fastest by default")


def _add_serve_options(parser: argparse.ArgumentParser) -> None:
    """What serve takes besides --home."""
    parser.add_argument(
        "--tunnel", choices=[*KINDS, NO_TUNNEL], default=NO_TUNNEL, help="what gives it a public address"
    )
    parser.add_argument("--port", type=int, default=8501, help="0 for any free one")
    parser.add_argument(
        "--address", default="127.0.0.1", help="where it listens; 0.0.0.0 for all that reach this machine"
    )
    parser.add_argument(
        "--token", default="", help="what visitors must know; made at random without one ($FINETUNE_TOKEN)"
    )
    parser.add_argument(
        "--root",
        action="append",
        default=[],
        type=Path,
        metavar="DIR",
        help="one more folder that data and weights may be taken from in the browser; repeatable",
    )
    parser.add_argument("--qr", action="store_true", help="print the link as a QR code too")


def _number_or_auto(text: str) -> int | str:
    return text if text == AUTO else int(text)


def _option_type(annotation: Any) -> tuple[type, list[str] | None]:
    if typing.get_origin(annotation) is typing.Literal:
        return str, list(typing.get_args(annotation))
    if isinstance(annotation, types.UnionType):
        return next(part for part in typing.get_args(annotation) if part is not type(None)), None
    assert isinstance(annotation, type)
    return annotation, None

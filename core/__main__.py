"""The command line: python -m core COMMAND. Results go to stdout, progress and logs to stderr.

Exit status: 0 done; 1 the run failed; 2 bad input; 130 stopped by Ctrl-C after saving.
"""

from __future__ import annotations

import argparse
import io
import json
import os
import sys
import types
import typing
from pathlib import Path
from typing import Any, NoReturn

from core.config import PRESETS, DeviceKind, RunConfig, make_config
from core.errors import AppError, ConfigError

_BAD_INPUT = ("ConfigError", "DataError", "ModelError", "DeviceError")


class _Parser(argparse.ArgumentParser):
    """Argparse with our one-line errors."""

    def error(self, message: str) -> NoReturn:
        raise ConfigError(f"{message[:1].upper()}{message[1:]}.", fix=f"See {self.prog} --help.")


def main(argv: list[str] | None = None) -> int:
    """Run one command and return its exit status."""
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")
    try:
        arguments = _parser().parse_args(argv)
        status: int = arguments.run(arguments)
        return status
    except AppError as error:
        print(error, file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        return 130
    except BrokenPipeError:
        sys.stderr.close()
        return 0


def _parser() -> _Parser:
    parser = _Parser(prog="python -m core", description="Fine-tune an image classifier on the machine at hand.")
    parser.add_argument("--home", type=Path, help="folder of runs and caches (default: $FINETUNE_HOME, else ./runs)")
    commands = parser.add_subparsers(title="commands", required=True, metavar="COMMAND", parser_class=_Parser)

    def command(name: str, run: Any, help_text: str) -> argparse.ArgumentParser:
        sub = commands.add_parser(name, help=help_text, description=help_text)
        sub.add_argument("--json", action="store_true", help="print one JSON object")
        sub.add_argument("--home", type=Path, default=argparse.SUPPRESS, help=argparse.SUPPRESS)
        sub.set_defaults(run=run)
        return sub

    train = command("train", _train, "Train a run and print its figures.")
    train.add_argument("--name", default="", help="the run's name")
    train.add_argument("--print-config", action="store_true", help="print the config and run nothing")
    _add_config_options(train)
    compare = command("compare", _compare, "Run configs against each other, or gather past runs, and compare them.")
    compare.add_argument("--name", default="", help="the group's name")
    _add_compare_options(compare)
    _add_config_options(compare)
    command("groups", _groups, "List the run groups, newest first.")
    forecast = command("forecast", _forecast, "Say how long a run would take.")
    forecast.add_argument("--probe", action="store_true", help="time a few steps of it first")
    _add_config_options(forecast)
    scan = command("scan", _scan, "Read a data set and say what is in it.")
    scan.add_argument("spec", help="a folder, an archive or its URL, or a named set, see --help of train")
    scan.add_argument("--files", action="store_true", help="list every image with its label and split")
    scan.add_argument("--seed", type=int, default=0, help="seed of the split")
    scan.add_argument("--val-percent", type=int, default=20, help="validation share where the data bring none")
    scan.add_argument(
        "--val-duplicates", choices=["keep", "drop"], default="keep", help="validation images that are also in training"
    )
    scan.add_argument("--rescan", action="store_true", help="decode again what is remembered from an earlier scan")
    show = command("show", _show, "Write an image as the loader reads it.")
    show.add_argument("spec", help="the data set")
    show.add_argument("file", help="the image, relative to the data set's root")
    show.add_argument("--out", type=Path, required=True, help="the PNG to write")
    command("devices", _devices, "List the devices and why one is not available.")
    models = command("models", _models, "List the models.")
    models.add_argument("--search", default="", help="a part of the name")
    sweep = command("sweep-models", _sweep_models, "Train two steps of a small model of each family and compare.")
    sweep.add_argument("--device", required=True, choices=["cpu", "cuda", "mps", "xla"], help="compared with the CPU")
    sweep.add_argument("--search", default="", help="a part of the family's name, as timm/resnet")
    sweep.add_argument("--out", type=Path, help="a Markdown file for the table; a .json is put beside it")
    sweep.add_argument("--resume", action="store_true", help="go on where the .json beside --out ends")
    sweep.add_argument("--limit-s", type=float, default=600.0, help="seconds that a family may take")
    command("runs", _runs, "List all runs, newest first.")
    run = command("run", _run, "Print one run.")
    run.add_argument("run_id")
    control = command("control", _control, "Change, pause, resume or stop a run that goes on.")
    control.add_argument("run_id")
    control.add_argument("--lr", type=float, help="the learning rate of the next step; the schedule goes on from it")
    control.add_argument("--lr-factor", type=float, help="what multiplies the schedule's learning rates")
    control.add_argument("--weight-decay", type=float)
    control.add_argument("--epochs", type=int, help="how many in all")
    control.add_argument("--patience", type=int, help="epochs without a better one, 0: no end")
    control.add_argument("--log-every", type=int, help="steps between two logged figures")
    asked = control.add_mutually_exclusive_group()
    for name, words in (("pause", "stand still"), ("resume", "go on"), ("stop", "save and end")):
        asked.add_argument(f"--{name}", action="store_const", dest="ask", const=name, help=words)
    predict = command("predict", _predict, "Say what a run's best checkpoint sees in pictures.")
    predict.add_argument("run_id")
    predict.add_argument("files", nargs="+", type=Path, metavar="FILE")
    predict.add_argument("--device", default="auto", choices=list(typing.get_args(DeviceKind)), help="where it runs")
    predict.add_argument("--top", type=int, default=5, help="classes to name for each picture")
    export = command("export", _export, "Write a run's or a group's figures.")
    export.add_argument("run_id", metavar="RUN_OR_GROUP_ID")
    export.add_argument("--to", choices=["csv", "json", "parquet", "html", "markdown"], default="csv")
    export.add_argument("--table", choices=["epochs", "steps", "phases"], default="", help="for csv and parquet")
    export.add_argument("--out", type=Path, help="the file to write; without one it goes to standard output")
    return parser


def _add_config_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--preset", choices=list(PRESETS), default="default", help="where the options start from")
    for name, field in RunConfig.model_fields.items():
        kind, choices = _option_type(field.annotation)
        parser.add_argument(
            f"--{name.replace('_', '-')}",
            type=kind,
            choices=choices,
            default=argparse.SUPPRESS,
            metavar=None if choices else kind.__name__.upper(),
            help=(field.description or "").replace("%", "%%"),
        )


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


def _config_of(arguments: argparse.Namespace) -> RunConfig:
    changes = {name: getattr(arguments, name) for name in RunConfig.model_fields if hasattr(arguments, name)}
    return make_config(arguments.preset, **changes)


def _option_type(annotation: Any) -> tuple[type, list[str] | None]:
    if typing.get_origin(annotation) is typing.Literal:
        return str, list(typing.get_args(annotation))
    if isinstance(annotation, types.UnionType):
        return next(part for part in typing.get_args(annotation) if part is not type(None)), None
    assert isinstance(annotation, type)
    return annotation, None


def _home(arguments: argparse.Namespace) -> Path:
    from core.store import default_home

    return arguments.home or default_home()


def _store(arguments: argparse.Namespace) -> Any:
    from core.store import Store

    store = Store(_home(arguments))
    store.recover()
    return store


def _print(arguments: argparse.Namespace, value: dict[str, Any], lines: list[str]) -> None:
    # a terminal or pipe of another encoding gets escapes, which JSON allows
    is_unicode = (sys.stdout.encoding or "").lower().startswith("utf")
    print(json.dumps(value, ensure_ascii=not is_unicode) if arguments.json else "\n".join(lines))


def _train(arguments: argparse.Namespace) -> int:
    config = _config_of(arguments)
    if arguments.print_config:
        print(config.model_dump_json() if arguments.json else config.model_dump_json(indent=1))
        return 0
    from core.analysis.summary import summarise
    from core.data.sources import locate
    from core.devices import check_precision, count_sharing, resolve_kind
    from core.interrupt import stop_on_interrupt
    from core.models.catalogue import resolve
    from core.progress import ProgressBar
    from core.setup import check_batch
    from core.worker import train_queued

    kind = resolve_kind(config.device)
    check_precision(kind, config.precision)
    check_batch(config, count_sharing(kind, config.num_devices))
    resolve(config.model)
    locate(config.data)
    store = _store(arguments)
    run_id = store.create_run(config, name=arguments.name, own=True)
    try:
        with stop_on_interrupt() as is_interrupted, ProgressBar(config.epochs) as bar:
            state = train_queued(store, run_id, on_event=bar.follow, should_stop=is_interrupted)
        if state is None:
            store.request(run_id, "stop")
            raise ConfigError(f"Another run holds device {kind}.", fix="Wait for it, or stop it.")
        summary = summarise(store, run_id)
    finally:
        store.close()
    if state == "failed":
        print(f"{summary['reason']} {summary['fix']}", file=sys.stderr)
        if summary["error"] in _BAD_INPUT:
            return 2
    _print(arguments, summary, _run_lines(summary))
    if is_interrupted():
        return 130
    return 1 if state == "failed" else 0


def _run_lines(summary: dict[str, Any]) -> list[str]:
    device = summary["device"]
    lines = [f"{summary['run_id']}  {summary['state']}  on {device['name'] or device['kind']}"]
    lines += [
        f"epoch {epoch['epoch']}: training loss {_number(epoch['train_loss'], 4)}, "
        f"validation loss {_number(epoch['val_loss'], 4)}, top-1 {_number(epoch['val_top1'], 2)} %, "
        f"{_number(epoch['seconds'], 2)} s"
        for epoch in summary["epochs"]
    ]
    phases = ", ".join(f"{name.removesuffix('_s')} {seconds:.2f}" for name, seconds in summary["phases"].items())
    return [*lines, f"{_number(summary['total_s'], 2)} s in all: {phases}"]


def _number(value: float | None, digits: int) -> str:
    return "–" if value is None else f"{value:.{digits}f}"


def _scan(arguments: argparse.Namespace) -> int:
    from core.data.scan import scan
    from core.data.sources import open_source
    from core.progress import WorkBar

    home = _home(arguments)
    names = ("seed", "val_percent", "val_duplicates")
    config = make_config(data=arguments.spec, **{name: getattr(arguments, name) for name in names})
    with WorkBar() as bar:
        dataset = scan(
            open_source(config.data, home, bar.tell),
            home=home,
            seed=config.seed,
            val_percent=config.val_percent,
            val_duplicates=config.val_duplicates,
            progress=bar.tell,
            anew=arguments.rescan,
        )
    report = dataset.report(with_files=arguments.files)
    _print(arguments, report, _scan_lines(report))
    return 0


def _scan_lines(report: dict[str, Any]) -> list[str]:
    from core.data.dataset import SKIP_WORDS

    lines = [f"{name}: {count}" for name, count in report["class_counts"].items()]
    lines += [f"skipped {item['file']}: {SKIP_WORDS.get(item['why'], item['why'])}" for item in report["skipped"]]
    lines += [*report["warnings"], *report["hints"], *filter(None, [report["about"]])]
    splits = ", ".join(f"{sum(counts.values())} {split}" for split, counts in report["splits"].items())
    return [
        *lines,
        f"{report['usable_images']} images of {len(report['classes'])} classes ({splits})",
        f"{report['found']} files found = {report['usable_images']} used + {len(report['skipped'])} skipped "
        f"+ {len(report['ignored'])} not pictures",
    ]


def _show(arguments: argparse.Namespace) -> int:
    from core.data.images import show_png
    from core.data.sources import open_source

    show_png(open_source(arguments.spec, _home(arguments)).root, arguments.file, arguments.out)
    _print(arguments, {"out": str(arguments.out)}, [str(arguments.out)])
    return 0


def _devices(arguments: argparse.Namespace) -> int:
    from dataclasses import asdict

    from core.devices import list_devices

    devices = [asdict(info) for info in list_devices()]
    lines = [f"{d['kind']:5} {_device_line(d)}" for d in devices]
    _print(arguments, {"devices": devices}, lines)
    return 0


def _device_line(device: dict[str, Any]) -> str:
    if not device["available"]:
        return f"{device['name']}  not available: {device['reason']}"
    several = f"{device['count']} x " if device["count"] > 1 else ""
    memory = f", {device['memory_gib']:g} GiB" if device["memory_gib"] else ""
    return f"{several}{device['name']}{memory}" + (f"  {device['note']}" if device["note"] else "")


def _models(arguments: argparse.Namespace) -> int:
    from dataclasses import asdict

    from core.models.catalogue import list_models

    models = [asdict(info) for info in list_models(arguments.search)]
    _print(arguments, {"models": models}, [f"{m['library']}/{m['name']}  weights {m['weights']}" for m in models])
    return 0


def _sweep_models(arguments: argparse.Namespace) -> int:
    from dataclasses import asdict

    from core.devices import resolve_kind
    from core.sweep import summary, sweep, table

    if arguments.resume and not arguments.out:
        raise ConfigError("--resume needs the file to go on with.", fix="Give --out FILE.md.")
    trials = sweep(
        resolve_kind(arguments.device),
        search=arguments.search,
        report=arguments.out,
        resume=arguments.resume,
        limit_s=arguments.limit_s,
        tell=lambda line: print(line, file=sys.stderr, flush=True),
    )
    if not trials:
        raise ConfigError(f"No family's name contains '{arguments.search}'.", fix="See python -m core models.")
    _print(arguments, {"trials": [asdict(trial) for trial in trials]}, [*summary(trials), "", *table(trials)])
    return 0 if all(trial.trains or trial.cpu_error for trial in trials) else 1


def _runs(arguments: argparse.Namespace) -> int:
    from core.analysis.summary import list_rows

    rows = list_rows(_store(arguments))
    lines = [f"{r['run_id']}  {r['state']:11}  {r['model']}  {r['data']}  {r['device']}" for r in rows]
    _print(arguments, {"runs": rows}, lines or ["No runs yet."])
    return 0


def _run(arguments: argparse.Namespace) -> int:
    from core.analysis.summary import summarise

    summary = summarise(_store(arguments), arguments.run_id)
    _print(arguments, summary, _run_lines(summary))
    return 0


def _control(arguments: argparse.Namespace) -> int:
    from core.control import CHANGEABLE, Wish
    from core.control_command import control_command

    wishes = [Wish(what, getattr(arguments, what)) for what in CHANGEABLE if getattr(arguments, what) is not None]
    result, lines = control_command(_store(arguments), arguments.run_id, wishes, arguments.ask)
    _print(arguments, result, lines)
    return 0 if result["acknowledged"] else 1


def _predict(arguments: argparse.Namespace) -> int:
    from core.devices import open_device
    from core.predict import Predictor

    store = _store(arguments)
    folder = store.run_folder(store.get_run(arguments.run_id).run_id)
    device = open_device(arguments.device)
    try:
        found = Predictor(folder / "best.safetensors", device).predict(arguments.files, arguments.top)
    finally:
        device.close()
    lines = [
        f"{seen.file}: " + ", ".join(f"{name} {percent:.1f} %" for name, percent in seen.classes) for seen in found
    ]
    predictions = [
        {"file": seen.file, "classes": [{"name": name, "percent": percent} for name, percent in seen.classes]}
        for seen in found
    ]
    _print(arguments, {"predictions": predictions}, lines)
    return 0


def _export(arguments: argparse.Namespace) -> int:
    from core.analysis.exports import export

    made = export(_store(arguments), arguments.run_id, arguments.to, arguments.table)
    if arguments.out:
        arguments.out.write_bytes(made if isinstance(made, bytes) else made.encode())
    elif isinstance(made, bytes):
        raise ConfigError("Parquet is no text for a terminal.", fix="Give --out FILE.parquet.")
    else:
        print(made, end="")
    return 0


def _compare(arguments: argparse.Namespace) -> int:
    from core.group_commands import compare_command

    _print(arguments, *compare_command(arguments, _config_of(arguments), _store(arguments)))
    return 0


def _groups(arguments: argparse.Namespace) -> int:
    from core.group_commands import groups_command

    _print(arguments, *groups_command(_store(arguments)))
    return 0


def _forecast(arguments: argparse.Namespace) -> int:
    from core.group_commands import forecast_command

    _print(arguments, *forecast_command(arguments, _config_of(arguments), _store(arguments)))
    return 0


if __name__ == "__main__":
    sys.exit(main())

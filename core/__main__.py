"""The command line: python -m core COMMAND. Results go to stdout, progress and logs to stderr.

Exit status: 0 done; 1 the run failed; 2 bad input; 130 stopped by Ctrl-C after saving
(143 by SIGTERM, 129 by the end of its terminal).
"""

from __future__ import annotations

import argparse
import contextlib
import io
import json
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from core.commands.options import parser
from core.config import RunConfig, make_config
from core.errors import AppError, ConfigError, GivenUpError, StoreWriteError
from core.words import visible

_BAD_INPUT = ("ConfigError", "DataError", "ModelError", "DeviceError")
_TRAIN = ("train", "resume", "compare", "find-lr")
_LOOK = ("runs", "run", "groups", "export", "predict", "control", "queue", "forecast")
"""Commands that a backup goes with: the runs of the first are backed up, both find what is restored."""


def main(argv: list[str] | None = None) -> int:
    """Run one command and return its exit status."""
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")
    try:
        arguments = parser().parse_args(argv)
        with _backed_up(arguments):
            status = _COMMANDS[arguments.command](arguments)
        return status
    except AppError as error:
        print(visible(str(error)), file=sys.stderr)
        return 1 if isinstance(error, GivenUpError) else 2
    except KeyboardInterrupt:
        return 130
    except BrokenPipeError:
        sys.stderr.close()
        return 0


def _config_of(arguments: argparse.Namespace, start: RunConfig | None = None) -> RunConfig:
    """What the options come to, from the preset or from another run's config."""
    changes = {name: getattr(arguments, name) for name in RunConfig.model_fields if hasattr(arguments, name)}
    return make_config(arguments.preset, **{**(start.model_dump() if start else {}), **changes})


def _home(arguments: argparse.Namespace) -> Path:
    from core.store import default_home

    return arguments.home or default_home()


def _backed_up(arguments: argparse.Namespace) -> contextlib.AbstractContextManager[None]:
    """What a backup folder needs to have done before and while the command goes on."""
    is_run = not getattr(arguments, "print_config", False) and not getattr(arguments, "plan", False)
    needs_runs = is_run or arguments.command == "resume" or arguments.again
    if arguments.command not in (*_TRAIN, *_LOOK) or not needs_runs:
        return contextlib.nullcontext()
    from core.backup import default_backup
    from core.backup.command import backed_up

    return backed_up(
        _home(arguments), arguments.backup or default_backup(), is_kept=arguments.command in _TRAIN and is_run
    )


def _backup(arguments: argparse.Namespace) -> int:
    from core.backup.command import backup_command, verify_command

    if arguments.verify:
        told, lines = verify_command(arguments.folder.expanduser())
        _print(arguments, told, lines)
        return 0 if told["is_whole"] else 1
    _print(arguments, *backup_command(_home(arguments), arguments.folder.expanduser()))
    return 0


def _store(arguments: argparse.Namespace) -> Any:
    from core.store import Store

    store = Store(_home(arguments))
    # while it can't be written it can be looked at
    with contextlib.suppress(StoreWriteError):
        store.recover()
    return store


def _print(arguments: argparse.Namespace, value: dict[str, Any], lines: list[str]) -> None:
    # a terminal or pipe of another encoding gets escapes, which JSON allows
    is_unicode = (sys.stdout.encoding or "").lower().startswith("utf")
    print(json.dumps(value, ensure_ascii=not is_unicode) if arguments.json else "\n".join(map(visible, lines)))


def _train(arguments: argparse.Namespace) -> int:
    origin = _origin(arguments)
    config = _config_of(arguments, origin.config if origin else None)
    if arguments.print_config:
        print(config.model_dump_json() if arguments.json else config.model_dump_json(indent=1))
        return 0
    from core.models.from_run import run_of
    from core.running.script import script_of

    _check(arguments, config)
    store = _store(arguments)
    run_id = store.create_run(
        config,
        name=arguments.name,
        own=True,
        script=script_of(store, arguments.again) if arguments.follow_changes else [],
        forked_from=arguments.again or run_of(config.weights),
    )
    return _train_here(arguments, store, run_id, config.epochs)


def _check(arguments: argparse.Namespace, config: RunConfig) -> None:
    """Refuse what can be seen to be wrong before a run is queued.

    Raises:
        AppError: it is.
    """
    from core.data.sources import locate
    from core.devices import check_precision, count_sharing, resolve_kind
    from core.devices.ranks import count_processes
    from core.models.catalogue import resolve
    from core.models.from_run import check_weights
    from core.setup import check_batch

    kind = resolve_kind(config.device)
    check_precision(kind, config.precision)
    count = count_processes(kind, config.num_devices)
    check_batch(config, count_sharing(kind, config.num_devices), count)
    resolve(config.model)
    check_weights(config.weights, _home(arguments).expanduser() / "runs", config.model)
    locate(config.data)


def _serve(arguments: argparse.Namespace) -> int:
    from core.serve.command import serve_command

    return serve_command(arguments, _home(arguments))


def _find_lr(arguments: argparse.Namespace) -> int:
    from core.trials.lr_curve import lines_of, told_of
    from core.trials.lr_finder import WORK

    config = _config_of(arguments)
    _check(arguments, config)
    store = _store(arguments)
    run_id = store.create_run(config, own=True, purpose="probe", work=WORK)
    return _train_here(arguments, store, run_id, 1, lambda summary: (told_of(summary), lines_of(summary)))


def _train_here(
    arguments: argparse.Namespace,
    store: Any,
    run_id: str,
    epochs: int,
    told: Callable[[dict[str, Any]], tuple[dict[str, Any], list[str]]] | None = None,
    *,
    stays_queued: bool = False,
) -> int:
    """Train a run that is queued for this process, and print what it came to.

    Args:
        told: the JSON object and the lines to print, from the run's summary; as `run` prints it where None.
        stays_queued: where its device is not free, rather than that it is stopped.
    """
    from core.analysis.summary import summarise
    from core.commands.progress import ProgressBar
    from core.running.interrupt import stop_on_interrupt
    from core.worker import train_queued

    try:
        with stop_on_interrupt() as is_interrupted, ProgressBar(epochs) as bar:
            state = train_queued(store, run_id, on_event=bar.follow, should_stop=is_interrupted)
        if state is None:
            if not stays_queued:
                store.request(run_id, "stop")
            device = store.get_run(run_id).config.device
            raise ConfigError(f"Another run holds device {device}.", fix="Wait for it, or stop it.")
        summary = summarise(store, run_id)
    finally:
        store.close()
    # interrupted: its own process died
    has_failed = state in ("failed", "interrupted")
    if has_failed:
        print(f"{summary['reason']} {summary['fix']}", file=sys.stderr)
        if summary["error"] in _BAD_INPUT:
            return 2
    if state == "paused":
        print(f"Saved, and the device is free. It goes on with: python -m core resume {run_id}", file=sys.stderr)
    _print(arguments, *(told(summary) if told else (summary, _run_lines(summary))))
    if is_interrupted():
        return is_interrupted.status
    return 1 if has_failed else 0


def _resume(arguments: argparse.Namespace) -> int:
    from core.control import CHANGEABLE
    from core.running.resume import plan_resume, resume

    given = {what: getattr(arguments, what) for what in CHANGEABLE}
    changes = {what: value for what, value in given.items() if value is not None}
    store = _store(arguments)
    record = store.get_run(arguments.run_id)
    is_asked = not (changes or arguments.device or arguments.leave_out_changes or arguments.plan)
    if is_asked and record.is_taken_up:
        return _train_here(arguments, store, record.run_id, record.config.epochs, stays_queued=True)
    plan = plan_resume(
        store, arguments.run_id, changes=changes, device=arguments.device, follow=not arguments.leave_out_changes
    )
    print("\n".join(plan.rules), file=sys.stderr)
    if arguments.plan:
        rules = {"run_id": plan.run_id, "step": plan.step, "epoch": plan.epoch, "rules": plan.rules}
        _print(arguments, rules, [])
        return 0
    resume(store, plan, own=True)
    return _train_here(arguments, store, plan.run_id, plan.epochs)


def _origin(arguments: argparse.Namespace) -> Any:
    """The record of the run that is run again; None where a new one is asked for.

    Raises:
        AppError: there is no such run, or the options clash.
    """
    if not arguments.again:
        if arguments.follow_changes:
            raise ConfigError("--follow-changes needs a run to follow.", fix="Give --again RUN_ID.")
        return None
    if arguments.preset != "default":
        raise ConfigError("--again and --preset clash: both say where the options start from.", fix="Give one.")
    store = _store(arguments)
    try:
        return store.get_run(arguments.again)
    finally:
        store.close()


def _run_lines(summary: dict[str, Any]) -> list[str]:
    device = summary["device"]
    lines = [f"{summary['run_id']}  {summary['state']}  on {device['name'] or device['kind']}"]
    lines += [summary["ended_early"]] if summary["ended_early"] else []
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
    from core.commands.progress import WorkBar
    from core.data.scan import scan
    from core.data.sources import open_source

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


def _doctor(arguments: argparse.Namespace) -> int:
    from core.health.doctor import examine

    report = examine(_home(arguments).expanduser().resolve())
    _print(arguments, report.told(), report.lines)
    return 0 if report.ok else 1


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
    from core.trials.sweep import summary, sweep, table

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
    from core.commands.control import control_command
    from core.control import CHANGEABLE, Wish

    wishes = [Wish(what, getattr(arguments, what)) for what in CHANGEABLE if getattr(arguments, what) is not None]
    result, lines = control_command(
        _store(arguments), arguments.run_id, wishes, arguments.ask, should_free=arguments.free
    )
    _print(arguments, result, lines)
    return 0 if result["acknowledged"] else 1


def _queue(arguments: argparse.Namespace) -> int:
    from core.commands.queue import queue_command

    _print(arguments, *queue_command(_store(arguments), arguments.run_id, arguments.to or ""))
    return 0


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
    from core.output.exports import export

    made = export(_store(arguments), arguments.run_id, arguments.to, arguments.table)
    if arguments.out:
        arguments.out.write_bytes(made if isinstance(made, bytes) else made.encode())
    elif isinstance(made, bytes):
        raise ConfigError("Parquet is no text for a terminal.", fix="Give --out FILE.parquet.")
    else:
        print(made, end="")
    return 0


def _compare(arguments: argparse.Namespace) -> int:
    from core.commands.groups import compare_command

    _print(arguments, *compare_command(arguments, _config_of(arguments), _store(arguments)))
    return 0


def _groups(arguments: argparse.Namespace) -> int:
    from core.commands.groups import groups_command

    _print(arguments, *groups_command(_store(arguments)))
    return 0


def _forecast(arguments: argparse.Namespace) -> int:
    from core.commands.groups import forecast_command

    _print(arguments, *forecast_command(arguments, _config_of(arguments), _store(arguments)))
    return 0


_COMMANDS: dict[str, Callable[[argparse.Namespace], int]] = {
    "train": _train,
    "serve": _serve,
    "compare": _compare,
    "find-lr": _find_lr,
    "groups": _groups,
    "forecast": _forecast,
    "scan": _scan,
    "show": _show,
    "devices": _devices,
    "doctor": _doctor,
    "models": _models,
    "sweep-models": _sweep_models,
    "runs": _runs,
    "run": _run,
    "resume": _resume,
    "control": _control,
    "queue": _queue,
    "backup": _backup,
    "predict": _predict,
    "export": _export,
}


if __name__ == "__main__":
    sys.exit(main())

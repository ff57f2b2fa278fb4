"""The command line of comparing: compare, groups, forecast."""

from __future__ import annotations

import argparse
import sys
from dataclasses import asdict
from typing import Any

from core.analysis.comparison import compare, markdown
from core.analysis.groups import load_group
from core.analysis.repeats import label_of, start_of
from core.analysis.spread import diagnose_group
from core.analysis.summary import summarise
from core.config import RunConfig
from core.errors import ConfigError
from core.running.interrupt import stop_on_interrupt
from core.store import Store
from core.words import forecast_in_words


def compare_command(arguments: argparse.Namespace, config: RunConfig, store: Store) -> tuple[dict[str, Any], list[str]]:
    """Run or gather a group and compare it.

    Returns:
        The JSON object, and the lines to print.
    """
    group_id = arguments.group or _gathered(arguments, store) or _trained(arguments, config, store)
    group = load_group(store, group_id)
    result = compare(group, arguments.measure, accuracy=arguments.accuracy, baseline=arguments.baseline)
    findings = diagnose_group(group)
    lines = [f"{group.group_id}  {group.name}", "", markdown(result), ""]
    lines += [ratio["words"] for ratio in result["ratios"]] + [f"Note: {warning}" for warning in result["warnings"]]
    lines += [f"{finding.sentence} {finding.advice}".rstrip() for finding in findings]
    return {**result, "diagnosis": [asdict(finding) for finding in findings]}, lines


def _gathered(arguments: argparse.Namespace, store: Store) -> str:
    """The id of a new group of past runs, where such were named."""
    if not arguments.runs:
        return ""
    if len(set(arguments.runs)) < 2:
        raise ConfigError("One run alone can't be compared.", fix="Name two runs or more.")
    summaries = [summarise(store, run_id) for run_id in dict.fromkeys(arguments.runs)]
    members = [
        (summary["run_id"], label, start_of(summary))
        for summary, label in zip(summaries, label_of(summaries), strict=True)
    ]
    return store.groups.of_past_runs(arguments.name or "Past runs", members)


def _trained(arguments: argparse.Namespace, config: RunConfig, store: Store) -> str:
    from core.commands.progress import ProgressBar
    from core.devices import check_precision, resolve_kind
    from core.devices.xla import XLA_LOCK, initialise, wants_tpu
    from core.groups import plan_group, run_group, varied
    from core.models.from_run import check_weights

    configs = varied(config, _choices(arguments))
    kinds = {label: resolve_kind(each.device) for label, each in configs.items()}
    for label, each in configs.items():
        check_precision(kinds[label], each.precision)
        check_weights(each.weights, store.home / "runs", each.model)
    has_tpu = "xla" in kinds.values() and wants_tpu()
    planned = plan_group(
        configs, repeats=arguments.repeats, start=arguments.start, seed=arguments.order_seed, cold_first=has_tpu
    )
    if "xla" in kinds.values() and arguments.start != "cold" and not has_tpu:
        # a backward on the CPU first would spoil XLA for this process's life
        with XLA_LOCK:
            initialise(store.home)
    name = arguments.name or " against ".join(configs)
    plan = {"repeats": arguments.repeats, "start": arguments.start, "order_seed": arguments.order_seed}
    group_id = store.groups.create(name, planned, plan=plan, own=True)
    with stop_on_interrupt() as should_stop, ProgressBar(config.epochs) as bar:
        run_group(
            store,
            group_id,
            on_run=lambda number, total, run_id: print(
                f"{number} of {total}: {store.get_run(run_id).name}", file=sys.stderr, flush=True
            ),
            on_event=bar.follow,
            should_stop=should_stop,
        )
        if should_stop():
            raise KeyboardInterrupt
    return group_id


def _choices(arguments: argparse.Namespace) -> dict[str, list[str]]:
    choices: dict[str, list[str]] = {}
    if arguments.devices:
        choices["device"] = _values("device", arguments.devices)
    for words in arguments.vary:
        name, sign, values = words.partition("=")
        name = name.strip().replace("-", "_")
        if not sign or name not in RunConfig.model_fields:
            raise ConfigError(
                f"--vary {words} names no option with values.", fix="Write it as --vary batch-size=16,32."
            )
        choices[name] = _values(name, values)
    return choices


def _values(name: str, text: str) -> list[str]:
    values = list(dict.fromkeys(value.strip() for value in text.split(",") if value.strip()))
    if not values:
        raise ConfigError(f"No value is given for {name}.", fix=f"Write it as --vary {name}=A,B.")
    return values


def groups_command(store: Store) -> tuple[dict[str, Any], list[str]]:
    """All groups, newest first, and the reference group."""
    from core.analysis.article import ARTICLE

    groups: list[dict[str, Any]] = [
        {
            "group_id": record.group_id,
            "name": record.name,
            "created": record.created,
            "is_active": record.is_active,
            "runs": [asdict(member) for member in record.members],
        }
        for record in store.groups.list_all()
    ]
    groups.append({"group_id": ARTICLE.group_id, "name": ARTICLE.name, "created": None, "is_active": False, "runs": []})
    return {"groups": groups}, [f"{group['group_id']}  {group['name']}" for group in groups]


def forecast_command(
    arguments: argparse.Namespace, config: RunConfig, store: Store
) -> tuple[dict[str, Any], list[str]]:
    """How long a run would take; with --probe a few steps of it are timed first.

    Raises:
        ConfigError: the probe did not work.
    """
    from core.analysis.forecast import forecast_for
    from core.devices import resolve_kind

    kind = resolve_kind(config.device)
    if arguments.probe:
        from core.commands.progress import ProgressBar
        from core.running.trainer import train_run

        run_id = store.create_run(config, own=True, purpose="probe")
        with stop_on_interrupt() as should_stop, ProgressBar(1) as bar:
            state = train_run(store, run_id, on_event=bar.follow, should_stop=should_stop)
        if state != "finished":
            summary = summarise(store, run_id)
            raise ConfigError(summary["reason"] or "The probe was stopped.", fix=summary["fix"] or "Start it again.")
    forecast = forecast_for(store, config, kind)
    if forecast is None:
        words = "No run like this one has ended here: with --probe a few steps are timed."
        return {"forecast": None}, [words]
    return {"forecast": asdict(forecast)}, [forecast_in_words(forecast)]

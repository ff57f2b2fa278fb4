"""The queue: which waiting run may begin, in which process, and what the others wait for."""

from __future__ import annotations

import os
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, replace

import psutil

from core.devices import resolve_kind, torch_tpu
from core.devices.xla import holds_tpu
from core.errors import DeviceError, StoreError
from core.storage.records import RunRecord, blocks_of
from core.store import Store
from core.words import listed

DEFAULT_GIB = 4.0
"""Host memory that a run is thought to need where none like it has been measured."""
NEXT = "It is next: a dashboard begins it at once."
PROBE, WARM_UP, COMPARED = "a probe", "a warm-up run", "a run of a comparison"
"""Runs that are timed, and so have nothing beside them."""


@dataclass(frozen=True)
class WaitingRun:
    """A run that stands in the queue.

    Attributes:
        kind: of its device; None where it can't be had, which the run tells by itself.
        timed: why nothing may train beside it, as "a run of a comparison"; "" where others may.
        process: own, or shared with whoever trains it.
        needs_gib: host memory that it may take; 0 where nobody asked.
        is_measured: an earlier run like it took so much.
    """

    run_id: str
    name: str
    kind: str | None
    timed: str = ""
    process: str = "shared"
    needs_gib: float = 0.0
    is_measured: bool = False


@dataclass(frozen=True)
class ActiveRun:
    """A run that has a device, or is about to take it.

    Attributes:
        is_here: it trains in this process.
        still_gib: host memory that it may yet take, since it has not come to its first step.
    """

    run_id: str
    name: str
    kind: str | None
    timed: str = ""
    is_here: bool = False
    still_gib: float = 0.0


@dataclass(frozen=True)
class Verdict:
    """What is to be done with a waiting run; it may begin where `words` don't say what it waits for.

    `process` is own or shared for a run that may begin.
    """

    run: WaitingRun
    words: str = ""
    process: str = ""


@dataclass(frozen=True)
class Look:
    """How things stand: the queue in its order, what trains, and the host memory that is free."""

    waiting: list[WaitingRun]
    active: list[ActiveRun]
    free_gib: float


def judge(look: Look, *, only_here: Collection[str] = (), own: bool = False) -> list[Verdict]:
    """Go through the queue in its order and say of each run whether it may begin.

    A run that is timed to be compared runs alone: it waits till all others have ended, and none begins beside it.
    Any other may begin beside runs on other device kinds where memory allows. In this process trains one at a time,
    since random numbers, threads and settings are a process's: a run that begins beside that one has a process of its
    own. What waits because its device is busy is overtaken; what waits to run alone, or for memory, is not, else it
    might wait for ever.

    Args:
        only_here: device kinds that this process holds, so that no other can train on them.
        own: every run has a process of its own, but for those of a comparison that have to share one.
    """
    active, behind, verdicts = list(look.active), "", []
    free_gib = look.free_gib - sum(run.still_gib for run in active)
    for run in look.waiting:
        words = _company_in_the_way(run, active) or _device_in_the_way(run, active)
        if not words and behind:
            words = f"Waits behind {behind}, which nothing may overtake."
        process = _process_for(run, active, only_here, own)
        if not words and not process:
            words = f"Waits for {_named(_here(active))}: this process holds the device, and trains one run at a time."
        lacks_memory = not words and bool(active) and run.needs_gib > free_gib
        if lacks_memory:
            words = _memory_in_the_way(run, active, free_gib)
        if words:
            behind = behind or (_named([run]) if run.timed or lacks_memory else "")
            verdicts.append(Verdict(run, words))
            continue
        active.append(ActiveRun(run.run_id, run.name, run.kind, run.timed, process == "shared", run.needs_gib))
        free_gib -= run.needs_gib
        verdicts.append(Verdict(run, process=process))
    return verdicts


def _company_in_the_way(run: WaitingRun, active: Sequence[ActiveRun]) -> str:
    if run.timed and active:
        have = "has" if len(active) == 1 else "have"
        return f"Waits until {_named(active)} {have} ended: {run.timed} is timed, so it runs alone."
    if timed := [other for other in active if other.timed]:
        return f"Waits for {_named(timed)}: {timed[0].timed} is timed, so it runs alone."
    return ""


def _device_in_the_way(run: WaitingRun, active: Sequence[ActiveRun]) -> str:
    there = [other for other in active if other.kind == run.kind and run.kind is not None]
    return f"Waits for device {run.kind}: {_named(there)} trains on it." if there else ""


def _memory_in_the_way(run: WaitingRun, active: Sequence[ActiveRun], free_gib: float) -> str:
    basis = "as much as a run like it took" if run.is_measured else "which is assumed, as none like it was measured"
    return (
        f"Waits for memory: it may need {run.needs_gib:.1f} GiB, {basis}, and {max(0.0, free_gib):.1f} GiB are free "
        f"beside {_named(active)}."
    )


def _process_for(run: WaitingRun, active: Sequence[ActiveRun], only_here: Collection[str], own: bool) -> str:
    """own or shared; "" where it has to wait for this process."""
    is_free = not _here(active)
    is_cold = run.timed == COMPARED and run.process == "own"
    if run.kind in only_here and not is_cold:
        return "shared" if is_free else ""
    has_own = run.process == "own" or (own and run.timed in ("", PROBE))
    # a run on a device that no other process can have is to find this one free
    return "own" if has_own or not is_free or (only_here and not run.timed) else "shared"


def _here(active: Iterable[ActiveRun]) -> list[ActiveRun]:
    return [run for run in active if run.is_here]


def _named(runs: Sequence[WaitingRun | ActiveRun]) -> str:
    return listed([run.timed if run.timed == PROBE else f"'{run.name}'" for run in runs])


def look_at(store: Store, starting: Sequence[ActiveRun] = ()) -> Look:
    """Read how things stand.

    Args:
        starting: runs that were begun here and may still stand in the queue.
    """
    begun = {run.run_id: run for run in starting}
    queued = [record for record in store.waiting_runs() if record.run_id not in begun]
    if not queued:
        return Look([], [], 0.0)
    records = store.under_way()
    timed = _timed(store, [*queued, *records])
    kinds = {device: _kind(device) for device in {record.config.device for record in queued}}
    needs = _Needs(store)
    for record in records:
        begun[record.run_id] = ActiveRun(
            record.run_id,
            record.name,
            record.device_kind,
            timed[record.run_id],
            is_here=record.pid == os.getpid() or (record.run_id in begun and begun[record.run_id].is_here),
            still_gib=0.0 if record.phase.get("step") else needs.of(record, record.device_kind)[0],
        )
    active, waiting = list(begun.values()), []
    for record in queued:
        kind, why = kinds[record.config.device], timed[record.run_id]
        run = WaitingRun(record.run_id, record.name, kind, why, record.config.process)
        # memory is no question to one that waits for its device, or runs alone
        if not why and kind not in {other.kind for other in active}:
            needs_gib, is_measured = needs.of(record, kind)
            run = replace(run, needs_gib=needs_gib, is_measured=is_measured)
        waiting.append(run)
    return Look(waiting, active, psutil.virtual_memory().available / 2**30)


def _timed(store: Store, records: Sequence[RunRecord]) -> dict[str, str]:
    """By run id: why it has to run alone, or ""."""
    compared = store.groups.of([record.run_id for record in records])
    words = {"probe": PROBE, "warm-up": WARM_UP}
    return {
        record.run_id: words.get(record.purpose, COMPARED if record.run_id in compared else "") for record in records
    }


def _kind(device: str) -> str | None:
    if device == "cpu":
        return device  # it is always there, and asking all others takes a while
    try:
        return resolve_kind(device)
    except DeviceError:
        return None


class _Needs:
    """Host memory in GiB that runs may take, and whether it was measured; each kind of run is looked up once."""

    def __init__(self, store: Store) -> None:
        self._store = store
        self._known: dict[tuple[object, ...], tuple[float, bool]] = {}

    def of(self, record: RunRecord, kind: str | None) -> tuple[float, bool]:
        config = record.config
        key = (config.model, config.image_size, config.batch_size, kind)
        if key not in self._known:
            like = self._store.newest_like(config, kind or "")
            peak = self._store.peak_memory(like) if like else None
            self._known[key] = (DEFAULT_GIB, False) if peak is None else (peak, True)
        return self._known[key]


def held_here() -> set[str]:
    """Device kinds that this process holds, so that no other can train on them."""
    return ({"xla"} if holds_tpu() else set()) | ({"tpu"} if torch_tpu.start.cache_info().currsize else set())


@dataclass(frozen=True)
class Entry:
    """What stands in the queue as one: a run, or all runs of a comparison that still wait.

    Attributes:
        entry_id: of the run or of the group.
        kinds: of the devices that they wait for.
        waits_for: a sentence.
    """

    entry_id: str
    name: str
    runs: list[RunRecord]
    kinds: list[str]
    waits_for: str


def entries_of(store: Store) -> list[Entry]:
    """The queue as people see it, in its order; without probes."""
    verdicts = {verdict.run.run_id: verdict for verdict in judge(look_at(store), only_here=held_here())}
    entries = []
    for entry_id, (name, records) in _blocks(store).items():
        # one may have begun between the two looks
        runs = [record for record in records if record.run_id in verdicts]
        if runs:
            kinds = dict.fromkeys(verdicts[run.run_id].run.kind or run.config.device for run in runs)
            entries.append(Entry(entry_id, name, runs, list(kinds), verdicts[runs[0].run_id].words or NEXT))
    return entries


def take_out(store: Store, waiting_id: str) -> int:
    """Stop a waiting run, or all waiting runs of a group; how many.

    Raises:
        StoreError: nothing of this id waits.
    """
    blocks = _blocks(store)
    found = (
        blocks[waiting_id][1]
        if waiting_id in blocks
        else [record for _, runs in blocks.values() for record in runs if record.run_id == waiting_id]
    )
    if not found:
        raise StoreError(f"{waiting_id} doesn't wait.", fix="See python -m core queue for what does.")
    for record in found:
        store.request(record.run_id, "stop")
    return len(found)


def _blocks(store: Store) -> dict[str, tuple[str, list[RunRecord]]]:
    """Name and waiting runs of what stands in the queue as one, by its id."""
    records = [record for record in store.waiting_runs() if record.purpose != "probe"]
    groups = store.groups.of([record.run_id for record in records])
    return {
        entry_id: (groups.get(runs[0].run_id, ("", runs[0].name))[1], runs)
        for entry_id, runs in blocks_of(records, groups).items()
    }

"""The batch size that a run finds itself: the search, the calculation, what is kept, and that the run is the same."""

from __future__ import annotations

import json
import weakref
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import psutil
import pytest
import torch
from safetensors.torch import load_file

from core.__main__ import main
from core.analysis.repeats import label_of
from core.analysis.summary import summarise, told_config
from core.config import as_command, make_config
from core.control import Control
from core.data.scan import scan
from core.data.sources import open_source
from core.devices.local import CpuDevice
from core.errors import ConfigError, MemoryFullError
from core.events import PhaseChanged, RunPrepared
from core.groups import varied
from core.metrics import Sums
from core.output.preview import SHOWN, first_batch
from core.running.trainer import _do, train_run
from core.setup import Prepared, check_batch
from core.store import Store
from core.timing import PhaseTimer
from core.training.task import Task, place_parts, train_step
from core.trials import auto_batch
from core.trials.auto_batch import FOLDER, SHARE, Found, find_batch_size, largest, possible_sizes
from core.trials.host_memory import LiveBytes, memory_left
from core.trials.memory import blank_batch
from tests.test_groups import tiny
from tests.test_pages import button, train_page
from tests.tiny import NoWishes, TickClock, losses, make_task
from ui import registry

MIB = 2**20


# What there is to choose from


def test_sizes_are_powers_of_two_times_the_parts_up_to_the_images_and_a_most():
    assert possible_sizes(1, 1000) == [1, 2, 4, 8, 16, 32, 64, 128, 256, 512]
    assert possible_sizes(1, 10**6)[-1] == 1024
    assert possible_sizes(6, 100) == [6, 12, 24, 48, 96]
    assert possible_sizes(8, 5) == [8]


@pytest.mark.parametrize("limit", [0, 1, 3, 8, 9, 31, 300, 5000])
def test_the_search_finds_the_largest_that_fits_by_doubling(limit: int):
    sizes, tried = possible_sizes(1, 1024), []

    def does_fit(size: int) -> bool:
        tried.append(size)
        return size <= limit

    assert largest(sizes, 8, does_fit) == max((size for size in sizes if size <= limit), default=0)
    assert tried[0] == 8 and len(tried) == len(set(tried))
    assert all(size <= 2 * max(limit, 8) for size in tried)


# Devices that say when they are full. No CUDA is here: a CPU that raises CUDA's error above a limit stands for it.


class FullAbove(CpuDevice):
    """Has room for so many images, of all batches that wait there."""

    def __init__(self, images: int):
        super().__init__()
        self.kind, self.name, self.runs_behind, self.room = "cuda", "A made-up GPU", True, images
        self.there: list[weakref.ref] = []

    def place_batch(self, images: torch.Tensor, labels: torch.Tensor):
        placed = images.clone()
        self.there = [ref for ref in self.there if ref() is not None] + [weakref.ref(placed)]
        if sum(len(ref()) for ref in self.there) > self.room:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.")
        return placed, labels


def task_on(device: CpuDevice | None = None, **changes) -> Task:
    """A tiny task that has not begun, with dropout, so that each step draws random numbers."""
    task = make_task(dropout=0.5, **{"batch_size": 0, **changes})
    task.image_size = 8
    if device:
        task.device = device
    return task


def everything(task: Task) -> dict[str, torch.Tensor]:
    """Copies of all tensors that a run begins with."""
    tensors = {**task.module.state_dict(), "random": torch.get_rng_state()}
    if task.ema:
        tensors |= {f"average {name}": tensor for name, tensor in task.ema.module.state_dict().items()}
    return {name: tensor.clone() for name, tensor in tensors.items()}


def assert_untouched(task: Task, before: dict[str, torch.Tensor], lr: float) -> None:
    after = everything(task)
    assert all(torch.equal(before[name], after[name]) for name in before | after)
    assert not task.optimizer.state and all(group["lr"] == lr for group in task.optimizer.param_groups)
    assert all(parameter.grad is None for parameter in task.module.parameters())


# as many batches wait as lie between two logged steps, and one more: with log_every 1 there are three
@pytest.mark.parametrize(("room", "found"), [(3, 1), (100, 32), (96, 32), (95, 16), (10**6, 1024)])
def test_a_device_that_raises_is_searched_and_the_size_leaves_room_for_the_batches_that_wait(room: int, found: int):
    tried: list[int] = []
    task = task_on(FullAbove(room), ema_decay=0.9, log_every=1)
    before = everything(task)
    result = find_batch_size(task, 5000, tell=tried.append)
    assert (result.batch_size, result.how, result.file) == (found, "tried", None)
    assert tried[0] == 8
    assert_untouched(task, before, task.config.lr)
    task.device.close()


def test_a_batch_that_is_cut_into_parts_is_found_by_its_parts():
    task = task_on(FullAbove(30), accumulate=3, log_every=1)
    # the parts of a batch are placed at once
    assert find_batch_size(task, 5000).batch_size == 6
    task.device.close()


def test_where_no_batch_fits_it_is_told_with_a_way_out():
    task = task_on(FullAbove(0))
    before = everything(task)
    with pytest.raises(MemoryFullError, match=r"No batch fits into the memory of A made-up GPU\..*smaller image size"):
        find_batch_size(task, 100)
    assert_untouched(task, before, task.config.lr)
    task.device.close()


def test_an_error_that_is_none_of_memory_is_raised_and_nothing_is_left_changed():
    class Broken(FullAbove):
        def place_batch(self, images: torch.Tensor, labels: torch.Tensor):
            raise RuntimeError("the link is down")

    task = task_on(Broken(1))
    before = everything(task)
    with pytest.raises(RuntimeError, match="link is down"):
        find_batch_size(task, 100)
    assert_untouched(task, before, task.config.lr)
    task.device.close()


def test_a_size_is_found_once_a_shape(tmp_path: Path):
    tried: list[int] = []

    def found(**changes) -> Found:
        tried.clear()
        task = task_on(FullAbove(100), **{"log_every": 1, **changes})
        result = find_batch_size(task, 5000, tmp_path, tell=tried.append)
        task.device.close()
        return result

    first = found()
    assert tried and json.loads(first.file.read_text())["batch_size"] == 32 == first.batch_size
    again = found(lr=0.5, epochs=9, seed=3)
    assert (tried, again.batch_size, again.how) == ([], 32, "kept from an earlier run")
    for changes in ({"optimizer": "sgd"}, {"mixup": 0.2}, {"clip_grad_norm": 1.0}, {"ema_decay": 0.9}):
        found(**changes)
        assert tried, changes
    assert len(list((tmp_path / FOLDER).iterdir())) == 5
    for wrong in ("{", "[]", '{"batch_size": 33}', '{"batch_size": 1048576}'):
        first.file.write_text(wrong)
        assert found().batch_size == 32 and tried
        assert json.loads(first.file.read_text())["batch_size"] == 32


def test_a_kept_size_that_does_not_fit_any_more_is_forgotten(tmp_path: Path):
    kept = tmp_path / "size.json"
    kept.write_text("{}")

    def out_of_memory(task: Task, **_: object) -> str:
        raise torch.OutOfMemoryError("CUDA out of memory.")

    task = task_on(FullAbove(5))
    control: Control = NoWishes()
    with pytest.raises(MemoryFullError, match="4 fits: --batch-size 4"):
        _do(out_of_memory, Prepared(task, 8, 32, False, kept), print, control, PhaseTimer(TickClock()))
    assert not kept.exists()
    task.device.close()


# Devices whose process is killed: what a step needs is measured and extrapolated


def test_live_bytes_are_those_of_tensors_that_were_made_and_are_held():
    outside = torch.zeros(MIB // 4)
    with LiveBytes() as live:
        held = torch.zeros(MIB // 4)
        view = held.view(2, -1)[:1]
        held.add_(1)
        outside.mul_(2)
        assert (live.now, live.peak) == (MIB, MIB)
        del held
        assert live.now == MIB
        del view
        assert live.now == 0
        torch.zeros(MIB // 2)
    assert (live.now, live.peak) == (0, 2 * MIB)


def test_live_bytes_count_what_a_backward_keeps_and_makes():
    weight = torch.zeros(256, 256, requires_grad=True)
    images = torch.zeros(1024, 256)
    with LiveBytes() as live:
        product = images @ weight
        activated = product.relu()
        activated.sum().backward()
    # both activations (1 MiB each), one gradient as large at least, and the weight's (a quarter)
    assert 3 * MIB <= live.peak <= 4.5 * MIB


def fake_host(tmp_path: Path, line: str, **files: int | str) -> tuple[Path, Path]:
    (tmp_path / "self").mkdir(parents=True)
    (tmp_path / "self" / "cgroup").write_text(line)
    for name, value in files.items():
        path = tmp_path / name.replace("__", "/").replace("_DOT_", ".")
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(f"{value}\n")
    return tmp_path, tmp_path


def test_a_containers_limit_counts_where_it_is_less_than_the_machine_has(tmp_path: Path):
    second = fake_host(
        tmp_path / "a",
        "0::/a/b\n",
        a__memory_DOT_max=900 * MIB,
        a__memory_DOT_current=500 * MIB,
        a__memory_DOT_stat=f"anon 1\ninactive_file {100 * MIB}",
        a__b__memory_DOT_max="max",
        a__b__memory_DOT_current=7,
    )
    assert memory_left(*second) == 500 * MIB
    first = fake_host(
        tmp_path / "b",
        "4:cpu,memory:/c\n",
        memory__c__memory_DOT_limit_in_bytes=300 * MIB,
        memory__c__memory_DOT_usage_in_bytes=100 * MIB,
    )
    assert memory_left(*first) == 200 * MIB
    nothing = fake_host(tmp_path / "c", "4:cpu:/c\n")
    assert memory_left(*nothing) == pytest.approx(psutil.virtual_memory().available, rel=0.2)
    full = fake_host(tmp_path / "d", "0::/\n", memory_DOT_max=1, memory_DOT_current=2)
    assert memory_left(*full) == 0


def needs(task: Task, batch_size: int) -> int:
    """The most bytes that two steps with such a batch hold, measured with that very batch."""
    task.set_train_mode()
    batch = blank_batch(task, batch_size, task.image_size)
    with LiveBytes() as live:
        for step in (1, 2):
            train_step(task, place_parts(task, batch), 0.0, step, Sums(task.device))
    return live.peak


@pytest.mark.parametrize("changes", [{}, {"optimizer": "sgd"}, {"mixup": 0.3, "precision": "bf16"}])
@pytest.mark.parametrize("room_mib", [10, 40, 200])
def test_on_a_cpu_the_largest_size_within_half_of_the_memory_is_calculated(monkeypatch, changes: dict, room_mib: int):
    monkeypatch.setattr(auto_batch, "memory_left", lambda: room_mib * MIB)
    tried: list[int] = []
    task = task_on(width=64, **changes)
    before = everything(task)
    found = find_batch_size(task, 10**6, tell=tried.append)
    assert found.how == "calculated from two small batches" and tried == [2, 4]
    assert_untouched(task, before, task.config.lr)
    # pictures that wait are counted in, a twentieth at the most
    room = SHARE * room_mib * MIB
    assert needs(task_on(width=64, **changes), found.batch_size) <= room
    if found.batch_size < 1024:
        assert needs(task_on(width=64, **changes), 2 * found.batch_size) > 0.95 * room


def test_what_a_large_batch_needs_is_foreseen_from_two_small_ones():
    changes = {"width": 64, "ema_decay": 0.9, "optimizer": "adamw"}
    task = task_on(**changes)
    small = auto_batch._histories(task, 1, 1e12, lambda size: None)
    for size in (16, 256):
        assert auto_batch.extrapolated(small, 1, size) == pytest.approx(needs(task_on(**changes), size), rel=0.02)
    # from another number of operations no line can be drawn through each; it goes through the peak of the larger
    uneven = [small[0][:-1], small[1]]
    assert auto_batch.extrapolated(uneven, 1, 8) == 2 * small[1].max()


def test_where_even_a_small_batch_needs_most_of_the_memory_a_larger_one_is_not_measured(monkeypatch):
    monkeypatch.setattr(auto_batch, "memory_left", lambda: 2 * needs(task_on(width=64), 2) + MIB // 8)
    tried: list[int] = []
    assert find_batch_size(task_on(width=64), 10**6, tell=tried.append).batch_size in (1, 2)
    assert tried == [2]
    monkeypatch.setattr(auto_batch, "memory_left", lambda: 1000)
    with pytest.raises(MemoryFullError):
        find_batch_size(task_on(width=64), 10**6)


@pytest.mark.xla
@pytest.mark.parametrize("accumulate", [1, 3])
def test_on_xla_nothing_is_compiled_and_the_weights_are_not_touched(accumulate: int):
    task = make_task("xla", width=92, batch_size=0, accumulate=accumulate)
    task.image_size = 8
    with task.device.turn():
        before = task.device.to_host(dict(task.module.state_dict()))
        random = task.device.random_state()
    compiled = task.device.compile_count()
    found = find_batch_size(task, 100)
    assert found.batch_size == {1: 64, 3: 96}[accumulate] and found.how == "calculated from two small batches"
    assert task.device.compile_count() == compiled
    with task.device.turn():
        after = task.device.to_host(dict(task.module.state_dict()))
        # XLA's is a number of 64 bits without a sign, for which torch has no tensor
        now = task.device.random_state()
        assert now.keys() == random.keys()
        assert all(torch.equal(random[k], v) if isinstance(v, torch.Tensor) else random[k] == v for k, v in now.items())
    assert all(torch.equal(before[name], after[name]) for name in before)
    task.device.close()


@pytest.mark.xla
def test_memory_of_a_tpu_is_that_of_its_chips(monkeypatch):
    # no TPU is here: that XLA ran on one is pretended
    task = make_task("xla", width=93, batch_size=0)
    monkeypatch.setattr(task.device, "facts", lambda: {"xla_runtime": "TPU"})
    for kind, gib in (("v5e", 16), ("v3", 16)):
        tpu = SimpleNamespace(memory_gib_per_chip={"v5e": 16, "v3": 32}[kind], has_two_devices_a_chip=kind == "v3")
        monkeypatch.setattr(auto_batch, "find_tpu", lambda tpu=tpu: tpu)
        assert auto_batch._memory(task) == gib * 2**30
    task.device.close()


# The option


def test_auto_is_said_everywhere_and_kept_as_0(tmp_path: Path, capsys):
    config = make_config(batch_size="auto", accumulate=3)
    assert config.batch_size == 0 == make_config(**json.loads(config.model_dump_json())).batch_size
    assert "--batch-size auto" in as_command(config)
    home = str(tmp_path / "home")
    assert main(["--home", home, "train", "--batch-size", "auto", "--print-config", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["batch_size"] == 0
    assert list(varied(make_config(), {"batch_size": ["auto", "8"]})) == ["batch_size auto", "batch_size 8"]


def test_another_word_is_refused(capsys):
    with pytest.raises(ConfigError, match="--batch-size can't be 'many'"):
        make_config(batch_size="many")
    assert main(["train", "--batch-size", "many"]) == 2
    assert len(capsys.readouterr().err.strip().splitlines()) == 1


def test_where_several_processes_share_a_batch_auto_is_refused_in_one_line(tmp_path: Path, capsys):
    config = make_config(batch_size="auto", num_devices=2, device="cpu")
    with pytest.raises(ConfigError, match="is not found where 2 processes share each batch"):
        check_batch(config, 2, 2)
    # a TPU's chips are driven by one process
    check_batch(config, 4, 1)
    options = ["--batch-size", "auto", "--num-devices", "2", "--device", "cpu", "--data", "builtin:digits"]
    assert main(["--home", str(tmp_path), "train", *options]) == 2
    told = capsys.readouterr().err.strip()
    assert "2 processes share each batch" in told and len(told.splitlines()) == 1
    store = Store(tmp_path)
    run_id = store.create_run(config)
    assert train_run(store, run_id) == "failed" and summarise(store, run_id)["error"] == "ConfigError"
    store.close()


# Runs


def trained(store: Store, config, **options):
    told: list = []
    run_id = store.create_run(config)
    state = train_run(store, run_id, on_event=told.append, **options)
    return summarise(store, run_id), told, state


def test_a_run_finds_its_size_and_is_to_the_bit_the_run_that_was_given_it(store: Store, pictures: Path):
    options = {"trainable": "all", "epochs": 2, "log_every": 1, "augmentation": "crop", "ema_decay": 0.9}
    found, told, state = trained(store, tiny(pictures, batch_size="auto", **options))
    # of 17 images 16 are the largest power of two
    assert (state, found["batch_size"], found["config"]["batch_size"]) == ("finished", 16, 0), found["reason"]
    assert found["environment"]["batch_size_is"] == "calculated from two small batches"
    assert found["setup_parts"]["batch_size_s"] > 0 and told_config(found)["batch_size"] == "auto: 16"
    prepared = next(event for event in told if isinstance(event, RunPrepared))
    assert prepared.steps_per_epoch == 2
    given, given_told, _ = trained(store, tiny(pictures, batch_size=16, **options))
    assert losses(told) == losses(given_told) and len(losses(told)) == 4
    assert [epoch["val_loss"] for epoch in found["epochs"]] == [epoch["val_loss"] for epoch in given["epochs"]]
    mine, theirs = (load_file(store.run_folder(run["run_id"]) / "last.safetensors") for run in (found, given))
    assert all(torch.equal(mine[name], theirs[name]) for name in mine | theirs)
    assert "batch_size" not in given["environment"] and "batch_size_s" not in given["setup_parts"]
    # they are the same to a comparison
    assert label_of([found, given]) == ["cpu", "cpu"]


def tells_of_trying(told: list) -> list[str]:
    return [event.detail for event in told if isinstance(event, PhaseChanged) and event.detail.startswith("trying")]


def test_the_next_run_of_the_same_shape_does_not_search_and_one_that_makes_its_caches_anew_does(
    store: Store, pictures: Path
):
    config = tiny(pictures, batch_size="auto")
    _, told, _ = trained(store, config)
    assert tells_of_trying(told) == ["trying batches of 2", "trying batches of 4"]
    again, told, _ = trained(store, tiny(pictures, batch_size="auto", lr=0.5))
    assert tells_of_trying(told) == [] and again["environment"]["batch_size_is"] == "kept from an earlier run"
    assert again["batch_size"] == 16
    anew, told, _ = trained(store, tiny(pictures, batch_size="auto", caches="anew"))
    assert tells_of_trying(told) and anew["batch_size"] == 16


def test_a_run_can_be_stopped_while_sizes_are_tried(store: Store, pictures: Path):
    run_id, told = store.create_run(tiny(pictures, batch_size="auto")), []
    state = train_run(store, run_id, on_event=told.append, should_stop=lambda: len(tells_of_trying(told)) > 0)
    assert state == "stopped" and len(tells_of_trying(told)) == 1
    assert not (store.home / "cache" / FOLDER).exists()


@pytest.mark.xla
def test_a_run_on_xla_with_a_found_size_compiles_as_many_programs_as_one_that_was_given_it(
    store: Store, pictures: Path
):
    # a size of image of its own, since XLA keeps a process's programs
    options = {"device": "xla", "image_size": 37, "trainable": "all"}
    found, _, state = trained(store, tiny(pictures, batch_size="auto", **options))
    assert (state, found["batch_size"]) == ("finished", 16), found["reason"]
    assert found["compile"]["count"] == 2
    given, _, _ = trained(store, tiny(pictures, batch_size=16, **options))
    assert given["compile"]["count"] == 0
    assert given["epochs"][0]["train_loss"] == found["epochs"][0]["train_loss"]


# Pages


def test_the_first_batch_of_a_size_yet_unknown_shows_as_many_images_as_are_shown(store: Store, pictures: Path):
    config = tiny(pictures, batch_size="auto")
    dataset = scan(open_source(str(pictures), store.home), home=store.home, seed=0, val_percent=20)
    preview = first_batch(dataset, config)
    assert not preview.is_exact and preview.batch_size == min(SHOWN, len(dataset.train)) == 17
    assert np.array_equal(preview.images[0][0], first_batch(dataset, tiny(pictures)).images[0][0])


@pytest.fixture
def home(store, monkeypatch) -> Store:
    """The pages' store; its worker only hears that it is woken."""
    monkeypatch.setattr(registry._entry(), "services", registry.Services(store, SimpleNamespace(wake=lambda: None)))
    return store


def test_the_form_takes_automatic_and_back(home: Store, pictures: Path):
    app = train_page(tiny(pictures))
    toggle = app.toggle(key="auto_batch_size")
    assert not toggle.value and not app.number_input(key="form_batch_size").disabled
    toggle.set_value(True).run()
    assert app.session_state["form_batch_size"] == 0 and app.number_input(key="form_batch_size").disabled
    assert any("--batch-size auto" in code.value for code in app.code)
    app.run()
    button(app, "Start").click().run()
    assert not app.exception, app.exception
    [record] = home.list_runs()
    assert record.config.batch_size == 0
    app = train_page(make_config(batch_size=0))
    assert app.toggle(key="auto_batch_size").value
    app.toggle(key="auto_batch_size").set_value(False).run()
    assert app.session_state["form_batch_size"] == 32
    app.number_input(key="form_batch_size").set_value(48).run()
    assert not app.toggle(key="auto_batch_size").value and app.session_state["form_batch_size"] == 48

"""Training images that grow from epoch to epoch: their sizes, their pixels, and runs on them."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch.nn import functional

from core.analysis.summary import summarise
from core.config import make_config
from core.control import Wish
from core.data.augment import Recipe
from core.data.loader import BatchLoader
from core.errors import ConfigError, ModelError
from core.events import ProgramCompiled
from core.models.build import build_model
from core.models.parts import check_sizes
from core.running.trainer import train_run
from core.schedule import image_size_at, smaller_sizes
from core.store import Store
from core.training.task import shapes_of
from core.training.tweak import fulfil
from tests.test_data_loader import ArrayImages, noise
from tests.test_groups import tiny
from tests.tiny import make_task


def sizes(first: int, full: int, epochs: int) -> list[int]:
    config = make_config(epochs=epochs, first_image_size=first)
    return [image_size_at(config, full, epoch) for epoch in range(1, epochs + 1)]


# Sizes


@pytest.mark.parametrize(
    ("first", "full", "epochs", "expected"),
    [
        (128, 224, 9, [128, 128, 160, 160, 192, 192, 224, 224, 224]),
        (128, 224, 5, [128, 160, 192, 224, 224]),
        (160, 224, 3, [160, 192, 224]),
        (128, 224, 2, [128, 224]),
        (128, 224, 1, [224]),
        (32, 64, 6, [32, 32, 48, 48, 64, 64]),
        (100, 110, 6, [100, 100, 100, 100, 110, 110]),
    ],
)
def test_images_grow_evenly_and_are_full_in_the_last_third(first: int, full: int, epochs: int, expected: list[int]):
    assert sizes(first, full, epochs) == expected


@pytest.mark.parametrize("epochs", [1, 2, 3, 4, 7, 30, 100])
@pytest.mark.parametrize(("first", "full"), [(16, 112), (96, 288), (223, 224)])
def test_sizes_never_shrink_and_are_of_the_known_ones(first: int, full: int, epochs: int):
    found, known = sizes(first, full, epochs), smaller_sizes(make_config(first_image_size=first), full)
    assert found == sorted(found) and set(found) <= {*known, full}
    assert found.count(full) >= -(-epochs // 3) and known[0] == first and max(known) < full


def test_without_a_first_size_all_epochs_are_alike():
    config = make_config(epochs=6)
    assert {image_size_at(config, 224, epoch) for epoch in range(1, 9)} == {224} and smaller_sizes(config, 224) == []


def test_a_first_size_that_is_not_smaller_is_refused():
    with pytest.raises(ConfigError, match="first_image_size 64 is not below image_size 64"):
        make_config(image_size=64, first_image_size=64)


def test_with_another_number_of_epochs_the_sizes_are_those_of_the_new_number():
    asked: list[int] = []
    task = make_task(epochs=9, first_image_size=16)
    task.image_size, task.resize = 64, asked.append
    for epoch in (1, 4):
        task.begin_epoch(epoch)
    fulfil(task, Wish("epochs", 6), step=12, epoch=4)
    task.begin_epoch(5)
    assert asked == [16, 32, 64]


# Batches


def loader(recipe: Recipe | None, workers: int = 0, side: int = 80) -> BatchLoader:
    images = ArrayImages(noise(10, side, side))
    numbers = torch.arange(10).numpy()
    return BatchLoader(images, numbers, numbers, 4, recipe=recipe, image_size=64, workers=workers)


def batches(recipe: Recipe | None, size: int = 64, workers: int = 0, first: int = 0):
    subject = loader(recipe, workers)
    subject.resize(size)
    return list(subject.epoch(2, first))


EVERYTHING = Recipe(
    geometry="resized_crop", color_jitter=0.4, auto_augment="randaugment", random_erasing=0.5, cutmix=1.0, mixup=0.2
)


@pytest.mark.parametrize("recipe", [Recipe(), Recipe("flip"), Recipe("crop")])
def test_a_smaller_batch_is_the_full_one_resized(recipe: Recipe):
    for small, full in zip(batches(recipe, 48), batches(recipe), strict=True):
        resized = functional.interpolate(full.images, (48, 48), mode="bilinear", antialias=True)
        assert small.images.shape == (4, 3, 48, 48) and small.images.dtype == torch.uint8
        assert torch.equal(small.images, resized) and torch.equal(small.labels, full.labels)


def test_a_random_part_of_a_picture_is_the_same_at_any_size():
    recipe = Recipe("resized_crop")
    for small, full in zip(batches(recipe, 48), batches(recipe), strict=True):
        resized = functional.interpolate(full.images.float(), (48, 48), mode="bilinear", antialias=True)
        # noise that was enlarged and made smaller again has lost some of its sharpness
        assert torch.corrcoef(torch.stack([small.images.float().flatten(), resized.flatten()]))[0, 1] > 0.85


@pytest.mark.parametrize("workers", [1, 3])
def test_threads_and_a_resume_change_nothing(workers: int):
    alone, together = batches(EVERYTHING, 32), batches(EVERYTHING, 32, workers)
    assert [shapes_of(batch) for batch in together] == [shapes_of(together[0])] * 3
    for mine, theirs in zip([*alone, *alone[1:]], [*together, *batches(EVERYTHING, 32, workers, 1)], strict=True):
        assert torch.equal(mine.images, theirs.images) and torch.equal(mine.mix.label_weight, theirs.mix.label_weight)


def test_an_epoch_that_has_begun_keeps_its_size():
    subject = loader(Recipe("flip"))
    begun = subject.epoch(1)
    first = next(begun)
    subject.resize(32)
    assert first.images.shape == next(begun).images.shape == (4, 3, 64, 64)
    assert next(subject.epoch(2)).images.shape == (4, 3, 32, 32)


# Runs


GROWING = {"image_size": 64, "first_image_size": 32, "epochs": 6}


def test_a_run_trains_on_growing_images_and_validates_on_whole_ones(
    store: Store, pictures: Path, monkeypatch: pytest.MonkeyPatch
):
    from core import engine

    seen: list[tuple[str, int]] = []
    look = engine.CompileWatch.look

    def spy(self, phase, step, epoch, shapes):
        seen.append((phase, shapes["images"][-1]))
        return look(self, phase, step, epoch, shapes)

    monkeypatch.setattr(engine.CompileWatch, "look", spy)
    run_id = store.create_run(tiny(pictures, **GROWING))
    assert train_run(store, run_id) == "finished", summarise(store, run_id)["reason"]
    training = [size for phase, size in seen if phase == "training"]
    assert training[::3] == [32, 32, 48, 48, 64, 64] and training == sorted(training)
    assert {size for phase, size in seen if phase == "evaluation"} == {64}
    told = [event.payload for event in store.events(run_id, kinds=("StageBegan",))]
    assert [(event["epoch"], event["changes"]) for event in told] == [
        (3, ["the size of images changed to 48 px"]),
        (5, ["the size of images changed to 64 px"]),
    ]
    assert summarise(store, run_id)["image_size"] == 64


@pytest.mark.xla
def test_on_xla_each_size_is_one_program_whose_cause_is_named(store: Store, pictures: Path):
    # a label smoothing of its own: XLA keeps the programs of a process
    run_id = store.create_run(tiny(pictures, device="xla", label_smoothing=0.0812, lr=1e-3, **GROWING))
    assert train_run(store, run_id) == "finished", summarise(store, run_id)["reason"]
    programs = [ProgramCompiled(**event.payload) for event in store.events(run_id, kinds=("ProgramCompiled",))]
    assert [(event.phase, event.epoch, event.count, event.cause) for event in programs] == [
        ("training", 1, 1, ""),
        ("evaluation", 1, 1, ""),
        ("training", 3, 1, "the size of images changed to 48 px"),
        ("training", 5, 1, "the size of images changed to 64 px"),
    ]


@pytest.mark.parametrize(
    "name", ["timm/vit_tiny_patch16_224", "torchvision/vit_b_16", "timm/swin_tiny_patch4_window7_224"]
)
def test_a_model_that_is_built_for_one_size_is_refused_with_the_size(name: str):
    module = build_model(name, num_classes=2, weights="none", image_size=None, trainable="head", seed=0).module
    with pytest.raises(ModelError, match="doesn't take images of 128 px on its way to the full size") as refused:
        check_sizes(module, name, [128])
    assert "\n" not in refused.value.problem and "--first-image-size" in refused.value.fix


def test_such_a_run_fails_in_set_up_in_one_line(store: Store, pictures: Path):
    run_id = store.create_run(tiny(pictures, model="timm/vit_tiny_patch16_224", **GROWING))
    assert train_run(store, run_id) == "failed"
    summary = summarise(store, run_id)
    assert (
        summary["error"] == "ModelError"
        and "timm/vit_tiny_patch16_224 doesn't take images of 32 px" in summary["reason"]
    )


def test_a_first_size_above_the_models_own_is_told_with_both(store: Store, pictures: Path):
    run_id = store.create_run(tiny(pictures, image_size=None, first_image_size=512))
    assert train_run(store, run_id) == "failed"
    assert "The first image size, 512 px, is not below the image size, 160 px" in summarise(store, run_id)["reason"]


def test_a_model_that_takes_all_sizes_is_left_as_it_was():
    module = build_model(
        "timm/test_resnet", num_classes=2, weights="none", image_size=64, trainable="all", seed=0
    ).module
    before = {name: tensor.clone() for name, tensor in module.state_dict().items()}
    check_sizes(module, "timm/test_resnet", [32, 48])
    assert module.training and all(torch.equal(tensor, before[name]) for name, tensor in module.state_dict().items())

"""Augmentation and sampling: by the book, bounded, and determined by the generator alone."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torchvision.transforms import v2

from core.config import make_config
from core.data.augment import Recipe, augment_pixels, draw_resized_crops, jitter
from core.data.auto_augment import RANDAUGMENT, TRIVIALAUGMENT, rand_augment, trivial_augment
from core.data.sampling import class_weights, epoch_order

FILL = (124, 116, 104)
TABLES = [(v2.RandAugment, RANDAUGMENT), (v2.TrivialAugmentWide, TRIVIALAUGMENT)]
NEAREST = {"ShearX", "ShearY", "Rotate"}


def random_images(num: int, height: int = 24, width: int = 32) -> torch.Tensor:
    generator = torch.Generator().manual_seed(0)
    return torch.randint(0, 256, (num, 3, height, width), dtype=torch.uint8, generator=generator)


def augmented(recipe: Recipe, images: torch.Tensor, seed: int = 0):
    return augment_pixels(images, recipe, np.random.default_rng(seed), FILL)


EACH = [
    Recipe(color_jitter=0.4),
    Recipe(auto_augment="randaugment"),
    Recipe(auto_augment="trivialaugment"),
    Recipe(random_erasing=0.5),
    Recipe(cutmix=1.0),
]


@pytest.mark.parametrize("recipe", EACH)
def test_pixels_are_determined_by_the_generator_and_the_images_given_stay(recipe: Recipe):
    images = random_images(16)
    before = images.clone()
    first, again, other = (augmented(recipe, images, seed)[0] for seed in (1, 1, 2))
    assert torch.equal(first, again) and not torch.equal(first, other)
    assert torch.equal(images, before)
    assert (first.shape, first.dtype) == (images.shape, torch.uint8)


@pytest.mark.parametrize("recipe", EACH)
def test_strides_change_no_pixel(recipe: Recipe):
    images = random_images(8)
    strided = images.contiguous(memory_format=torch.channels_last)
    assert torch.equal(augmented(recipe, strided)[0], augmented(recipe, images)[0])


def test_torchs_global_generator_is_left_alone():
    everything = Recipe(color_jitter=0.4, auto_augment="randaugment", random_erasing=1.0, mixup=1.0, cutmix=1.0)
    state = torch.get_rng_state()
    augmented(everything, random_images(4))
    assert torch.equal(torch.get_rng_state(), state)


def test_a_plain_recipe_changes_nothing():
    recipe = Recipe.of(make_config(augmentation="resized_crop", crop_scale_min=0.2))
    images = random_images(2)
    result, mix = augmented(recipe, images)
    assert recipe.is_plain and (recipe.geometry, recipe.crop_scale_min) == ("resized_crop", 0.2)
    assert torch.equal(result, images) and mix is None


@pytest.mark.parametrize(
    "changes",
    [
        {"color_jitter": 0.1},
        {"auto_augment": "trivialaugment"},
        {"random_erasing": 0.1},
        {"mixup": 0.1},
        {"cutmix": 0.1},
    ],
)
def test_a_recipe_with_any_pixel_operation_is_not_plain(changes: dict):
    recipe = Recipe.of(make_config(**changes))
    assert not recipe.is_plain
    assert {name: getattr(recipe, name) for name in changes} == changes


# random resized crops


def test_crops_lie_inside_their_images_and_within_the_limits():
    generator = np.random.default_rng(0)
    # none is so narrow that the largest central crop could be less than the least share
    heights, widths = generator.integers(300, 401, (2, 5000))
    top, left, height, width = draw_resized_crops(generator, heights, widths, 0.35).T
    assert (top >= 0).all() and (top + height <= heights).all()
    assert (left >= 0).all() and (left + width <= widths).all()
    # a side is rounded to whole pixels, which shifts it by half a pixel at most
    assert ((height + 0.5) * (width + 0.5) >= 0.35 * heights * widths).all()
    ratio_min, ratio_max = (width - 0.5) / (height + 0.5), (width + 0.5) / (height - 0.5)
    assert (ratio_min <= 4 / 3).all() and (ratio_max >= 3 / 4).all()


def test_crops_are_distributed_as_torchvisions():
    torch.manual_seed(0)
    num, scale = 4000, (0.2, 1.0)
    image = torch.empty(3, 200, 240)
    theirs = np.array([v2.RandomResizedCrop.make_params(v2.RandomResizedCrop(9, scale), [image]) for _ in range(num)])
    theirs = np.array([[crop[name] for name in ("top", "left", "height", "width")] for crop in theirs])
    ours = draw_resized_crops(np.random.default_rng(0), np.full(num, 200), np.full(num, 240), scale[0])
    for column in range(4):
        spread = theirs[:, column].std() / np.sqrt(num)
        assert abs(ours[:, column].mean() - theirs[:, column].mean()) < 5 * spread
        np.testing.assert_allclose(
            np.quantile(ours[:, column], [0.1, 0.5, 0.9]), np.quantile(theirs[:, column], [0.1, 0.5, 0.9]), atol=8
        )


@pytest.mark.parametrize(
    ("height", "width", "expected"),
    [
        (400, 20, (186, 0, 27, 20)),  # too tall: 20 / (3/4), in the middle
        (20, 400, (0, 186, 20, 27)),  # too wide: 20 * 4/3
    ],
)
def test_where_no_try_fits_the_crop_is_the_largest_central_one(height: int, width: int, expected: tuple):
    [crop] = draw_resized_crops(np.random.default_rng(0), np.array([height]), np.array([width]), 1.0)
    assert tuple(crop) == expected


def test_the_ratio_is_width_over_height():
    sides = np.full(500, 400)
    _, _, height, width = draw_resized_crops(np.random.default_rng(0), sides, sides, 0.1, ratio=(1.5, 3.0)).T
    assert (width > 1.4 * height).all() and (width < 3.2 * height).all() and (width > 2.5 * height).any()


def test_a_full_crop_of_a_square_without_a_choice_of_ratio_is_the_image():
    [crop] = draw_resized_crops(np.random.default_rng(0), np.array([50]), np.array([50]), 1.0, ratio=(1.0, 1.0))
    assert tuple(crop) == (0, 0, 50, 50)


# automatic augmentation


@pytest.mark.parametrize(("theirs", "table"), TABLES)
def test_operations_and_magnitudes_are_torchvisions(theirs, table):
    space = theirs._AUGMENTATION_SPACE
    assert list(table) == list(space)
    image = torch.empty(3, 37, 91)
    for name, (magnitudes, is_signed) in space.items():
        operation, bins = table[name], magnitudes(31, 37, 91)
        assert operation.is_signed == is_signed
        if bins is not None:
            assert [operation.magnitude(step, image) for step in range(31)] == pytest.approx(bins.tolist())


@pytest.mark.parametrize(("theirs", "table"), TABLES)
@pytest.mark.parametrize("name", RANDAUGMENT)
def test_pixels_are_torchvisions(theirs, table, name: str):
    [image] = random_images(1, 65, 33) // torch.tensor([1, 2, 4], dtype=torch.uint8).reshape(1, 3, 1, 1)
    reference, operation = theirs(fill=list(FILL)), table[name]
    for step in (1, 9, 22, 30):
        for sign in (1, -1) if operation.is_signed else (1,):
            magnitude = sign * operation.magnitude(step, image)
            if name in ("ShearX", "ShearY"):
                magnitude *= 0.9713  # off the magnitudes at which half a pixel decides
            expected = reference._apply_image_or_video_transform(
                image, name, magnitude, reference.interpolation, reference._fill
            )
            different = (operation.apply(image, magnitude, FILL) != expected).float().mean()
            assert different <= (0.005 if name in NEAREST else 0), (step, sign)


def test_each_operation_and_each_sign_is_drawn():
    [image] = random_images(1) // 2 + 30
    generator = np.random.default_rng(0)
    once = {rand_augment(image, generator, 1, 15, FILL).numpy().tobytes() for _ in range(400)}
    assert len(once) == sum(2 if operation.is_signed else 1 for operation in RANDAUGMENT.values())
    results = [trivial_augment(image, generator, FILL) for _ in range(200)]
    assert 100 < len({result.numpy().tobytes() for result in results}) < 200


def test_randaugment_applies_its_operations_in_turn():
    [image] = random_images(1)
    two = rand_augment(image, np.random.default_rng(5), 2, 9, FILL)
    generator = np.random.default_rng(5)
    one = rand_augment(image, generator, 1, 9, FILL)
    assert torch.equal(rand_augment(one, generator, 1, 9, FILL), two)


# colour jitter


class FixedDraws:
    """A generator whose draws are given."""

    def __init__(self, factors: list[float], order: list[int]):
        self.uniform, self.permutation = lambda *_: np.array(factors), lambda _: np.array(order)


@pytest.mark.parametrize("order", [[0, 1, 2], [2, 0, 1], [1, 2, 0]])
@pytest.mark.parametrize("factors", [[0.6, 1.4, 0.7], [1.3, 0.6, 1.4]])
def test_jitter_is_torchvisions_up_to_rounding(order: list[int], factors: list[float]):
    [image] = random_images(1)
    expected = image
    calls = (v2.functional.adjust_brightness, v2.functional.adjust_contrast, v2.functional.adjust_saturation)
    for index in order:
        expected = calls[index](expected, factors[index])
    ours = jitter(image, 0.4, FixedDraws(factors, order))
    assert (ours.int() - expected.int()).abs().max() <= 3


def test_jitter_draws_its_factors_around_one():
    image = torch.full((3, 2, 2), 100, dtype=torch.uint8)
    generator = np.random.default_rng(0)
    levels = np.array([jitter(image, 0.5, generator)[0, 0, 0].item() for _ in range(2000)])
    # of one grey, contrast and saturation change nothing but rounding
    assert 49 <= levels.min() < 53 and 147 < levels.max() <= 150
    assert abs(levels.mean() - 99.5) < 5 * 29 / np.sqrt(2000)


# random erasing


def test_erasing_paints_rectangles_of_the_papers_sizes_in_the_fill():
    images = torch.zeros(2000, 3, 64, 64, dtype=torch.uint8)
    result, _ = augmented(Recipe(random_erasing=0.25), images)
    is_painted = (result == torch.tensor(FILL, dtype=torch.uint8).reshape(3, 1, 1)).all(dim=1)
    assert torch.equal(is_painted, (result != 0).any(dim=1))
    shares = is_painted.float().mean(dim=(1, 2))
    touched = shares > 0
    assert abs(touched.float().mean() - 0.25) < 5 * (0.25 * 0.75 / 2000) ** 0.5
    assert shares[touched].min() > 0.015 and shares[touched].max() < 0.345
    heights, widths = is_painted.any(dim=2).sum(dim=1), is_painted.any(dim=1).sum(dim=1)
    assert torch.equal(heights * widths, is_painted.sum(dim=(1, 2)))
    ratios = (heights / widths)[touched]
    assert ratios.min() > 0.25 and ratios.max() < 4 and ratios.min() < 0.4 and ratios.max() > 2.5


# mixing


def test_mixup_draws_from_the_beta_distribution_and_leaves_the_pixels_to_the_device():
    images = random_images(2, 4, 4)
    generator = np.random.default_rng(0)
    weights = []
    for _ in range(2000):
        result, mix = augment_pixels(images, Recipe(mixup=0.4), generator, FILL)
        assert torch.equal(result, images) and torch.equal(mix.pixel_weight, mix.label_weight)
        assert (mix.pixel_weight.shape, mix.pixel_weight.dtype) == ((1,), torch.float32)
        weights.append(mix.pixel_weight.item())
    # Beta(a, a): mean 1/2, variance 1 / (4 (2a + 1))
    variance = 1 / (4 * (2 * 0.4 + 1))
    assert abs(np.mean(weights) - 0.5) < 5 * np.sqrt(variance / 2000)
    assert np.var(weights) == pytest.approx(variance, rel=0.1)


def test_cutmix_pastes_the_neighbour_and_weighs_labels_by_the_true_area():
    levels = torch.arange(4, dtype=torch.uint8).reshape(4, 1, 1, 1).expand(4, 3, 20, 30)
    before = levels.roll(1, 0)
    shares = []
    for seed in range(300):
        result, mix = augmented(Recipe(cutmix=1.0), levels, seed)
        is_own = (result == levels).all(dim=1)
        assert torch.equal(result, torch.where(is_own[:, None], levels, before))
        assert mix.pixel_weight.item() == 1
        assert mix.label_weight.item() == pytest.approx(is_own[0].float().mean().item(), abs=1e-6)
        assert torch.equal(is_own, is_own[:1].expand_as(is_own))
        shares.append(mix.label_weight.item())
    assert min(shares) < 0.3 and max(shares) > 0.95
    # what falls over the edge is not pasted, so more than the mean 1/2 of the uniform draw stays
    assert 0.55 < np.mean(shares) < 0.8


def test_with_both_a_batch_takes_one_at_even_odds():
    images = random_images(2, 32, 32)
    generator = np.random.default_rng(0)
    mixes = [augment_pixels(images, Recipe(mixup=1.0, cutmix=1.0), generator, FILL)[1] for _ in range(1000)]
    num_cutmix = sum(mix.pixel_weight.item() == 1 for mix in mixes)
    assert abs(num_cutmix - 500) < 5 * np.sqrt(250)


# sampling and class weights


LABELS = np.repeat([0, 1, 3], [90, 9, 1])


def test_shuffling_shows_each_image_once():
    first, again, other = (epoch_order(LABELS, np.random.default_rng(seed), "shuffle") for seed in (0, 0, 1))
    assert sorted(first) == list(range(100))
    assert (first == again).all() and (first != other).any()


def test_balanced_sampling_shows_the_present_classes_equally_often():
    generator = np.random.default_rng(0)
    orders = [epoch_order(LABELS, generator, "balanced") for _ in range(100)]
    assert all(len(order) == 100 for order in orders)
    counts = np.bincount(LABELS[np.concatenate(orders)], minlength=4)
    assert counts[2] == 0
    assert (abs(counts[[0, 1, 3]] - 10_000 / 3) < 5 * np.sqrt(10_000 * 2 / 9)).all()
    images = np.bincount(np.concatenate(orders), minlength=100)
    assert images[:90].mean() == pytest.approx(10_000 / 3 / 90, rel=0.1) and images.min() > 0


def test_class_weights_are_inverse_to_the_class_sizes_and_their_mean_over_images_is_1():
    weights = class_weights(LABELS, 5)
    assert weights.dtype == torch.float32
    assert weights.tolist() == pytest.approx([100 / (3 * 90), 100 / (3 * 9), 0, 100 / 3, 0])
    assert weights[torch.from_numpy(LABELS)].mean().item() == pytest.approx(1)


def test_an_empty_set_has_an_empty_order_and_no_weights():
    empty = np.array([], dtype=np.int64)
    assert epoch_order(empty, np.random.default_rng(0), "balanced").tolist() == []
    assert class_weights(empty, 2).tolist() == [0, 0]

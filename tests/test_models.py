"""The catalogue, building a model, its weights, and what stays frozen."""

from __future__ import annotations

import copy
import time
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.nn import functional

from core.errors import ModelError
from core.models import weights as weight_files
from core.models.build import BuiltModel, build_model
from core.models.catalogue import count_params, list_models, resolve
from core.models.on_xla import mend_for_xla
from core.models.parts import check_trainable, find_head, frozen_modules, set_train_mode
from tests.tiny import Apply

CATS = (281, 282, 285)


def build(name: str = "resnet18", **changes: object) -> BuiltModel:
    options: dict = {"num_classes": 5, "weights": "none", "image_size": None, "trainable": "all", "seed": 0}
    return build_model(name, **{**options, **changes})


def test_installed_lite0_weights_see_a_cat():
    import timm
    from skimage import data
    from torchvision.transforms import v2

    module = timm.create_model("tf_efficientnet_lite0")
    weight_files.load_lite0(module)
    looks = build("tf_efficientnet_lite0", weights="default").preprocessing
    picture = torch.from_numpy(data.chelsea()).permute(2, 0, 1)
    prepare = v2.Compose(
        [
            v2.Resize(looks.resize_size, v2.InterpolationMode(looks.interpolation)),
            v2.CenterCrop(looks.image_size),
            v2.ToDtype(torch.float32, scale=True),
            v2.Normalize(looks.mean, looks.std),
        ]
    )
    with torch.no_grad():
        logits = module.eval()(prepare(picture)[None])
    assert int(logits.argmax()) in CATS
    assert (looks.image_size, looks.interpolation, looks.mean, looks.std) == (224, "bicubic", (0.5,) * 3, (0.5,) * 3)


def test_pretrained_backbone_is_the_installed_one_and_the_head_is_new():
    import timm

    published = timm.create_model("tf_efficientnet_lite0")
    weight_files.load_lite0(published)
    built = build("tf_efficientnet_lite0", weights="default")
    assert torch.equal(built.module.conv_stem.weight, published.conv_stem.weight)
    assert built.module.classifier.weight.shape == (5, 1280)


def test_head_only_leaves_the_backbone_as_it_was():
    built = build("tf_efficientnet_lite0", weights="default", trainable="head", image_size=64)
    before = {key: value.clone() for key, value in built.module.state_dict().items()}
    set_train_mode(built.module)
    optimizer = torch.optim.SGD([p for p in built.module.parameters() if p.requires_grad], lr=0.1)
    built.module(torch.randn(4, 3, 64, 64)).square().sum().backward()
    optimizer.step()
    changed = {key for key, value in built.module.state_dict().items() if not torch.equal(value, before[key])}
    assert changed == {"classifier.weight", "classifier.bias"}
    assert built.num_trainable == 1280 * 5 + 5
    assert [name for name, part in built.module.named_modules() if part.training] == ["classifier"]


def test_last_trains_the_last_blocks_and_keeps_frozen_batch_norm_still():
    built = build(trainable="last")
    trained = {name.rsplit(".", 3)[0] for name, p in built.module.named_parameters() if p.requires_grad}
    assert any(name.startswith("layer4") for name in trained)
    assert not any(name.startswith(("conv1", "layer1", "layer2")) for name in trained)
    set_train_mode(built.module)
    assert frozen_modules(built.module) and not any(part.training for part in frozen_modules(built.module))
    assert built.module.layer4[1].bn2.training


def test_all_trains_everything():
    built = build()
    set_train_mode(built.module)
    assert built.num_trainable == built.num_params
    assert not frozen_modules(built.module) and all(part.training for part in built.module.modules())


def test_same_seed_same_model_and_the_global_random_state_is_untouched():
    state = torch.get_rng_state()
    first, second, other = build(seed=7), build(seed=7), build(seed=8)
    assert torch.equal(state, torch.get_rng_state())
    assert all(
        torch.equal(a, b)
        for a, b in zip(first.module.state_dict().values(), second.module.state_dict().values(), strict=True)
    )
    assert not torch.equal(first.module.fc.weight, other.module.fc.weight)


@pytest.mark.parametrize(
    ("name", "size"),
    [
        ("vgg11", 32),
        ("densenet121", 64),
        ("mobilenet_v3_small", 64),
        ("squeezenet1_0", 64),
        ("vit_b_16", 32),
        ("googlenet", 64),
        ("timm/resnet18", 64),
        ("vit_tiny_patch16_224", 32),
        ("deit_tiny_distilled_patch16_224", 32),
        ("repvit_m0_9", 32),
        ("volo_d1_224", 32),
        # published without a head: without a pooled vector of its own, and with one
        ("sam2_hiera_tiny", 64),
        ("vit_pe_spatial_tiny_patch16_512", 32),
    ],
)
def test_any_head_gives_one_logit_a_class(name, size):
    built = build(name, image_size=size, trainable="head")
    set_train_mode(built.module)
    logits = built.module(torch.randn(2, 3, size, size))
    assert logits.shape == (2, 5)
    logits.sum().backward()
    assert 0 < built.num_trainable < built.num_params


def test_googlenet_gives_plain_logits_in_training():
    built = build("googlenet", image_size=64)
    assert built.module.train()(torch.randn(2, 3, 64, 64)).shape == (2, 5)


def test_resize_keeps_its_proportion():
    assert (build().preprocessing.image_size, build().preprocessing.resize_size) == (224, 256)
    assert build(image_size=112).preprocessing.resize_size == 128


def test_names_say_their_library():
    assert resolve("resnet18") == ("torchvision", "resnet18")
    assert resolve("timm/resnet18") == ("timm", "resnet18")
    assert resolve("resnet50.a1_in1k") == ("timm", "resnet50.a1_in1k")


@pytest.mark.parametrize("name", ["resnet81", "timm/resnet81", "resnet50.nope", "torchvision/tf_efficientnet_lite0"])
def test_unknown_model_is_refused_by_name(name):
    with pytest.raises(ModelError, match=name):
        build(name)


def test_unknown_model_names_close_ones():
    with pytest.raises(ModelError) as caught:
        resolve("reznet18")
    assert "resnet18" in caught.value.fix


def test_catalogue_lists_both_libraries():
    models = list_models()
    assert {info.library for info in models} == {"torchvision", "timm"} and len(models) > 1000
    [lite0] = list_models("tf_efficientnet_lite0")
    assert (lite0.num_params, lite0.default_image_size, lite0.weights) == (4652008, 224, "at hand")
    assert count_params("torchvision/resnet18") == count_params("timm/resnet18") == 11689512


@pytest.mark.parametrize("name", ["resnet18", "vit_tiny_patch16_224"])
def test_weights_out_of_reach_are_an_error_within_seconds(name, monkeypatch, tmp_path):
    monkeypatch.setattr(torch.hub, "get_dir", lambda: str(tmp_path))
    monkeypatch.setattr(weight_files, "hf_cached_path", lambda *_: None)
    for variable in ("HTTPS_PROXY", "https_proxy"):
        monkeypatch.setenv(variable, "http://127.0.0.1:9")
    started = time.monotonic()
    with pytest.raises(ModelError, match="can't be downloaded") as caught:
        build(name, weights="default")
    assert time.monotonic() - started < 10 and "tf_efficientnet_lite0" in caught.value.fix


@pytest.mark.parametrize("ending", ["pth", "safetensors"])
def test_weight_file_with_other_classes_keeps_the_new_head(ending, tmp_path):
    published = build(num_classes=3, seed=1).module.state_dict()
    path = save(published, tmp_path / f"weights.{ending}")
    module = build(weights=str(path)).module
    assert torch.equal(module.conv1.weight, published["conv1.weight"])
    assert torch.equal(module.fc.weight, build().module.fc.weight)


def test_weight_file_that_does_not_fit_names_the_tensors(tmp_path):
    state = build().module.state_dict()
    del state["layer1.0.conv1.weight"]
    with pytest.raises(ModelError, match=r"layer1\.0\.conv1\.weight is missing"):
        build(weights=str(save(state, tmp_path / "short.pth")))
    with pytest.raises(ModelError, match="no weight file"):
        build(weights=str(tmp_path / "nowhere.pth"))
    (tmp_path / "text.pth").write_text("no weights")
    with pytest.raises(ModelError, match="can't be read"):
        build(weights=str(tmp_path / "text.pth"))


def test_image_size_that_the_model_does_not_take_is_refused():
    with pytest.raises(ModelError, match="50 px"):
        build("vit_b_16", image_size=50)


def test_scripted_parts_are_refused_by_name():
    module = nn.Sequential(nn.Conv2d(3, 4, 1), torch.jit.script(nn.ReLU()))
    with pytest.raises(ModelError, match="'1' is a ScriptModule"):
        check_trainable(module)


def test_traced_parts_are_refused_by_name():
    module = nn.Sequential(nn.Conv2d(3, 4, 1), nn.Sequential(torch.jit.trace(nn.ReLU(), torch.zeros(1))))
    with pytest.raises(ModelError, match=r"'1\.0' is a ScriptModule"):
        check_trainable(module)


def test_a_model_without_head_gets_one_that_depends_on_the_seed():
    first, same, other = (
        build("vit_pe_spatial_tiny_patch16_512", image_size=32, seed=seed).module for seed in (1, 1, 2)
    )
    assert list(find_head(first)) == ["head"] and first.num_classes == 5
    assert torch.equal(first.head.weight, same.head.weight) and not torch.equal(first.head.weight, other.head.weight)


def resize(*arguments, **options):
    return lambda features: functional.interpolate(features, *arguments, **options)


IMAGE = (2, 3, 9, 8)
OTHER_WORDS = {
    "pooling to more": (lambda x: functional.adaptive_avg_pool2d(x, (11, 5)), IMAGE),
    "pooling of one side": (nn.AdaptiveAvgPool2d((None, 5)), IMAGE),
    "average, nothing left over": (nn.AvgPool2d(2, 2, ceil_mode=True), (2, 3, 8, 6)),
    "average, rounded up": (nn.AvgPool2d((3, 2), (2, 3), (1, 0), ceil_mode=True), (2, 3, 8, 7)),
    "nearest": (resize(scale_factor=2.5), IMAGE),
    "nearest to less": (resize((5, 3)), IMAGE),
    "bilinear": (resize(scale_factor=2, mode="bilinear"), IMAGE),
    "bilinear by an odd factor": (resize(scale_factor=(1.7, 0.6), mode="bilinear", align_corners=False), IMAGE),
    "bilinear by sides": (resize(None, (1.7, 0.6), "bilinear", None, True), IMAGE),
    "bilinear on corners": (resize((13, 5), mode="bilinear", align_corners=True), IMAGE),
    "bicubic": (resize(size=(13, 5), mode="bicubic"), IMAGE),
    "bicubic, antialias": (resize(size=(4, 20), mode="bicubic", antialias=True), IMAGE),
    "columns": (lambda x: functional.unfold(x, 3, padding=1, stride=2), IMAGE),
    "columns of all kinds": (lambda x: functional.unfold(x, (3, 2), (2, 1), (1, 0), (1, 3)), IMAGE),
    "image": (lambda x: functional.fold(x, (9, 8), 3, padding=1, stride=2), (2, 27, 20)),
    "image of all kinds": (lambda x: functional.fold(x, (9, 8), (3, 2), (2, 1), (1, 0), (1, 3)), (2, 18, 21)),
    "windows": (lambda x: x.unfold(2, 4, 2).unfold(-2, 3, 3), IMAGE),
}
HOST_OPERATIONS = [
    "_adaptive_avg_pool2d",
    "avg_pool2d_backward",
    "upsample_nearest2d_backward",
    "upsample_bilinear2d_backward",
    "upsample_bicubic2d",
    "im2col",
    "unfold_copy",
]


@pytest.mark.parametrize(("function", "shape"), OTHER_WORDS.values(), ids=OTHER_WORDS)
def test_other_words_for_xla_say_the_same_forward_and_backward(function, shape):
    plain, mended = Apply(function), Apply(function)
    assert mend_for_xla(mended, [*HOST_OPERATIONS, "sort"]) == sorted(HOST_OPERATIONS)
    ours, theirs = (torch.randn(shape, generator=torch.Generator().manual_seed(0)).requires_grad_() for _ in "12")
    # a copy is mended too, as the preflight's or an average of the weights is
    got, expected = copy.deepcopy(mended)(ours), plain(theirs)
    assert type(got.grad_fn) is not type(expected.grad_fn) or isinstance(function, nn.AvgPool2d)
    torch.testing.assert_close(got, expected, rtol=1e-5, atol=1e-6)
    weight = torch.randn(expected.shape)
    (got * weight).sum().backward()
    (expected * weight).sum().backward()
    torch.testing.assert_close(ours.grad, theirs.grad, rtol=1e-5, atol=1e-5)
    assert torch.equal(plain(theirs), expected)


def test_other_words_are_used_only_where_asked_and_only_within_the_forward():
    assert mend_for_xla(plain := Apply(resize((4, 4))), ["sort"]) == [] and not plain._forward_hooks
    mended = Apply(resize((4, 4), mode="bilinear"))
    mend_for_xla(mended, ["upsample_bicubic2d"])
    images = torch.randn(IMAGE, requires_grad=True)
    assert "UpsampleBilinear" in str(mended(images).grad_fn)
    broken = Apply(lambda x: functional.unfold(x, 3).no_such_thing)
    mend_for_xla(broken, ["im2col"])
    with pytest.raises(AttributeError):
        broken(images)
    assert "Im2Col" in str(functional.unfold(images, 3).grad_fn)


def test_head_of_a_plain_module_is_its_last_layer():
    assert list(find_head(nn.Sequential(nn.Linear(2, 3), nn.ReLU(), nn.Linear(3, 4)))) == ["2"]


def save(state: dict[str, torch.Tensor], path: Path) -> Path:
    if path.suffix == ".safetensors":
        from safetensors.torch import save_file

        save_file(state, path)
    else:
        torch.save(state, path)
    return path

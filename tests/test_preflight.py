"""A step is traced before it is run: what would run on the host is named, and nothing is changed by looking."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn
from torch.nn import functional

from core.devices import Device, open_device
from core.errors import ModelError
from core.models.on_xla import mend_for_xla
from core.training.preflight import ONLY_OFF_TPU, preflight
from tests.tiny import Apply


class Net(nn.Module):
    """Features, one operation that is looked at, and a head."""

    def __init__(self, middle: nn.Module, width: int = 8) -> None:
        super().__init__()
        self.stem = nn.Sequential(nn.Conv2d(3, width, 3, padding=1), nn.BatchNorm2d(width), nn.Dropout(0.1))
        self.middle = middle
        self.head = nn.LazyLinear(5)
        self(torch.zeros(2, 3, 8, 8))

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        return self.head(self.middle(self.stem(images)).flatten(1))


@pytest.fixture(scope="module")
def xla() -> Device:
    return open_device("xla")


def look(module: nn.Module, device: Device, **changes) -> list[str]:
    options = {"image_size": 8, "num_classes": 5, "batch_size": 2, **changes}
    return preflight(module, device, **options)


def steps(module: nn.Module, device: Device, count: int = 3) -> list[float]:
    """Losses of some steps from the same start."""
    images = torch.randn(4, 3, 8, 8, generator=torch.Generator().manual_seed(0))
    model = device.place_model(copy.deepcopy(module)).train()
    images, labels = device.place_batch(images, torch.arange(4))
    device.wait()
    found = []
    for _ in range(count):
        loss = functional.cross_entropy(model(images), labels)
        loss.backward()
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.sub_(parameter.grad * 0.1)
                parameter.grad = None
        device.wait()
        found.append(loss.detach())
    return [loss.item() for loss in found]


FALL_BACKS = {
    "adaptive pooling to sides that don't divide": (
        nn.AdaptiveAvgPool2d(3),
        ["_adaptive_avg_pool2d", "_adaptive_avg_pool2d_backward"],
    ),
    "averages, rounded up": (nn.AvgPool2d(2, ceil_mode=True), ["avg_pool2d_backward"]),
    "unfold": (nn.Unfold(3, padding=1, stride=2), ["col2im", "im2col"]),
    "windows": (Apply(lambda x: x.unfold(2, 4, 2)), ["unfold_backward", "unfold_copy"]),
    "bicubic": (
        Apply(lambda x: functional.interpolate(x, 11, mode="bicubic")),
        ["upsample_bicubic2d", "upsample_bicubic2d_backward"],
    ),
    "antialias": (
        Apply(lambda x: functional.interpolate(x, 5, mode="bilinear", antialias=True)),
        ["_upsample_bilinear2d_aa", "_upsample_bilinear2d_aa_backward"],
    ),
    "nearest, off a TPU": (nn.Upsample(scale_factor=2), ["upsample_nearest2d_backward"]),
    "bilinear, off a TPU": (nn.UpsamplingBilinear2d(scale_factor=2), ["upsample_bilinear2d_backward"]),
    "a value that Python reads": (Apply(lambda x: x * (1 if x.sum().item() else 2)), ["_local_scalar_dense"]),
    "a tensor that Python fetches": (Apply(lambda x: x * x.detach().amax().cpu().to(x.device)), ["_to_copy"]),
    "nothing": (nn.AdaptiveAvgPool2d(4), []),
}


@pytest.mark.xla
@pytest.mark.parametrize(("middle", "names"), FALL_BACKS.values(), ids=FALL_BACKS)
def test_what_runs_on_the_host_is_named_forward_and_backward(middle: nn.Module, names: list[str], xla: Device):
    assert look(Net(middle), xla) == names


class Beside(nn.Module):
    """All operations that can be said in other words, side by side."""

    def __init__(self) -> None:
        super().__init__()
        self.parts = nn.ModuleList(middle for name, (middle, _) in FALL_BACKS.items() if "Python" not in name)

    def forward(self, features: torch.Tensor) -> torch.Tensor:
        return torch.cat([part(features).flatten(1) for part in self.parts], 1)


@pytest.mark.xla
def test_what_is_foreseen_is_what_happens_and_a_mended_model_takes_the_same_steps_without(xla: Device):
    module = Net(Beside(), width=2)
    module.stem[2].p = 0.0
    names = look(module, xla)
    assert names == sorted({name for case in FALL_BACKS if "Python" not in case for name in FALL_BACKS[case][1]})
    assert happened(lambda: steps(module, xla, count=1), xla) == names
    expected = steps(module, open_device("cpu"))
    assert mend_for_xla(module, names) == names
    assert look(module, xla) == look(module, xla, precision="bf16") == []
    compiles, losses = xla.compile_count(), []
    assert happened(lambda: losses.extend(steps(module, xla)), xla) == []
    assert xla.compile_count() - compiles == 1
    assert losses == pytest.approx(expected, rel=1e-5)


def happened(act, device: Device) -> list[str]:
    """What ran on the host, save that the test reads the loss."""
    before = device.host_fallbacks()
    act()
    found = {name for name, count in device.host_fallbacks().items() if count > before.get(name, 0)}
    return sorted(found - {"_local_scalar_dense"})


@pytest.mark.xla
def test_looking_compiles_nothing_of_a_clean_model_and_changes_nothing(xla: Device):
    module = Net(nn.AdaptiveAvgPool2d(4))
    state = {name: value.clone() for name, value in module.state_dict().items()}
    modes = [part.training for part in module.modules()]
    draw = torch.empty(3, device=xla.torch_device)
    with xla.keep_random_state():
        expected = draw.uniform_().tolist()
    compiles, host = xla.compile_count(), torch.get_rng_state()
    assert look(module, xla) == []
    assert xla.compile_count() == compiles and torch.equal(torch.get_rng_state(), host)
    assert draw.uniform_().tolist() == expected
    assert all(torch.equal(value, state[name]) for name, value in module.state_dict().items())
    assert [part.training for part in module.modules()] == modes
    assert all(parameter.grad is None for parameter in module.parameters())


@pytest.mark.xla
def test_what_would_fail_is_refused_with_operation_and_part(xla: Device):
    with pytest.raises(ModelError, match=r"add\.Tensor fails in its part 'middle'"):
        look(BuiltBroken(lambda x: x + torch.zeros(3, device=x.device)), xla)
    with pytest.raises(ModelError, match=r"mm fails in backward|fails in backward"):
        look(BuiltBroken(BrokenBackward.apply), xla)
    with pytest.raises(ModelError, match=r"not logits \(2, 7\)"):
        look(Net(nn.Identity()), xla, num_classes=7)


@pytest.mark.xla
def test_what_xla_computes_wrongly_is_refused(xla: Device):
    for layer in (nn.ELU(), nn.SELU(), nn.CELU(), nn.CELU(0.5, inplace=True)):
        with pytest.raises(ModelError, match="inplace=True"):
            look(Net(layer), xla)
    for layer in (nn.ELU(inplace=True), nn.SELU(inplace=True), nn.CELU(inplace=True)):
        assert look(Net(layer), xla) == []


class BuiltBroken(Net):
    """Breaks once it is built."""

    def __init__(self, function) -> None:
        super().__init__(nn.Identity())
        self.middle = Apply(function)


class BrokenBackward(torch.autograd.Function):
    @staticmethod
    def forward(ctx, features):
        return features.clone()

    @staticmethod
    def backward(ctx, gradient):
        return gradient @ gradient.new_zeros(3, 3)


def test_other_devices_are_not_looked_at():
    assert look(None, open_device("cpu")) == []


def test_what_a_tpu_computes_by_itself_is_known():
    named = {name for _, names in FALL_BACKS.values() for name in names}
    assert named & ONLY_OFF_TPU == {"upsample_nearest2d_backward", "upsample_bilinear2d_backward"} == set(ONLY_OFF_TPU)


# what timm of 2020 did to keep less for the backward pass, and what failed on TPUs then: "Unknown device"
@torch.jit.script
def scripted_swish(features):
    return features * torch.sigmoid(features)


@torch.jit.script
def scripted_swish_gradient(features, gradient):
    gate = torch.sigmoid(features)
    return gradient * gate * (1 + features * (1 - gate))


class ScriptedSwish(torch.autograd.Function):
    @staticmethod
    def forward(ctx, features):
        ctx.save_for_backward(features)
        return scripted_swish(features)

    @staticmethod
    def backward(ctx, gradient):
        (features,) = ctx.saved_tensors
        return scripted_swish_gradient(features, gradient)


@pytest.mark.xla
def test_scripted_functions_in_a_function_of_ones_own_train_as_the_plain_ones_do(xla: Device):
    plain = Net(nn.SiLU(), width=3)
    plain.stem[2].p = 0.0
    scripted = copy.deepcopy(plain)
    scripted.middle = Apply(ScriptedSwish.apply)
    assert look(scripted, xla) == []
    compiles = xla.compile_count()
    losses = steps(scripted, xla)
    assert xla.compile_count() - compiles == 1
    assert losses == pytest.approx(steps(plain, xla), rel=1e-6)
    assert losses == pytest.approx(steps(plain, open_device("cpu")), rel=1e-5)

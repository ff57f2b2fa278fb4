"""Operations that XLA has no kernel for, in other words that it has: the same numbers without a way over the host."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.overrides import TorchFunctionMode

_KINDS = {
    "_adaptive_avg_pool2d": "adaptive_avg_pool2d",
    "_adaptive_avg_pool2d_backward": "adaptive_avg_pool2d",
    "avg_pool2d_backward": "avg_pool2d",
    "upsample_nearest2d_backward": "nearest",
    "upsample_bilinear2d_backward": "bilinear",
    "_upsample_bilinear2d_aa": "bilinear",
    "_upsample_bilinear2d_aa_backward": "bilinear",
    "upsample_bicubic2d": "bicubic",
    "upsample_bicubic2d_backward": "bicubic",
    "_upsample_bicubic2d_aa": "bicubic",
    "_upsample_bicubic2d_aa_backward": "bicubic",
    "im2col": "columns",
    "col2im": "columns",
    "unfold_copy": "windows",
    "unfold_backward": "windows",
}


def mend_for_xla(module: nn.Module, operations: Iterable[str]) -> list[str]:
    """Have the module's forward say in other words what would run on the host; in place, by hooks.

    Results and gradients are the original's to float32 rounding, on every device. Parameters, buffers and their
    names stay.

    Args:
        operations: what falls back, as `preflight.preflight` names it.

    Returns:
        Those for which there are other words, sorted.
    """
    mended = sorted(_KINDS.keys() & set(operations))
    if mended:
        mending = _Mending(frozenset(_KINDS[name] for name in mended))
        module.register_forward_pre_hook(mending.begin)
        module.register_forward_hook(mending.end, always_call=True)
    return mended


class _Mending:
    """Puts the substitutes in force while a forward runs; a copy of the module gets one of its own."""

    def __init__(self, kinds: frozenset[str]) -> None:
        self._kinds, self._taps = kinds, dict[Any, Taps]()
        self._running: list[_Substitutes] = []

    def __deepcopy__(self, memo: dict[int, Any]) -> _Mending:
        return _Mending(self._kinds)

    def begin(self, *_: Any) -> None:
        self._running.append(_Substitutes(self._kinds, self._taps))
        self._running[-1].__enter__()  # type: ignore[no-untyped-call]

    def end(self, *_: Any) -> None:
        if self._running:
            self._running.pop().__exit__(None, None, None)  # type: ignore[no-untyped-call]


class _Substitutes(TorchFunctionMode):
    """Calls a substitute in the place of a function of torch, where there is one for the arguments."""

    def __init__(self, kinds: frozenset[str], taps: dict[Any, Taps]) -> None:
        super().__init__()
        self._kinds, self._taps = kinds, taps
        self._substitutes: dict[Any, Callable[..., Any]] = {functional.interpolate: self._interpolate}
        if "adaptive_avg_pool2d" in kinds:
            self._substitutes[functional.adaptive_avg_pool2d] = self._adaptive_avg_pool2d
        if "avg_pool2d" in kinds:
            self._substitutes[functional.avg_pool2d] = self._avg_pool2d
        if "columns" in kinds:
            self._substitutes |= {functional.unfold: columns_of, functional.fold: image_of}
        if "windows" in kinds:
            self._substitutes[Tensor.unfold] = windows_of

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        return self._substitutes.get(func, func)(*args, **kwargs or {})

    def _adaptive_avg_pool2d(self, input: Tensor, output_size: Any) -> Tensor:
        wanted = _pair(output_size)
        size = (wanted[0] or input.shape[-2], wanted[1] or input.shape[-1])
        if input.shape[-2] % size[0] == 0 == input.shape[-1] % size[1]:
            return functional.adaptive_avg_pool2d(input, size)
        for dim, length in zip((-2, -1), size, strict=True):
            input = self._resampled(input, dim, functional.adaptive_avg_pool2d, output_size=(length, input.shape[dim]))
        return input

    def _avg_pool2d(
        self,
        input: Tensor,
        kernel_size: Any,
        stride: Any = None,
        padding: Any = 0,
        ceil_mode: bool = False,
        count_include_pad: bool = True,
        divisor_override: int | None = None,
    ) -> Tensor:
        kernel, steps, edges = _pair(kernel_size), _pair(stride or kernel_size), _pair(padding)
        rest = [
            (side + 2 * edge - length) % step
            for side, length, step, edge in zip(input.shape[-2:], kernel, steps, edges, strict=True)
        ]
        # where nothing is left over, rounding up is rounding down, and that has a kernel
        if not any(rest) or not (ceil_mode and count_include_pad) or divisor_override or input.dim() != 4:
            ceil_mode = ceil_mode and any(rest)
            return functional.avg_pool2d(input, kernel, steps, edges, ceil_mode, count_include_pad, divisor_override)
        for dim, length, step, edge in zip((-2, -1), kernel, steps, edges, strict=True):
            options = {"kernel_size": (length, 1), "stride": (step, 1), "padding": (edge, 0), "ceil_mode": True}
            input = self._resampled(input, dim, functional.avg_pool2d, **options)
        return input

    def _interpolate(
        self, input: Tensor, size: Any = None, scale_factor: Any = None, mode: str = "nearest", *rest: Any, **named: Any
    ) -> Tensor:
        if mode not in self._kinds or input.dim() != 4:
            return functional.interpolate(input, size, scale_factor, mode, *rest, **named)
        options = {"mode": mode, **dict(zip(("align_corners", "recompute_scale_factor"), rest, strict=False)), **named}
        for index, dim in enumerate((-2, -1)):
            if size is not None:
                options["size"] = (_pair(size)[index], input.shape[dim])
            else:
                options["scale_factor"] = (float(_pair(scale_factor)[index]), 1.0)
            input = self._resampled(input, dim, functional.interpolate, **options)
        return input

    def _resampled(self, input: Tensor, dim: int, function: Callable[..., Tensor], **options: Any) -> Tensor:
        """The input with one side resampled as `function` resamples the height of an image."""
        key = (function, tuple(options.items()), input.shape[dim], input.device)
        if key not in self._taps:
            # the weights are asked of torch itself, by what it makes of unit vectors
            units = torch.eye(input.shape[dim])[None, None]
            self._taps[key] = Taps.of(function(units, **options)[0, 0], input.device)
        return self._taps[key].resample(input, dim)


@dataclass(frozen=True)
class Taps:
    """A linear map along one side of an image of which each result needs few inputs.

    Products with a matrix would do too, but a TPU multiplies matrices in bfloat16 unless told otherwise.

    Attributes:
        indices: for each tap (results,), the input that it reads.
        weights: for each tap (results,), what that counts.
    """

    indices: list[Tensor]
    weights: list[Tensor]

    @classmethod
    def of(cls, matrix: Tensor, device: torch.device) -> Taps:
        """Of a matrix (results, inputs), on the CPU."""
        count = max(1, int((matrix != 0).sum(1).max()))
        indices = matrix.abs().topk(count, dim=1).indices.sort(dim=1).values
        weights = matrix.gather(1, indices)
        return cls([tap.to(device) for tap in indices.T], [tap.to(device) for tap in weights.T])

    def resample(self, input: Tensor, dim: int) -> Tensor:
        """The input (batch, channels, height, width) with side `dim`, -1 or -2, mapped."""
        shape = (-1, 1) if dim == -2 else (-1,)
        taps = [
            input.index_select(dim, index) * weight.reshape(shape)
            for index, weight in zip(self.indices, self.weights, strict=True)
        ]
        return torch.stack(taps).sum(0).to(input.dtype) if len(taps) > 1 else taps[0].to(input.dtype)


def columns_of(input: Tensor, kernel_size: Any, dilation: Any = 1, padding: Any = 0, stride: Any = 1) -> Tensor:
    """`functional.unfold` by strided slices: (batch, channels, height, width) -> (batch, channels * taps, places)."""
    if input.dim() != 4:
        return functional.unfold(input, kernel_size, dilation, padding, stride)
    grid = _Grid.of(kernel_size, dilation, padding, stride)
    padded = functional.pad(input, (grid.padding[1], grid.padding[1], grid.padding[0], grid.padding[0]))
    height, width = grid.places(input.shape[-2], input.shape[-1])
    slices = [
        padded[:, :, top : top + (height - 1) * grid.stride[0] + 1 : grid.stride[0], :][
            ..., left : left + (width - 1) * grid.stride[1] + 1 : grid.stride[1]
        ]
        for top, left in grid.offsets()
    ]
    return torch.stack(slices, dim=2).reshape(input.shape[0], -1, height * width)


def image_of(
    input: Tensor, output_size: Any, kernel_size: Any, dilation: Any = 1, padding: Any = 0, stride: Any = 1
) -> Tensor:
    """`functional.fold` by padding and adding: (batch, channels * taps, places) -> (batch, channels, height, width)."""
    if input.dim() != 3:
        return functional.fold(input, output_size, kernel_size, dilation, padding, stride)
    grid, (height, width) = _Grid.of(kernel_size, dilation, padding, stride), _pair(output_size)
    full = (height + 2 * grid.padding[0], width + 2 * grid.padding[1])
    columns = input.reshape(input.shape[0], -1, len(grid.offsets()), *grid.places(height, width))
    spread = _spread(_spread(columns, -2, grid.stride[0]), -1, grid.stride[1])
    images = [
        functional.pad(
            spread[:, :, tap], (left, full[1] - left - spread.shape[-1], top, full[0] - top - spread.shape[-2])
        )
        for tap, (top, left) in enumerate(grid.offsets())
    ]
    total = torch.stack(images).sum(0)
    return total[..., grid.padding[0] : grid.padding[0] + height, grid.padding[1] : grid.padding[1] + width]


def windows_of(input: Tensor, dimension: int, size: int, step: int) -> Tensor:
    """`Tensor.unfold` by slices: windows in the place of `dimension`, and the windows' own side at the end."""
    dim = dimension % input.dim()
    starts = range(0, input.shape[dim] - size + 1, step)
    return torch.stack([input.narrow(dim, start, size) for start in starts], dim=dim).movedim(dim + 1, -1)


@dataclass(frozen=True)
class _Grid:
    """Where a kernel lies on an image; all (vertical, horizontal), in pixels."""

    kernel: tuple[int, int]
    dilation: tuple[int, int]
    padding: tuple[int, int]
    stride: tuple[int, int]

    @classmethod
    def of(cls, *values: Any) -> _Grid:
        return cls(*map(_pair, values))

    def offsets(self) -> list[tuple[int, int]]:
        """Of each of the kernel's taps from its corner, row by row."""
        down, across = (
            [tap * step for tap in range(count)] for count, step in zip(self.kernel, self.dilation, strict=True)
        )
        return list(itertools.product(down, across))

    def places(self, height: int, width: int) -> tuple[int, int]:
        """How many places the kernel has on an image of this size."""
        down, across = (
            (side + 2 * padding - dilation * (kernel - 1) - 1) // stride + 1
            for side, kernel, dilation, padding, stride in zip(
                (height, width), self.kernel, self.dilation, self.padding, self.stride, strict=True
            )
        )
        return down, across


def _spread(input: Tensor, dim: int, step: int) -> Tensor:
    """The input with `step - 1` zeros between its elements along a side, counted from the end (-1 or -2)."""
    if step == 1:
        return input
    length = input.shape[dim]
    wide = input.unsqueeze(input.dim() + dim + 1)
    padded = functional.pad(wide, (0, 0) * (-dim - 1) + (0, step - 1))
    return padded.flatten(input.dim() + dim, input.dim() + dim + 1).narrow(dim, 0, (length - 1) * step + 1)


def _pair(value: Any) -> tuple[Any, Any]:
    return (value, value) if isinstance(value, int | float) or value is None else (value[0], value[-1])

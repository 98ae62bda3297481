"""Windows of convolutions and pooling along the sides of pictures, from the shapes of operators."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

from galvatron_lite.errors import InputError
from galvatron_lite.model.graph import Operator, OperatorClass

SIDES = ("depth", "height", "width")  # of a volume; a picture has the last two, a line the last one


@dataclass(frozen=True, slots=True)
class Side:
    """A window along one side of a picture."""

    extent: int  # pixels of the input
    kernel: int = 1  # pixels of the window
    stride: int = 1  # pixels from one window to the next; of the output if the convolution is transposed
    padding: int = 0  # pixels at either end
    dilation: int = 1  # pixels from one of the window's to the next
    transposed: bool = False  # whether the window passes over the output, once for each pixel of the input

    @property
    def reach(self) -> int:
        """Pixels from the window's first to its last, ke = d (k - 1) + 1."""
        return self.dilation * (self.kernel - 1) + 1

    @property
    def output(self) -> int:
        """Pixels of the output, as ``torch.nn.Conv2d`` and ``ConvTranspose2d`` have them (rounded down, nothing
        added)."""
        if self.transposed:
            return (self.extent - 1) * self.stride - 2 * self.padding + self.reach
        return (self.extent + 2 * self.padding - self.reach) // self.stride + 1


def sides_of(one: Operator) -> tuple[Side, ...]:
    """The sides that a convolution's kernel or a pooling window passes over; none of other operators."""
    if one.kind is OperatorClass.CONVOLUTION:
        return sides_from_figures(one.shape[3:])
    if one.kind is OperatorClass.MEMORY and len(one.shape) > _NORM:
        return sides_from_figures(one.shape[2:])
    return ()


_NORM = 2  # figures in the shape of a batch normalisation; a pooling window has more


@lru_cache(maxsize=4096)
def sides_from_figures(figures: tuple[int, ...]) -> tuple[Side, ...]:
    """Sides from (input extents, kernel extents, strides, paddings, dilations).

    Strides of a transposed convolution are negative. Where paddings and dilations are left out, windows that overlap
    are padded by half of the kernel and others not at all, and no window is dilated.
    """
    layouts = {parts * sides: (parts, sides) for parts in (3, 5) for sides in (1, 2, 3)}
    if len(figures) not in layouts:
        raise InputError("shape", figures, "Give extents, kernel, strides, paddings and dilations of 1 to 3 sides.")
    parts, count = layouts[len(figures)]
    rows = [figures[place * count : (place + 1) * count] for place in range(parts)]
    if parts == 3:
        rows += [tuple(k // 2 if k > s else 0 for k, s in zip(*rows[1:], strict=True)), (1,) * count]
    return tuple(
        Side(extent, kernel, abs(stride), padding, dilation, stride < 0)
        for extent, kernel, stride, padding, dilation in zip(*rows, strict=True)
    )

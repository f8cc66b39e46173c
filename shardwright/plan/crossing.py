"""How a value lies on both sides of a cut between stages.

    stages of one size      position p sends to position p; the layout is that of the stage that makes the value
    n to r·n devices        position q receives from q div r: the layout's strides times r, neighbours hold the same
    r·n to n devices        position q receives from r·q, once each r neighbours hold the same
"""

from __future__ import annotations

from ..cluster import Cluster
from ..errors import PlanError
from ..layout import Digit, Layout

__all__ = ["arriving", "between", "handed_on", "neighbours", "sender"]


def neighbours(source: int, target: int) -> int:
    """How many neighbouring ranks of a stage of `source` devices have to hold the same of what one of `target` is sent.

    Raises:
        PlanError: neither number divides the other.
    """
    if source % target and target % source:
        raise PlanError(f"a stage of {source} devices sends to one of {target}",
                        legal="numbers of devices of which one divides the other")
    return max(1, source // target)


def handed_on(layout: Layout, shape: tuple[int, ...], same: int) -> Layout:
    """The layout in which a value goes on, nearest to that in which it was made.

    Args:
        same: how many neighbouring ranks are to hold the same of it.
    """
    layout = layout.without_partial()
    if any(size % cut for size, cut in zip(shape, layout.cuts)):
        return Layout.replicated(layout.devices, len(shape))
    return Layout.of(layout.devices, [[major for d in dim if (major := _above(d, same)) is not None] for dim in layout.dims])


def _above(digit: Digit, stride: int) -> Digit | None:
    """What of a digit tells ranks apart that are at least `stride` apart."""
    if digit.stride >= stride:
        return digit
    if digit.span <= stride or stride % digit.stride or digit.size % (stride // digit.stride):
        return None
    return Digit(digit.size * digit.stride // stride, stride)


def arriving(layout: Layout, source: int, target: int) -> Layout:
    """The layout in which it arrives on `target` devices, as handed on by `source`."""
    scale = lambda d: Digit(d.size, d.stride * target // source)  # noqa: E731
    return Layout.of(target, [[scale(d) for d in dim] for dim in layout.dims])


def sender(position: int, source: int, target: int) -> int:
    """The position of the sending stage from which a position of the receiving one is sent its part."""
    return position * source // target


def between(cluster: Cluster, rank: int, peer: int) -> tuple[Digit, ...]:
    """Digits that cross the levels at which two ranks are in different units."""
    out, below = [], 1
    for level in cluster.levels:
        if rank // below % level.size != peer // below % level.size:
            out.append(Digit(level.size, below))
        below *= level.size
    return tuple(out)

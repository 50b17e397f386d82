"""Codes of llama.cpp's lattice types: several numbers together become the best point of a list.

A point stands for the magnitudes of 4 or 8 inputs of one output; signs follow the numbers. Every number is rounded to
the nearest magnitude by itself; of the points nearest to what comes of that, found beforehand, the best in the metric
is taken. llama.cpp looks for its points in the same neighborhoods (`ggml-quants.c`, `iq2_find_best_neighbour`).
"""

from functools import cache

import torch
from torch import Tensor

from moetool.format.blocks import BlockLayout
from moetool.format.gguf.lattices import lattice_points

TOGETHER = 8  # numbers whose signs are stored together
_TRIED = {8: 8, 4: 4}  # by the numbers of a point: points about a place whose loss is computed
_AT_ONCE = 1 << 16  # vectors of 8 numbers that are coded together


@cache
def list_of(kind: BlockLayout, device: torch.device) -> tuple[Tensor, Tensor]:
    """Magnitudes of the points `[points, dims]` fp32, and which they are, uint8."""
    indices = torch.from_numpy(lattice_points(kind.name))
    return torch.tensor(kind.magnitudes, dtype=torch.float32)[indices.int()].to(device), indices.to(device)


@cache
def neighbors_of(kind: BlockLayout, device: torch.device) -> Tensor:
    """The points nearest to every combination of magnitudes, `[combinations, tried]`; the first changes fastest."""
    points, _ = list_of(kind, device)
    sizes = torch.tensor(kind.magnitudes, dtype=torch.float32, device=device)
    combinations = torch.cartesian_prod(*[sizes] * kind.together).flip(1)
    return torch.cdist(combinations, points).topk(_TRIED[kind.together], largest=False).indices


def nearest_in_list(kind: BlockLayout, places: Tensor) -> Tensor:
    """Codes of points near to places `[…, in, out]`, uint8."""
    vectors = places.unflatten(-2, (-1, TOGETHER)).movedim(-1, -2)
    found = _best(kind, vectors.reshape(-1, TOGETHER), torch.eye(TOGETHER, device=places.device))
    return found.view_as(vectors).movedim(-2, -1).flatten(-3, -2).contiguous()


def best_in_list(kind: BlockLayout, places: Tensor, metric: Tensor) -> Tensor:
    """Codes `[8, out]` of points that are about the nearest to places `[8, out]` in a metric `[8, 8]`."""
    return _best(kind, places.T.contiguous(), metric).T.contiguous()


def _best(kind: BlockLayout, places: Tensor, metric: Tensor) -> Tensor:
    """Codes `[n, 8]` of the best points around places `[n, 8]` in a metric."""
    return torch.cat([_best_of_some(kind, some, metric) for some in places.split(_AT_ONCE)])


def _best_of_some(kind: BlockLayout, places: Tensor, metric: Tensor) -> Tensor:
    (points, indices), neighbors = list_of(kind, places.device), neighbors_of(kind, places.device)
    sizes = torch.tensor(kind.magnitudes, dtype=torch.float32, device=places.device)
    levels = torch.bucketize(places.abs(), (sizes[1:] + sizes[:-1]) / 2).unflatten(1, (-1, kind.together))
    powers = len(sizes) ** torch.arange(kind.together, device=places.device)
    tried = neighbors[(levels * powers).sum(-1)]  # [n, points in 8 numbers, tried]
    if tried.shape[1] == 1:
        numbers = tried[:, 0, :, None]
    else:  # every one of the first half with every one of the second
        first, second = tried.unbind(1)
        numbers = torch.stack([first.repeat_interleave(second.shape[1], 1), second.repeat(1, first.shape[1])], -1)
    values = points[numbers].flatten(2)  # [n, tried, 8]
    spread = places[:, None].expand_as(values)
    signs = _evened(kind, values, spread, spread < 0, metric.diagonal())
    errors = spread - torch.where(signs, -values, values)
    best = ((errors @ metric) * errors).sum(-1).argmin(1)
    rows, count = torch.arange(len(places), device=places.device), len(sizes)
    magnitudes, is_negative = indices[numbers[rows, best]].flatten(1), signs[rows, best]
    return torch.where(is_negative, count - 1 - magnitudes, count + magnitudes).to(torch.uint8)


def _evened(kind: BlockLayout, sizes: Tensor, places: Tensor, is_negative: Tensor, weights: Tensor) -> Tensor:
    """Signs of which an even count is negative, where the type wants that: the one that costs least is turned."""
    if not kind.has_even_signs:
        return is_negative
    cheapest = (places.abs() * sizes * weights).argmin(-1, keepdim=True)
    odd = is_negative.sum(-1, keepdim=True) % 2 == 1
    turned = is_negative.scatter(-1, cheapest, ~is_negative.gather(-1, cheapest))
    return torch.where(odd, turned, is_negative)

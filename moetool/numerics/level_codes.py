"""The non-uniform levels of `numerics.quantization` as a coder for `numerics.output_codes`."""

from collections.abc import Mapping, Sequence
from typing import ClassVar

import torch
from torch import Tensor

from moetool.numerics.error_feedback import Coded, Feedback, feed_back_together
from moetool.numerics.output_codes import EachByItself
from moetool.numerics.quantization import dequantize, is_whole


class LevelCodes(EachByItself):
    """A `Coder` that codes each number by itself, as the nearest of a few levels (`numerics.quantization`), 1 to 8
    bits."""

    noise: ClassVar[Mapping[int, float]] = {1: 0.363, 2: 0.117, 3: 0.035}

    def fed_back(self, parts: Sequence[Coded], feedback: Feedback) -> list[Tensor]:
        alike: dict[tuple[int, int], list[int]] = {}
        for place, part in enumerate(parts):
            own_kind = place if is_whole(part.bits) else -1  # whole numbers each by itself
            alike.setdefault((part.scales.shape[1], own_kind), []).append(place)
        found: dict[int, Tensor] = {}
        for places in alike.values():
            found.update(zip(places, feed_back_together([parts[place] for place in places], feedback), strict=True))
        return [found[place] for place in range(len(parts))]

    def decoded(self, codes: Tensor, scales: Tensor, bits: int) -> Tensor:
        return dequantize(codes, scales, bits, torch.float32)

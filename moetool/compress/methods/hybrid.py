"""Compression to a quantized base, with each delta in the form that loses least for its bytes."""

from collections.abc import Sequence
from typing import ClassVar

from pydantic import Field

from moetool.bases.choices import Merge
from moetool.compress.delta_forms import BaseBits
from moetool.compress.mixing.measuring import MixingOptions
from moetool.compress.mixing.schemes import StorageScheme, on_base
from moetool.compress.mixing.stage import MixingStage
from moetool.job.options import RunOptions


class HybridOptions(MixingOptions):
    """Options of `hybrid`: a budget of bytes, the base, and rotation."""

    merge: Merge = Field("fisher", description="How the shared base is made of the experts.")
    base_bits: BaseBits = Field(
        "2", description="Bits of the base: 1, 2, 3, 4, 5, 6, 8, nf4 or int8. Deltas correct its errors."
    )
    rotate: bool = Field(
        False,
        description="Rotate inputs by a random Hadamard matrix before quantizing: less error in few bits, for a "
        "small product per token.",
    )


class Hybrid(MixingStage[HybridOptions]):
    """Bits and ranks together: each form of each matrix is measured, and the budget buys the best mix."""

    name: ClassVar[str] = "hybrid"
    summary: ClassVar[str] = "a quantized base, and per delta the bits or ranks that lose least"
    options_type: ClassVar[type[RunOptions]] = HybridOptions
    method_of: ClassVar[str | None] = "compress"
    is_parallel: ClassVar[bool] = True

    def schemes(self, delta_bits: float | None, matrix_bits: float | None) -> Sequence[StorageScheme]:
        options, shape = self.options, self.source.experts.shape
        seed = options.seed if options.rotate else None
        return [on_base(shape, options.base_bits, delta_bits, options.group_size, seed, options.trellis)]

    @property
    def ratio(self) -> float | None:
        return self.options.ratio

    @property
    def merge(self) -> Merge:
        return self.options.merge

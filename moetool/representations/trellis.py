"""A matrix in trellis-coded quantization (`numerics.trellis`): 1 to 4 bits per weight and a scale per group."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar, Self

import torch
from torch import Tensor

from moetool.numerics import trellis
from moetool.numerics.error_feedback import Coded
from moetool.numerics.output_codes import Coder, coded_for_outputs
from moetool.numerics.packing import pack, rows_served, unpack
from moetool.numerics.work import Work
from moetool.representations.base import Stored
from moetool.representations.measured import Measured
from moetool.representations.quantized import Quantized, QuantizedWeight, group_size
from moetool.representations.trainable import TrainableScales
from moetool.representations.work import TRIAL_ROWS, linked_paths, trellis_paths


@dataclass(frozen=True)
class Trellis(Quantized):
    """A delta to the shared base in codes of 1 to 4 bits in a trellis, with a scale per `group` inputs.

    Tensors are those of `quantised`; rows are a multiple of those that a byte serves.
    """

    kind: ClassVar[str] = "trellis"
    is_alone: ClassVar[bool] = True
    examples: ClassVar[tuple[str, ...]] = ("trellis:2:8", "trellis:3:row", "trellis:1:16", "trellis:4:32")

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.bits not in trellis.WIDTHS:
            raise ValueError(f"codes in a trellis have {', '.join(map(str, trellis.WIDTHS))} bits, not {self.bits}")

    def fitted(self, shape: tuple[int, int]) -> Self:
        trellis.check_rows(shape[0], self.bits)
        return super().fitted(shape)

    def tensors(self, shape: tuple[int, int]) -> dict[str, Stored]:
        trellis.check_rows(shape[0], self.bits)
        return super().tensors(shape)

    def work(self, matrix: tuple[int, int], *, fed_back: bool = False) -> Work:
        return self.coding_work(matrix, fed_back=fed_back) + trellis_paths(matrix, self.bits)

    def in_turn_work(self, matrix: tuple[int, int]) -> Work:
        return super().in_turn_work(matrix) + linked_paths(matrix)

    def trial_work(self, columns: int) -> Work:
        return super().trial_work(columns) + trellis_paths((TRIAL_ROWS, columns), self.bits)

    def scaled(self, matrix: Tensor, dtype: torch.dtype, importance: Tensor | None) -> Coded:
        group = group_size(self.group, matrix.shape[1])
        return Coded(matrix, trellis.fitting_scales(matrix, self.bits, group, dtype, importance=importance), self.bits)

    @property
    def coder(self) -> Coder:
        return trellis.TrellisCodes()

    def encode_alike(self, matrix: Tensor, dtype: torch.dtype, measured: Measured) -> dict[str, Tensor]:
        found = self.scaled(matrix, dtype, measured.energy)
        scales = found.scales
        if (feedback := measured.with_feedback().feedback) is None:
            codes = trellis.nearest_codes(matrix, scales, self.bits)
        else:
            [(codes, scales)] = coded_for_outputs(
                [found], trellis.TrellisCodes(), feedback, keeps_size=measured.keeps_size
            )
        return {"codes": pack(codes.reshape(-1), self.bits), "scales": scales}

    def trainable(
        self, tensors: Mapping[str, Tensor], shape: tuple[int, int], matrix: Tensor | None = None
    ) -> TrainableScales:
        weight = self.build(shape, torch.float32, tensors["codes"].device)
        weight.load_state_dict(dict(tensors), assign=True)
        return TrainableScales(tensors["codes"], tensors["scales"], weight.values(torch.float32))

    def build(self, shape: tuple[int, int], dtype: torch.dtype, device: torch.device) -> "TrellisWeight":
        return TrellisWeight(self, shape, dtype, device)


@dataclass(frozen=True)
class TrellisMatrix(Trellis):
    """Trellis codes of a matrix that is not a delta: an expert's own, or a base."""

    kind: ClassVar[str] = "trellis-weight"
    uses_base: ClassVar[bool] = False
    examples: ClassVar[tuple[str, ...]] = ("trellis-weight:2:16",)


def in_trellis(form: Quantized, rows: int) -> Quantized:
    """Return the trellis form with the bits and groups of a quantized form, or that form itself if the rows cannot fill
    whole bytes."""
    if form.bits not in trellis.WIDTHS or rows % rows_served(form.bits):
        return form
    return (Trellis if form.uses_base else TrellisMatrix)(form.bits, form.group)


class TrellisWeight(QuantizedWeight):
    """A trellis-coded matrix at run time, of `Trellis` and of `TrellisRows` alike."""

    coded: ClassVar[str] = "trellis"

    def values(self, dtype: torch.dtype) -> Tensor:
        """Numbers that the codes stand for, before scaling: [out, in]."""
        return trellis.decoded(self._codes(), self.scales.new_ones(self.shape[0], 1), self.bits, dtype)

    def _codes(self) -> Tensor:
        return unpack(self.codes, self.bits, self.shape[0] * self.shape[1]).view(self.shape)

    def dequantize(self, dtype: torch.dtype) -> Tensor:
        return trellis.decoded(self._codes(), self.scales, self.bits, dtype)

    def _needs_no_matrix(self, inputs: Tensor) -> bool:
        return False

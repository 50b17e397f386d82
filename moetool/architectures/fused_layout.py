"""Layouts of tensors that hold the matrices of all experts of a layer, in files and in memory."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from moetool.architectures.shape import Role

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True)
class FusedLayout:
    """Layout of a tensor that fuses experts' matrices `[out, in]`, and of what is computed with it.

    Attributes:
        is_transposed: every matrix lies as `[in, out]`.
        is_interleaved: outputs of gate and up take turns; otherwise those of up follow those of gate.
        is_stacked: gate, up and down have a tensor each, in which the matrices of all experts lie below each other
            `[experts · intermediate, hidden]`, those of down turned round (DBRX). Only files have that.
    """

    is_transposed: bool = False
    is_interleaved: bool = False
    is_stacked: bool = False

    def shape(self, rows: int, columns: int) -> tuple[int, int]:
        """Shape of one expert's part of the tensor, which holds `rows` outputs of `columns` inputs."""
        return (columns, rows) if self.is_transposed else (rows, columns)

    def rows(self, fused: "Tensor") -> "Tensor":
        """View of fused matrices `[…, out, in]`, with outputs in the order in which they lie."""
        return fused.transpose(-1, -2) if self.is_transposed else fused

    def matrices(self, fused: "Tensor", count: int) -> tuple["Tensor", ...]:
        """Views `[…, out, in]` of the `count` matrices that each expert has in the tensor."""
        return self.parts(self.rows(fused), count, -2)

    def parts(self, values: "Tensor", count: int, dimension: int = -1) -> tuple["Tensor", ...]:
        """Views of the outputs of each of `count` matrices, from all of them along a dimension."""
        if not self.is_interleaved or count == 1:
            return values.chunk(count, dimension)
        return values.unflatten(dimension, (-1, count)).unbind(dimension)

    def joined(self, parts: "Sequence[Tensor]", dimension: int = -1) -> "Tensor":
        """Put outputs of several matrices into one dimension in this layout; `parts` takes them apart again."""
        import torch

        if not self.is_interleaved or len(parts) == 1:
            return torch.cat(tuple(parts), dimension)
        return torch.stack(tuple(parts), dimension).flatten(dimension - 1, dimension)

    def fused(self, matrices: "Sequence[Tensor]") -> "Tensor":
        """The contiguous fused tensor of several matrices `[…, out, in]`, from which `matrices` takes them apart."""
        return self.rows(self.joined(matrices, -2)).contiguous()

    def canonical(self, outputs: "Tensor", count: int) -> "Tensor":
        """Reorder outputs `[…, out]` of a fused tensor so that those of each of its `count` matrices come one after the
        other."""
        if not self.is_interleaved or count == 1:
            return outputs
        return outputs.unflatten(-1, (-1, count)).transpose(-1, -2).flatten(-2)

    def as_lying(self, outputs: "Tensor", count: int) -> "Tensor":
        """Put outputs of `count` matrices, one matrix after the other, into the order of this layout."""
        if not self.is_interleaved or count == 1:
            return outputs
        return outputs.unflatten(-1, (count, -1)).transpose(-1, -2).flatten(-2)


def neurons(shape: tuple[int, int], role: Role) -> tuple[int, int]:
    """The number of rows that a matrix of this shape `[out, in]` has in such a tensor, and their length."""
    return (shape[1], shape[0]) if role == "down" else shape


def stacked(matrices: "Sequence[Tensor]", role: Role) -> "Tensor":
    """A tensor as `FusedLayout.is_stacked` says, of the matrices `[out, in]` of a role, one for each expert."""
    import torch

    return torch.cat([matrix.T if role == "down" else matrix for matrix in matrices])


# One matrix below the other, as torch has them: most families, and all bases of compressed experts.
PLAIN = FusedLayout()


def layout_of(experts: object) -> FusedLayout:
    """The layout of the fused tensors in a module of experts: by transformers' decorator on its class, or else by their
    shapes."""
    if hasattr(experts, "is_transposed"):
        return FusedLayout(bool(experts.is_transposed), not getattr(experts, "is_concatenated", True))
    both, down = getattr(experts, "gate_up_proj", None), getattr(experts, "down_proj", None)
    if both is None or down is None or both.ndim != 3:
        return PLAIN
    return FusedLayout(is_transposed=both.shape[2] == 2 * down.shape[1])

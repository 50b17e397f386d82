"""Peak memory of going through a model layer by layer, and how many experts of a layer that leaves room for."""

from collections.abc import Sequence
from dataclasses import dataclass, replace

from moetool.architectures import MoEShape
from moetool.architectures.base import Settings, whole_number
from moetool.calibration.held_experts import working_sets
from moetool.calibration.input_grams import GRAM_DTYPE, keeps_each_down
from moetool.calibration.slopes import MOST_SLOPES
from moetool.checkpoint.experts import ExpertReader
from moetool.numerics.row_feedback import LINKED_ROWS

USABLE = 0.8  # share of the machine's memory that a job takes unless it is told otherwise
_FP64 = 8


@dataclass(frozen=True)
class Measuring:
    """Bytes of one measurement of a layer, and of what is made of it.

    Attributes:
        common: once for the layer.
        each: for every expert that is in memory.
        work: when everything has been measured.
    """

    common: int = 0
    each: int = 0
    work: int = 0

    def nbytes(self, at_once: int) -> int:
        """Bytes of memory that the measurement takes with so many experts of the layer in it."""
        return self.common + at_once * self.each + self.work

    @classmethod
    def fisher(cls, shape: MoEShape, *, regression: bool = False) -> "Measuring":
        """The measurement of Fisher-weighted sums of the experts' matrices; with `regression`, of the Gram matrices of
        RegMean, too."""
        common = 4 * (2 * shape.expert_parameters + 2 * shape.hidden * shape.intermediate)
        if regression:
            squares = 2 * (shape.hidden**2 + shape.intermediate**2)  # to be solved, and the sums
            common += _FP64 * (shape.expert_parameters + 2 * shape.hidden * shape.intermediate + squares)
        return cls(common)

    @classmethod
    def factors(cls, shape: MoEShape, *, jointly: bool = False, linked: bool = False) -> "Measuring":
        """The measurement of Gram matrices for low-rank deltas, with the factorization of these one after the other or
        `jointly`, in norms of outputs that count together if they are `linked`."""
        small, large = sorted((shape.hidden, shape.intermediate))
        grams = _FP64 * (shape.hidden**2 + small**2)  # for one expert, or the mean
        sample = _FP64 * small * shape.intermediate
        together = 3 * 4 * small * large if jointly else 0  # all deltas of a role: as they are, scaled, and in one
        each, work = (_slopes(shape), _linked_rows(shape)) if linked else (0, 0)
        work += _FP64 * small * 6 * large
        return cls(grams + sample + 4 * shape.expert_parameters, grams + together + each, work)

    def refined(self, shape: MoEShape, share: float, tokens: int) -> "Measuring":
        """The measurement followed by a refinement that moves a base and deltas with a `share` of the experts' numbers
        by gradients on so many tokens."""
        numbers = shape.experts * shape.expert_parameters
        moved = 4 * round(5 * share * numbers)  # as they were, as they are, and what Adam keeps
        text = tokens * (10 * shape.hidden + 4 * shape.experts)
        return replace(self, work=max(self.work, moved + 4 * numbers + text))

    @classmethod
    def codes(cls, shape: MoEShape, *, refined_on: int = 0, in_turn: bool = False) -> "Measuring":
        """The measurement of Gram matrices, of two halves of the text, for quantized deltas, with error feedback, among
        rows too where they are coded `in_turn`; an expert is `refined_on` so many tokens."""
        each_down = shape.intermediate**2 if keeps_each_down(shape) else 0
        means = GRAM_DTYPE.itemsize * (shape.hidden**2 + shape.intermediate**2)
        work = 4 * 5 * max(shape.hidden, shape.intermediate) ** 2
        if refined_on:  # sixteen numbers for each of the matrices', and as often what the tokens are given and give
            tokens = 4 * refined_on * (4 * shape.hidden + 1)
            work = max(work, 60 * shape.expert_parameters + tokens + 3 * _FP64 * shape.hidden**2)
        grams = 2 * GRAM_DTYPE.itemsize * (shape.hidden**2 + each_down)
        if in_turn:
            grams += _slopes(shape)
            work += _linked_rows(shape)
        return cls(means, grams, work + 4 * shape.expert_parameters)

    @classmethod
    def beside(cls, layers: Sequence[Sequence[tuple[int, int]]]) -> "Measuring":
        """The measurement of Gram matrices, of two halves of the text, for codes of matrices `[out, in]` beside the
        experts, with error feedback, one after the other in each layer."""
        widths = [{columns for _, columns in matrices} for matrices in layers]
        grams = max((sum(2 * GRAM_DTYPE.itemsize * width**2 for width in own) for own in widths), default=0)
        return cls(grams, work=4 * 5 * max((max(own, default=0) ** 2 for own in widths), default=0))


def _slopes(shape: MoEShape) -> int:
    """Count the bytes of one expert's activation slopes on a sample of its tokens."""
    return 4 * MOST_SLOPES * len(shape.entering) * shape.intermediate


def _linked_rows(shape: MoEShape) -> int:
    """Count the bytes that it takes to have errors in the rows of one expert's matrices count together."""
    rows = min(LINKED_ROWS, max(shape.hidden, shape.intermediate))
    return 4 * (3 * LINKED_ROWS * rows + shape.expert_parameters)


@dataclass(frozen=True)
class LayerMemory:
    """Peak bytes, by parts, of a job that takes an MoE model through a text layer by layer.

    Attributes:
        rest: whatever a layer holds: the process, embeddings and head, a layer without its experts.
        dense: by how much a layer without experts is larger than such a one.
        passing: of a batch on its way through a layer or the head.
        expert: one expert's matrices.
        experts: of a layer.
        measuring: what is in memory one after the other.
    """

    rest: int
    dense: int
    passing: int
    expert: int
    experts: int
    measuring: tuple[Measuring, ...] = (Measuring(),)

    def nbytes(self, at_once: int | None = None) -> int:
        """Bytes with so many experts in memory together, by default all, which then are there while batches pass."""
        if at_once is None or at_once >= self.experts:
            most = max(one.nbytes(self.experts) for one in self.measuring)
            return self.rest + self.passing + max(self.dense, self.experts * self.expert + most)
        most = max(one.nbytes(at_once) for one in self.measuring)
        common = max(one.common for one in self.measuring)
        return self.rest + max(self.passing + max(self.dense, common), at_once * self.expert + most)

    def at_once(self, room: int) -> int:
        """Number of experts in memory at once in `room` bytes: all if they fit, else the largest of equal sets.

        It is one if not even that fits.
        """
        if self.nbytes() <= room:
            return self.experts
        fits = [count for count in range(1, self.experts) if self.nbytes(count) <= room]
        return max(map(len, working_sets(self.experts, max(fits, default=1))))


def layer_numbers(experts: ExpertReader) -> tuple[int, int, int]:
    """Count the numbers outside of all layers, in the largest layer without its experts, and in the largest MoE layer
    without its experts."""
    architecture, tensors = experts.architecture, experts.checkpoint.tensors
    start = architecture.layer.partition("{")[0]
    sizes = {name: info.nbytes // info.dtype.itemsize for name, info in tensors.items() if name not in experts.names}
    layers = [
        sum(size for name, size in sizes.items() if name.startswith(prefix)) for prefix in architecture.layer_prefixes
    ]
    outside = sum(size for name, size in sizes.items() if not name.startswith(start))
    return outside, max(layers), max(layers[layer] for layer in experts.moe_layers)


def attention_bytes(config: Settings, windows: int, length: int) -> int:
    """Bytes of latent attention in some windows: queries, keys, values and their gradients, and, where values are
    narrower or wider than keys, the scores between all tokens, which torch then forms on a processor. A factor of three
    was measured for these."""
    heads, values = (whole_number(config, key) for key in ("num_attention_heads", "v_head_dim"))
    keys = [whole_number(config, key) for key in ("qk_nope_head_dim", "qk_rope_head_dim")]
    if heads is None or values is None or None in keys:
        return 0
    width = sum(size for size in keys if size is not None)
    scores = 0 if width == values else 3 * length
    return 4 * windows * length * heads * (scores + 2 * (2 * width + values))

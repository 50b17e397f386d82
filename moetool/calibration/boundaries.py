"""Hidden states between layers: which of them are on the disk, in which dtype, and how many windows run at a time.

On the way back every layer needs its input again. Of those only every √L-th is kept; those between are computed
again, a stretch of layers at a time (Chen et al., "Training Deep Nets with Sublinear Memory Cost", arXiv:1604.06174).
"""

import math

import torch

TOKENS_PER_BATCH = 1024


def kept_dtype(stored: torch.dtype, computed: torch.dtype) -> torch.dtype:
    """The dtype in which hidden states and their gradients wait on the disk: bf16 for a model whose weights have 16
    bits, else the dtype of the computation."""
    return torch.bfloat16 if stored.itemsize == 2 else computed


def stretch(layers: int) -> int:
    """Layers between two boundaries that are kept for the way back."""
    return max(1, round(math.sqrt(layers)))


def boundaries_at_once(layers: int) -> int:
    """Most files of hidden states and gradients that are there at any time on the way forward and back."""
    between = stretch(layers)
    kept = -(-layers // between)
    top = kept + (layers - 1) % between + 2  # the last stretch, the end, and gradients there
    below = kept + between if kept > 1 else 0  # a stretch that was made again, and gradients above and below a layer
    return max(top, below)


def batch_size(windows: int, length: int) -> int:
    """Windows of `length` tokens per batch: enough to keep the cores busy, few enough to be small beside a layer."""
    return max(1, min(windows, TOKENS_PER_BATCH // length))

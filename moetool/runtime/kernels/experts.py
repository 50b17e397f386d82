"""Experts on a shared base by kernels: what a forward without gradients takes.

Few tokens (`_few`): every token finds its own experts' matrices by number; nothing waits for what was chosen, and nothing
is written but activations. Many (`_many`): they are sorted by expert, and its matrices are unpacked, base and delta in
one, a part at a time; low-rank deltas stay products beside the base, which meets every token once.
"""

import weakref
from collections.abc import Sequence
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from moetool.architectures import Role
from moetool.format.layout import LayerLayout
from moetool.representations.base import Weight
from moetool.representations.operand import Operand, Products, numbers
from moetool.runtime.kernels.compiler import KernelProblem, library
from moetool.runtime.kernels.products import Unpacker, routed
from moetool.runtime.kernels.table import Table, UnsupportedMatrixError

_FEW = 8  # tokens per expert and call up to which decoding as they are multiplied is faster than unpacking once
_PART = 1 << 22  # numbers of a matrix that are unpacked at a time

"""Rows as every coder of `numerics.output_codes` starts from them."""

import torch
from torch import Tensor

from moetool.numerics import trellis
from moetool.numerics.error_feedback import Coded
from moetool.numerics.level_codes import LevelCodes
from moetool.numerics.output_codes import Coder
from moetool.numerics.quantization import quantize

GROUP = 16


def started(coder: Coder, bits: int, rows: Tensor) -> Coded:
    """Rows [out, in] under scales for groups of inputs that suit the nearest codes of a coder."""
    if isinstance(coder, LevelCodes):
        return Coded(rows, quantize(rows, bits, GROUP, torch.float32)[1], bits)
    return Coded(rows, trellis.fitting_scales(rows, bits, GROUP, torch.float32), bits)

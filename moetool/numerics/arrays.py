"""Type aliases for NumPy arrays of 64-bit floating-point numbers and of 64-bit integers."""

from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

Floats: TypeAlias = NDArray[np.float64]
Integers: TypeAlias = NDArray[np.int64]

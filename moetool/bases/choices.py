"""How bases are made and pruned, by the names that this goes by on the command line."""

from typing import Literal

Merge = Literal["fisher", "fisher-frequency", "mean", "frequency", "ties", "regmean"]
Pruning = Literal["static", "semi-dynamic"]
BaseCompression = Literal["static", "semi-dynamic", "svd"]

UNMEASURED_MERGES: tuple[Merge, ...] = ("mean", "ties")  # these need no calibration text

"""Names of the ways to make and to prune a base, as the command line takes them."""

from typing import Literal

Merge = Literal["fisher", "fisher-frequency", "mean", "frequency", "ties", "regmean"]
Pruning = Literal["static", "semi-dynamic"]
BaseCompression = Literal["static", "semi-dynamic", "svd"]

UNMEASURED_MERGES: tuple[Merge, ...] = ("mean", "ties")  # these need no calibration text

"""The alternatives a user can choose between, by the names they go by on the command line."""

from typing import Literal

Merge = Literal["fisher", "fisher-frequency", "mean", "frequency", "ties", "regmean"]
Svd = Literal["truncation-aware", "vanilla", "activation-aware"]
Allocation = Literal["water-filling", "adaptive", "uniform"]
Scheme = Literal["matrix", "role", "layer"]
Sensitivity = Literal["channel", "matrix", "none"]
SharedFactor = Literal["none", "v", "u"]
Pruning = Literal["static", "semi-dynamic"]
BaseCompression = Literal["static", "semi-dynamic", "svd"]

UNMEASURED_MERGES: tuple[Merge, ...] = ("mean", "ties")  # these need no calibration text

"""The alternatives a user can choose between, by the names they go by on the command line."""

from typing import Literal

Svd = Literal["truncation-aware", "vanilla", "activation-aware"]
Allocation = Literal["water-filling", "adaptive", "uniform"]
Granularity = Literal["matrix", "role", "layer"]
Sensitivity = Literal["channel", "matrix", "none"]
SharedFactor = Literal["none", "v", "u"]

"""The alternatives a user can choose between, by the names they go by on the command line."""

from typing import Literal

Merge = Literal["fisher", "mean", "frequency"]
Svd = Literal["truncation-aware", "vanilla", "activation-aware"]
Allocation = Literal["water-filling", "uniform"]
Sensitivity = Literal["channel", "matrix", "none"]
Pruning = Literal["semi-dynamic", "static"]

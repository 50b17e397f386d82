"""A training of a repair that learns nothing, and changes everything."""

import torch

from moetool.repair.training import Distilling, RepairOutcome


def scrambled(self: Distilling, *_: object) -> RepairOutcome:
    """A training that multiplies everything by numbers between 1 and 1.1."""
    stream, values = torch.Generator().manual_seed(0), {}
    for name, master in self._masters.items():
        values[name] = master.values * (1 + 0.1 * torch.rand(master.values.shape, generator=stream))
        master.set(values[name])
    return RepairOutcome(values, 1, {"text": 1.0}, {"text": 0.5}, None, 0.01)

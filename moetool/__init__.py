"""moetool: dense checkpoints into mixtures of experts, and mixtures of experts made smaller."""

__version__ = "0.1.0"

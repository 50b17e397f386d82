"""What other engines make of an upcycled model."""

from collections.abc import Mapping
from typing import Any

from moetool.conversion.dense import DenseModel
from moetool.conversion.targets import Target
from moetool.representations.mixture import Mixture


def lint(target: Target, dense: DenseModel, mixture: Mixture, config: Mapping[str, Any]) -> list[str]:
    """Warnings, a sentence each, about what vLLM or llama.cpp cannot express."""
    return []

"""Memory that a job takes beside what it computes."""

import subprocess
import sys

import pytest
import torch

from moetool.costs.calibration_cost import baseline

_LOADED = """
from transformers import MixtralForCausalLM
import moetool.runtime.loading
from moetool.job.memory import anonymous_bytes
print(anonymous_bytes())
"""


@pytest.mark.skipif(torch.cuda.is_available(), reason="what libraries of a card take was not measured")
def test_the_baseline_is_what_libraries_take_and_at_most_half_more() -> None:
    told = subprocess.run([sys.executable, "-c", _LOADED], capture_output=True, text=True, check=True)
    taken = int(told.stdout.split()[-1])
    assert taken < baseline() < 1.5 * taken

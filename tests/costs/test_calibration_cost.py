"""Memory that a job takes beside what it computes."""

import subprocess
import sys
from pathlib import Path

import pytest
import torch

from moetool.costs.calibration_cost import baseline

_LOADED = """
import sys
from transformers import MixtralForCausalLM
import moetool.runtime.loading
from moetool.calibration.windows import load_tokenizer, sample_windows
from moetool.job.memory import PeakMemory
with PeakMemory(0.01) as memory:
    print(memory.bytes)
    sample_windows(sys.argv[1], load_tokenizer(sys.argv[2]), samples=1, sequence_length=8, seed=0)
print(memory.bytes)
"""


@pytest.mark.skipif(torch.cuda.is_available(), reason="what libraries of a card take was not measured")
def test_the_baseline_is_what_libraries_and_drawing_text_take_and_at_most_half_more(
    tiny_text: Path, tiny_mixtral: Path, tmp_path: Path
) -> None:
    long = tmp_path / "long.txt"
    long.write_text(40 * tiny_text.read_text(encoding="utf-8"), encoding="utf-8")  # of 1.6 million characters
    script = [sys.executable, "-c", _LOADED, str(long), str(tiny_mixtral)]
    loaded, drawn = map(int, subprocess.run(script, capture_output=True, text=True, check=True).stdout.split())
    assert drawn < baseline() < 1.5 * loaded

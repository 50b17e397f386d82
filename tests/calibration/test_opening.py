"""What windows begin with: what the tokenizer begins every text with."""

import copy
import json
import math
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from tokenizers import processors
from torch.nn import functional as F
from transformers import AutoModelForCausalLM

from moetool.calibration.opening import opening_of
from moetool.calibration.windows import evaluation_windows, sample_windows
from moetool.errors import UsageError


@pytest.mark.parametrize(
    ("single", "begins"),
    [("$A", 0), ("<b> $A", 1), ("<b> $A <e>", 1), ("<e> <b> $A", 2), ("$A <e>", 0)],
)
def test_the_tokenizer_is_followed(tiny_tokenizer: Any, single: str, begins: int) -> None:
    """None as GPT-2, one as Llama and Gemma, several as GLM-4; what comes after a text is no beginning."""
    tokenizer = copy.deepcopy(tiny_tokenizer)
    named = [("<b>", 5), ("<e>", 7)]
    tokenizer.backend_tokenizer.post_processor = processors.TemplateProcessing(single=single, special_tokens=named)
    assert opening_of(tokenizer) == tokenizer("a")["input_ids"][:begins]
    assert opening_of(tokenizer, "never") == []
    with pytest.raises(UsageError, match="no BOS token"):
        opening_of(tokenizer, "always")
    tokenizer.bos_token = "a"
    assert opening_of(tokenizer, "always") == [tokenizer.bos_token_id]


def test_windows_begin_with_it(bos_tokenizer: Any, tiny_text: Path) -> None:
    """It takes a token of the window, not of the text: as many predictions, over consecutive text."""
    first, data = bos_tokenizer.bos_token_id, str(tiny_text)
    stream = torch.tensor(bos_tokenizer(tiny_text.read_text(), add_special_tokens=False, verbose=False)["input_ids"])
    windows = evaluation_windows(data, bos_tokenizer, sequence_length=64, limit=5)
    assert torch.equal(windows, torch.cat([torch.full((5, 1), first), stream[: 5 * 63].view(5, 63)], dim=1))
    without = evaluation_windows(data, bos_tokenizer, sequence_length=64, limit=5, bos="never")
    assert torch.equal(without, stream[: 5 * 64].view(5, 64))
    drawn = sample_windows(data, bos_tokenizer, samples=4, sequence_length=64, seed=0)
    assert drawn.shape == (4, 64)
    assert (drawn[:, 0] == first).all()
    assert all((stream.unfold(0, 63, 1) == window[1:]).all(1).any() for window in drawn)
    with pytest.raises(UsageError, match="give at least 2"):
        evaluation_windows(data, bos_tokenizer, sequence_length=1)


def test_evaluation_and_calibration_say_so(
    run_cli: Any, tiny_mixtral: Path, bos_tokenizer: Any, tiny_text: Path, tmp_path: Path
) -> None:
    model = shutil.copytree(tiny_mixtral, tmp_path / "model")
    bos_tokenizer.save_pretrained(model)
    begin, windows = bos_tokenizer.bos_token, ("--sequence-length", 48, "--windows", 3)

    def evaluated(*options: object) -> Any:
        return run_cli("eval", model, "--data", tiny_text, *windows, *options, "--json").json

    plain = run_cli("eval", tiny_mixtral, "--data", tiny_text, *windows, "--json").json
    told = evaluated()
    assert (told["begin"], plain["begin"]) == (begin, None)
    assert (told["tokens"], told["windows"]) == (plain["tokens"], plain["windows"])
    rows = evaluation_windows(str(tiny_text), bos_tokenizer, sequence_length=48, limit=3)
    with torch.inference_mode():
        logits = AutoModelForCausalLM.from_pretrained(model)(input_ids=rows).logits
    nll = F.cross_entropy(logits[:, :-1].flatten(0, 1), rows[:, 1:].flatten()).item()
    assert told["perplexity"] == pytest.approx(math.exp(nll), rel=1e-5)
    assert evaluated("--bos", "never")["perplexity"] == plain["perplexity"] != told["perplexity"]
    assert f"each after {begin})" in run_cli("eval", model, "--data", tiny_text, *windows).stdout
    text = ("--calibration", tiny_text, "--mix", 0, "--samples", 4, "--sequence-length", 32)
    base = run_cli("fisher-merge", model, tmp_path / "base", *text, "--json")
    assert base.json["calibration"]["begin"] == begin
    assert f"Every window begins with {begin}." in base.stderr
    assert json.loads((tmp_path / "base" / "moetool.json").read_text())["statistics"]["calibration"]["begin"] == begin

"""Models whose config says what few do: everything goes on as with any other."""

import re
from pathlib import Path
from typing import Any

import families
import pytest
import torch
from checkpoints import assert_close, change_tensors, copy_of, load, relative_error, tensors_of
from derived_families import DERIVED
from torch import Tensor

FEW = ("--samples", 4, "--sequence-length", 16, "--mix", 0)


def logits(path: Path, tokens: Tensor, dtype: torch.dtype = torch.float32) -> Tensor:
    with torch.inference_mode():
        return load(path, dtype)(input_ids=tokens).logits.float()


@pytest.mark.filterwarnings("ignore:Initializing zero-element tensors")
@pytest.mark.parametrize("is_saved", [True, False], ids=["saved", "not saved"])
@pytest.mark.parametrize(
    ("family", "key"), [("deepseek_v3", "n_shared_experts"), ("granitemoehybrid", "shared_intermediate_size")]
)
def test_a_shared_expert_of_no_width(
    run_cli: Any,
    save_model: Any,
    tiny_text: Path,
    tokens: Tensor,
    tmp_path: Path,
    family: str,
    key: str,
    is_saved: bool,
) -> None:
    """transformers saves tensors without numbers, and does not need them; other tools' files have none."""
    own = {} if family in families.FAMILIES else DERIVED[family]
    source = save_model(families.build(family, **{**own, key: 0}), tmp_path / "model")
    if not is_saved:
        change_tensors(source, lambda held: [held.pop(name) for name in list(held) if 0 in held[name].shape])
    out, text = tmp_path / "out", ("--calibration", tiny_text, *FEW)
    made = run_cli("compress", source, out, "--method", "d2moe", "--rank", 10_000, *text)
    assert made.code == 0, made.stderr
    assert_close(logits(out, tokens), logits(source, tokens))
    for dtype, most in ((torch.float16, 0.02), (torch.bfloat16, 0.15)):  # by kernels
        assert relative_error(logits(out, tokens, dtype), logits(source, tokens, dtype)) < most
    assert run_cli("verify", out, "--against", source).code == 0
    assert run_cli("eval", out, "--against", source, "--data", tiny_text, "--windows", 1).code == 0
    few = ("--sequence-length", 16, "--batch-size", 1, "--steps", 1)
    tuned = run_cli("tune", source, tmp_path / "tuned", "--data", tiny_text, *few)
    assert tuned.code == 0, tuned.stderr


@pytest.mark.parametrize("kept", ["w1|w3", r"layers\.[12]\."], ids=["gate and up", "the last layers"])
def test_experts_of_two_dtypes_are_written_in_that_of_most(
    run_cli: Any, tiny_mixtral: Path, tiny_text: Path, tokens: Tensor, tmp_path: Path, kept: str
) -> None:
    """Not in that of the first: what is kept whole is not rounded."""

    def narrow(held: dict[str, Tensor]) -> None:
        for name in held:
            if ".experts." in name and not re.search(kept, name):
                held[name] = held[name].bfloat16()

    source = change_tensors(copy_of(tiny_mixtral, tmp_path / "model"), narrow)
    out, text = tmp_path / "out", ("--calibration", tiny_text, *FEW)
    made = run_cli("compress", source, out, "--method", "d2moe", "--rank", 10_000, *text)
    assert made.code == 0, made.stderr
    assert_close(logits(out, tokens), logits(source, tokens))
    assert run_cli("decompose", source, tmp_path / "deltas", "--base", "mean").code == 0
    assert_close(logits(tmp_path / "deltas", tokens), logits(source, tokens))
    assert {held.dtype for held in tensors_of(tmp_path / "deltas").values()} == {torch.float32}

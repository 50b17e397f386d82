"""Names and the order of rows in GGUF, and how llama.cpp names a tokenizer's way to cut a text."""

import json

import pytest
import torch
from tokenizers import Regex, Tokenizer, models, pre_tokenizers

from moetool.errors import InvalidInputError
from moetool.format.gguf.families import gguf_family
from moetool.format.gguf.tokenizer import CUTTINGS, cutting_name, cutting_of
from moetool.format.gguf.words import halved, interleaved


def rules(*steps: pre_tokenizers.PreTokenizer, ignores_merges: bool = False) -> dict[str, object]:
    """What `tokenizer.json` says of a byte-level tokenizer that cuts by these steps."""
    tokenizer = Tokenizer(models.BPE(ignore_merges=ignores_merges))
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(list(steps))
    return json.loads(tokenizer.to_str())


def test_rows_of_a_head_are_interleaved_and_back() -> None:
    rows = torch.arange(12).view(12, 1)
    assert interleaved(rows, 2).flatten().tolist() == [0, 3, 1, 4, 2, 5, 6, 9, 7, 10, 8, 11]
    assert torch.equal(halved(interleaved(rows, 2), 2), rows)
    assert torch.equal(halved(interleaved(rows.flatten(), 3), 3), rows.flatten())


@pytest.mark.parametrize("name", CUTTINGS)
def test_ways_to_cut_are_known_by_their_rules(name: str) -> None:
    cutting = CUTTINGS[name]
    steps = [pre_tokenizers.Digits(individual_digits=True)] if cutting.digits else []
    steps += [pre_tokenizers.Split(Regex(pattern), behavior="isolated") for pattern in cutting.patterns]
    steps.append(pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=not cutting.patterns))
    found = cutting_name(cutting_of(rules(*steps, ignores_merges=cutting.ignores_merges)))
    assert found is not None
    assert CUTTINGS[found] == cutting


@pytest.mark.parametrize(
    "steps",
    [
        [pre_tokenizers.Whitespace()],
        [pre_tokenizers.ByteLevel(add_prefix_space=True)],
        [pre_tokenizers.Split(Regex("x+"), behavior="isolated"), pre_tokenizers.ByteLevel(False, use_regex=False)],
        [pre_tokenizers.Punctuation(), pre_tokenizers.ByteLevel(add_prefix_space=False)],
    ],
)
def test_other_ways_have_no_name(steps: list[pre_tokenizers.PreTokenizer]) -> None:
    assert cutting_name(cutting_of(rules(*steps))) is None


def test_families() -> None:
    assert gguf_family({"model_type": "qwen2_moe"}).architecture == "qwen2moe"
    assert gguf_family({"model_type": "qwen2_moe", "norm_topk_prob": True}).architecture == "llama"
    granite = {"model_type": "granitemoehybrid", "layer_types": ["attention"] * 2}
    assert gguf_family(granite).architecture == "granite"
    assert gguf_family({**granite, "layer_types": ["mamba", "attention"]}).architecture == "granitehybrid"
    nemotron = {"model_type": "nemotron_h", "n_routed_experts": 8, "layers_block_type": ["mamba", "mlp", "attention"]}
    assert not gguf_family(nemotron).is_moe
    assert gguf_family({**nemotron, "layers_block_type": ["mamba", "moe", "attention"]}).is_moe
    with pytest.raises(InvalidInputError, match="There is for llama, mistral"):
        gguf_family({"model_type": "flex_olmo"})
    with pytest.raises(InvalidInputError, match="SparseMixer"):
        gguf_family({"model_type": "phimoe"})

"""Compressed experts made dense."""

from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import AutoModelForCausalLM

import moetool
from moetool.architectures import MoEShape
from moetool.format.layout import LayerLayout
from moetool.representations.low_rank import LowRank

ODD = MoEShape(experts=4, top_k=2, hidden=32, intermediate=44)  # rows of 88 bytes, which grouped products do not take


@torch.no_grad()
def test_dense_experts_run_in_any_width(
    make_mixtral: Any, save_model: Any, make_compressed: Any, tiny_tokens: Tensor, tmp_path: Path
) -> None:
    source = save_model(make_mixtral(dtype=torch.bfloat16, intermediate_size=44), tmp_path / "model")
    layouts = {layer: LayerLayout.uniform(ODD, LowRank(3)) for layer in range(3)}
    path = make_compressed(source, tmp_path / "compressed", layouts)
    model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.bfloat16)
    tokens = tiny_tokens[:16].view(1, 16)
    expected = model(input_ids=tokens).logits.float()
    found = moetool.synthesize(model)(input_ids=tokens).logits.float()
    assert (found - expected).norm() < 0.1 * expected.norm()

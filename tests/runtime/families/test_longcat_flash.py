"""LongCat-Flash, of whose experts transformers wants matrices that no file has."""

import re
from pathlib import Path
from typing import Any

import families
import torch
from safetensors.torch import load_file
from torch import nn
from transformers import AutoModelForCausalLM
from transformers.models.longcat_flash.modeling_longcat_flash import LongcatFlashExperts


def test_files_have_matrices_of_experts_that_compute_alone(save_model: Any, tmp_path: Path) -> None:
    model = families.build("longcat_flash")
    path = save_model(model, tmp_path / "model")
    names = "\n".join(load_file(path / "model.safetensors"))
    assert {int(number) for number in re.findall(r"experts\.(\d+)\.up_proj", names)} == set(range(6))
    tokens = torch.arange(3, 35)[None]
    assert AutoModelForCausalLM.from_pretrained(path)(tokens).logits.equal(model(tokens).logits)


def test_they_give_what_transformers_own_class_gives() -> None:
    model = families.build("longcat_flash")
    block = model.model.layers[0].mlp
    own = LongcatFlashExperts(model.config)
    assert type(own) is LongcatFlashExperts
    unused = torch.full((own.total_experts - 6, *own.gate_up_proj.shape[1:]), torch.nan)
    own.gate_up_proj = nn.Parameter(torch.cat([block.experts.gate_up_proj.detach(), unused]))
    own.down_proj = block.experts.down_proj
    hidden = torch.randn(1, 40, 32, generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        expected = block(hidden)
        block.experts = own
        assert block(hidden).equal(expected)
        chosen = block.router(hidden[0])[2]
    assert (chosen >= 6).any()
    assert (chosen < 6).any()

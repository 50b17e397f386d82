"""DBRX, whose experts are given the form that all other families have."""

import copy
from pathlib import Path
from typing import Any

import families
import torch
from derived_families import DERIVED
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM
from transformers.models.dbrx.modeling_dbrx import DbrxFFN, DbrxForCausalLM

BLOCK = "transformer.blocks.0.ffn.experts.mlp."


def test_files_are_those_of_transformers_own_class(save_model: Any, tmp_path: Path) -> None:
    model = families.build("dbrx", **DERIVED["dbrx"])
    tensors = load_file(save_model(model, tmp_path / "model") / "model.safetensors")
    config = copy.deepcopy(model.config)
    config.rope_parameters["rope_theta"] = config.attn_config.rope_theta
    own = DbrxForCausalLM(config)  # not built by transformers' loader
    assert type(own.transformer.blocks[0].ffn) is DbrxFFN
    own.load_state_dict(tensors)
    assert tensors[f"{BLOCK}w2"].shape == (6 * 24, 32)
    tokens = torch.arange(3, 35)[None]
    with torch.no_grad():
        expected = own.eval()(tokens).logits
        loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "model")
        for built in (model, loaded):
            torch.testing.assert_close(built(tokens).logits, expected, rtol=0, atol=1e-5)
    assert model.config.rope_parameters["rope_theta"] != config.attn_config.rope_theta

"""JetMoE, whose layers of experts are given the form that all other families have."""

from pathlib import Path
from typing import Any

import families
import pytest
import torch
from derived_families import DERIVED
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM
from transformers.models.jetmoe import modeling_jetmoe
from transformers.models.jetmoe.modeling_jetmoe import JetMoeForCausalLM

from moetool.runtime.families.jetmoe import JetMoeFusedMoE

BLOCK = "model.layers.0.mlp."


def test_files_are_those_of_transformers_own_class(
    save_model: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = families.build("jetmoe", **DERIVED["jetmoe"])
    tensors = load_file(save_model(model, tmp_path / "model") / "model.safetensors")
    with monkeypatch.context() as patch:
        patch.setattr(modeling_jetmoe, "JetMoeMoE", JetMoeFusedMoE.__base__)
        own = JetMoeForCausalLM(model.config)
    assert type(own.model.layers[0].mlp).__module__ == modeling_jetmoe.__name__
    missing, unexpected = own.load_state_dict(tensors, strict=False)
    assert (missing, unexpected) == (["lm_head.weight"] if model.config.tie_word_embeddings else [], [])
    assert tensors[f"{BLOCK}input_linear.weight"].shape == (6, 96, 32)
    tokens = torch.arange(3, 35)[None]
    with torch.no_grad():
        expected = own.eval()(tokens, output_router_logits=True)
        for built in (model, AutoModelForCausalLM.from_pretrained(tmp_path / "model")):
            found = built(tokens, output_router_logits=True)
            torch.testing.assert_close(found.logits, expected.logits, rtol=0, atol=1e-5)
            torch.testing.assert_close(found.aux_loss, expected.aux_loss, rtol=0, atol=1e-5)

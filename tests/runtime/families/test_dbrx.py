"""DBRX, whose experts are given the form that all other families have."""

import copy
import json
from pathlib import Path
from typing import Any

import families
import pytest
import torch
from derived_families import DERIVED
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM
from transformers.models.dbrx import modeling_dbrx
from transformers.models.dbrx.modeling_dbrx import DbrxForCausalLM

from moetool.runtime.families.dbrx import DbrxFusedFFN, DbrxOwnRotaryEmbedding

BLOCK = "transformer.blocks.0.ffn.experts.mlp."


def test_files_are_those_of_transformers_own_class(
    save_model: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = families.build("dbrx", **DERIVED["dbrx"])
    tensors = load_file(save_model(model, tmp_path / "model") / "model.safetensors")
    config = copy.deepcopy(model.config)
    config.rope_parameters["rope_theta"] = config.attn_config.rope_theta
    with monkeypatch.context() as patch:
        for kind in (DbrxFusedFFN.__base__, DbrxOwnRotaryEmbedding.__base__):
            patch.setattr(modeling_dbrx, kind.__name__, kind)
        own = DbrxForCausalLM(config)
    assert type(own.transformer.blocks[0].ffn).__module__ == modeling_dbrx.__name__
    own.load_state_dict(tensors)
    assert tensors[f"{BLOCK}w2"].shape == (6 * 24, 32)
    tokens = torch.arange(3, 35)[None]
    with torch.no_grad():
        expected = own.eval()(tokens).logits
        loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "model")
        for built in (model, loaded):
            torch.testing.assert_close(built(tokens).logits, expected, rtol=0, atol=1e-5)
    assert model.config.rope_parameters["rope_theta"] != config.attn_config.rope_theta


def test_layers_are_told_by_their_names(run_cli: Any, save_model: Any, tiny_text: Path, tmp_path: Path) -> None:
    source = save_model(families.build("dbrx", **DERIVED["dbrx"]), tmp_path / "model")
    options = ("--data", tiny_text, "--steps", 1, "--sequence-length", 32, "--batch-size", 2)
    tuned = run_cli("tune", source, tmp_path / "tuned", *options, "--shard-size", "60KB")
    assert tuned.code == 0, tuned.stderr
    assert len(list((tmp_path / "tuned").glob("*.safetensors"))) == 4  # of each layer, and of embeddings and head
    for layers, told in ((4, "transformer.blocks.3 is missing"), (2, "a tensor transformer.blocks.2.")):
        config = json.loads((source / "config.json").read_text())
        (source / "config.json").write_text(json.dumps({**config, "n_layers": layers}))
        refused = run_cli("inspect", source)
        assert refused.code == 3
        assert told in refused.stderr

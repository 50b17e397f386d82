"""A model of which one layer is in memory."""

from pathlib import Path
from typing import Any

import torch

from moetool.checkpoint.reader import Checkpoint
from moetool.runtime.one_layer import load_layer


def test_a_layer_is_loaded_whose_name_others_begin_with(make_mixtral: Any, save_model: Any, tmp_path: Path) -> None:
    """`layers.1` of a model with `layers.10`."""
    model = make_mixtral(num_hidden_layers=12)
    checkpoint = Checkpoint.open(save_model(model, tmp_path))
    loaded = load_layer(checkpoint, "model.layers.1.", torch.float32, ())
    own = dict(model.named_parameters())
    for name, parameter in loaded.named_parameters():
        assert parameter.is_meta == (not name.startswith("model.layers.1.")), name
        assert parameter.is_meta or torch.equal(parameter, own[name])

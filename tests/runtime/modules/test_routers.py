"""Routers are found in every family, and what they say is read in the right order."""

import families
import pytest
import torch

from moetool.architectures import find_architecture
from moetool.runtime.modules.routers import Routers


@pytest.mark.parametrize("family", families.FAMILIES)
def test_every_router_is_found(family: str) -> None:
    model = families.build(family)
    config = model.config.to_dict()
    known = find_architecture(config)
    shape, layers = known.shape, known.moe_layers
    routers = Routers(model)
    assert len(routers) == len(layers)
    given: list[torch.Tensor] = []
    for layer in layers:
        experts = model.get_submodule(f"{known.layer.format(layer=layer)}.{known.experts_module}")
        experts.register_forward_pre_hook(lambda _, args: given.append(args[1]))
    with routers.watched(), torch.no_grad():
        model(torch.arange(10).view(1, 10), use_cache=False)
    assert [tuple(logits.shape) for logits in routers.logits] == [(10, known.routed_to[0])] * len(layers)
    for chosen, taken in zip(routers.chosen, given, strict=True):
        assert chosen is not None
        assert chosen.equal(taken.view(10, shape.top_k))

"""The name of the cache, in the transformers that is installed."""

import torch
from families import build
from transformers import Cache

from moetool.runtime.cache_name import CACHE, cache_in, cache_of


def test_models_give_and_take_it_by_this_name() -> None:
    model = build("mixtral")
    tokens = torch.arange(4)[None]
    cache = cache_of(model(tokens, use_cache=True))
    assert isinstance(cache, Cache)
    assert cache.get_seq_length() == 4
    assert cache_of(model(tokens[:, :1], **{CACHE: cache})) is cache
    assert cache.get_seq_length() == 5
    assert cache_of(model(tokens, use_cache=False)) is None


def test_arguments_have_it_by_either_name() -> None:
    assert cache_in({CACHE: 1}) == cache_in({"past_key_values": 1}) == 1
    assert cache_in({"use_cache": True}) is None

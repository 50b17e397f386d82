"""With each key of config.json left out in turn: every number moetool computes with is that of transformers' model."""

import json
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import dense_families
import families
import pytest
import torch
from sampling import DENSE_STRUCTURES, MOE_STRUCTURES, sampled
from transformers import AutoConfig

from moetool.architectures import Architecture, find_architecture
from moetool.architectures.dense import DenseArchitecture, find_dense_architecture
from moetool.checkpoint.reader import read_config
from moetool.checkpoint.settings import settings_of
from moetool.errors import InvalidInputError
from moetool.export.gguf.metadata import describe_model
from moetool.export.gguf.model import GgufSource
from moetool.format.gguf.families import gguf_family
from moetool.job.options import context_length
from moetool.runtime.loading import model_class

# Families whose layers are all alike.
ALIKE = {
    "granite", "granitemoe", "granitemoeshared", "llama", "mistral", "mixtral", "olmoe", "qwen2", "qwen2_moe", "qwen3",
    "qwen3_moe",
}  # fmt: skip
DENSE = {**dense_families.DENSE_FAMILIES, **dense_families.MOEFY_FAMILIES}


def whole(model_type: str, entries: dict[str, Any]) -> dict[str, Any]:
    """A config.json with every key that transformers would write."""
    described = AutoConfig.for_model(model_type, **entries)
    return {key: value for key, value in json.loads(described.to_json_string(use_diff=False)).items() if key != "dtype"}


def lacking(config: dict[str, Any]) -> Iterator[tuple[str, dict[str, Any]]]:
    """The config without one key, for every key but the one that names the family."""
    for key in config:
        if key not in ("model_type", "architectures", "transformers_version"):
            yield key, {name: value for name, value in config.items() if name != key}


def built(config: dict[str, Any]) -> Any:
    """transformers' own model, on the meta device; `None` where it cannot build one."""
    try:
        described = AutoConfig.for_model(**config)
        with torch.device("meta"):
            return model_class(config).from_config(described)
    except Exception:
        return None


def layers_of(model: Any, family: Architecture | DenseArchitecture) -> Any:
    return model.get_submodule(family.layer.format(layer=0).rpartition(".")[0])


def attention_of(layer: Any) -> Any:
    """The module that has queries, keys and values; `None` where a layer has none of the usual kind."""
    return next((one for one in layer.modules() if hasattr(one, "k_proj") and hasattr(one, "q_proj")), None)


def check_moe(config: dict[str, Any], model: Any, layers: Any, experts: str) -> None:
    """Numbers of experts, those of the modules at this path in a layer."""
    found = {index: dict(layer.named_modules()).get(experts) for index, layer in enumerate(layers)}
    sparse = {index: module for index, module in found.items() if hasattr(module, "down_proj")}
    if not sparse:
        with pytest.raises(InvalidInputError, match=r"is not an MoE model|none of its layers has experts"):
            find_architecture(config)
        return
    family = find_architecture(config)
    assert (family.layers, family.moe_layers) == (len(layers), tuple(sparse))
    shape = family.shape
    for index, module in sparse.items():
        assert (shape.experts, shape.hidden, shape.intermediate) == tuple(module.down_proj.shape)
        block = list(layers[index].modules())
        assert {one.top_k for one in block if hasattr(one, "top_k")} <= {shape.top_k}
        groups = {(one.n_group, one.topk_group) for one in block if getattr(one, "n_group", None)}
        groups |= {(one.num_group, one.topk_group) for one in block if getattr(one, "num_group", None)}
        assert {(one, chosen or 1) for one, chosen in groups} <= {family.groups}


def check_common(config: dict[str, Any], model: Any, layers: Any) -> None:
    settings = settings_of(config, Path())
    embedding = model.get_input_embeddings()
    assert settings["vocab_size"] == embedding.num_embeddings
    key = "num_hidden_layers" if "num_hidden_layers" in settings else "num_layers"
    assert settings[key] == len(layers)
    assert context_length(settings) == getattr(model.config, "max_position_embeddings", None)
    heads = settings["num_attention_heads"]
    shared = settings.get("num_key_value_heads") or heads
    for module in filter(None, map(attention_of, layers)):
        if getattr(module, "num_key_value_groups", None) is not None:
            assert heads == shared * module.num_key_value_groups
        if isinstance(getattr(module, "head_dim", None), int):
            assert module.q_proj.out_features in (heads * module.head_dim, 2 * heads * module.head_dim)
            assert module.k_proj.out_features == shared * module.head_dim


def check_metadata(config: dict[str, Any], model: Any, layers: Any) -> None:
    """What a GGUF says of the model."""
    settings, said = settings_of(config, Path()), {}

    def note(key: str, value: Any) -> None:
        said[key] = value

    writer = SimpleNamespace(add_uint32=note, add_float32=note, add_string=note)
    checkpoint: Any = SimpleNamespace(config=config, path=Path(), settings=settings)
    family = gguf_family(settings)
    moe = find_architecture(config) if family.is_moe else None
    experts: Any = (
        None if moe is None else SimpleNamespace(shape=moe.shape, architecture=moe, moe_layers=moe.moe_layers)
    )
    dense: Any = None if family.is_moe else SimpleNamespace(intermediate=settings.get("intermediate_size"))
    describe_model(writer, GgufSource(checkpoint, family, dense, experts))  # type: ignore[arg-type]
    start, attention = family.architecture, attention_of(layers[0])
    width, rotary = attention.head_dim, model.model.rotary_emb
    if settings["rope_parameters"]["rope_type"] == "default":
        frequencies = type(rotary)(model.config).inv_freq  # those of a model on the meta device are not computed
        base = said[f"{start}.rope.freq_base"]
        torch.testing.assert_close(frequencies, base ** (-torch.arange(0, width, 2) / width))
    assert said[f"{start}.attention.layer_norm_rms_epsilon"] == layers[0].input_layernorm.variance_epsilon
    assert said[f"{start}.attention.key_length"] == said[f"{start}.rope.dimension_count"] == width
    assert said[f"{start}.attention.head_count"] * width == attention.q_proj.out_features
    assert said[f"{start}.attention.head_count_kv"] * width == attention.k_proj.out_features
    assert said[f"{start}.block_count"] == len(layers)
    assert said[f"{start}.vocab_size"] == model.get_input_embeddings().num_embeddings
    assert said[f"{start}.embedding_length"] == model.get_input_embeddings().embedding_dim
    scale = said.get(f"{start}.attention.scale")
    assert scale is None or scale == attention.scaling


def runs(model: Any) -> bool:
    """Whether transformers' model computes at all, on the meta device."""
    try:
        with torch.device("meta"):
            model(input_ids=torch.zeros(1, 8, dtype=torch.long), use_cache=False)
    except Exception:
        return False
    return True


def refused(tmp_path: Path, config: dict[str, Any]) -> bool:
    (tmp_path / "config.json").write_text(json.dumps(config))
    try:
        read_config(tmp_path)
    except InvalidInputError:
        return True
    return False


def other_models(full: dict[str, Any], tmp_path: Path) -> Iterator[tuple[str, dict[str, Any], Any]]:
    """Configs that lack an entry, by its key, of which transformers builds another model than of the whole config, with
    that model. Those that are refused have to be of none that runs."""
    complete = settings_of(full, Path())
    for key, config in lacking(full):
        if refused(tmp_path, config):
            assert (model := built(config)) is None or not runs(model), key
        elif settings_of(config, Path()) != complete and (model := built(config)) is not None:
            yield key, config, model


@pytest.mark.parametrize("name", sampled(families.FAMILIES, MOE_STRUCTURES))
def test_numbers_of_experts_are_those_of_the_model(name: str, tmp_path: Path) -> None:
    full = whole(name, {**families.COMMON, **families.FAMILIES[name]})
    family = find_architecture(full)
    for key, config, model in other_models(full, tmp_path):
        try:
            check_moe(config, model, layers_of(model, family), family.experts_module)
            check_common(config, model, layers_of(model, family))
            if name in ALIKE:
                check_metadata(config, model, layers_of(model, family))
        except AssertionError as error:
            error.add_note(f"{name} without {key}")
            raise


@pytest.mark.parametrize("name", sampled(DENSE, DENSE_STRUCTURES))
def test_numbers_of_dense_models_are_those_of_the_model(name: str, tmp_path: Path) -> None:
    model_type, entries = DENSE[name]
    full = whole(model_type, {**dense_families.COMMON, **entries})
    family = find_dense_architecture(full)
    for key, config, model in other_models(full, tmp_path):
        try:
            check_common(config, model, layers_of(model, family))
            if model_type in ALIKE:
                check_metadata(config, model, layers_of(model, family))
        except AssertionError as error:
            error.add_note(f"{name} without {key}")
            raise

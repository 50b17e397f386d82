"""What is quantized beside experts, by the entry of a config."""

from typing import Any

import families
import pytest

from moetool.architectures import find_architecture
from moetool.errors import InvalidInputError
from moetool.format import entry as entries
from moetool.format.beside import quantizable, quantized_beside
from moetool.format.entry import check_format_version, format_entry
from moetool.representations.quantized import QuantizedMatrix

CONFIG: dict[str, Any] = {
    "model_type": "mixtral",
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_local_experts": 4,
    "num_experts_per_tok": 2,
}


def config(beside: Any) -> dict[str, Any]:
    return {**CONFIG, "quantization_config": format_entry({}, more={"beside": beside})}


def test_an_entry_is_read() -> None:
    listed = {"model.layers.1.self_attn.q_proj": "quantised-weight:8:32", "lm_head": "quantised-weight:6:row"}
    assert quantized_beside(config(listed)) == {
        "model.layers.1.self_attn.q_proj": QuantizedMatrix(8, 32),
        "lm_head": QuantizedMatrix(6, 0),
    }
    assert quantized_beside(CONFIG) == quantized_beside(config({})) == {}


@pytest.mark.parametrize(
    ("beside", "told"),
    [
        (["lm_head"], "must be an object by module"),
        ({"model.layers.2.self_attn.q_proj": "quantised-weight:8:32"}, "has no such attention or embedding"),
        ({"model.layers.0.block_sparse_moe.gate": "quantised-weight:8:32"}, "has no such attention or embedding"),
        ({"model.norm": "quantised-weight:8:32"}, "has no such attention or embedding"),
        ({"lm_head": "quantised-weight:4:32"}, "lm_head is stored as 'quantised-weight:4:32'"),
        ({"lm_head": "quantised:8:32"}, "this moetool reads .*'quantised-weight:8:GROUP' there"),
        ({"lm_head": "quantised-weight:8:0"}, "Bad representation"),
        ({"lm_head": 7}, "Unknown representation '7'"),
    ],
)
def test_an_entry_that_cannot_be_is_refused(beside: Any, told: str) -> None:
    with pytest.raises(InvalidInputError, match=told):
        quantized_beside(config(beside))


def test_older_readers_refuse_it_and_nothing_else(monkeypatch: pytest.MonkeyPatch) -> None:
    new, plain = format_entry({}, more={"beside": {"lm_head": "quantised-weight:8:row"}}), format_entry({})
    check_format_version(new)
    monkeypatch.setattr(entries, "FORMAT_VERSION", 1)
    check_format_version(plain)
    with pytest.raises(InvalidInputError, match=r"format version 2; this moetool reads up to 1\. Upgrade"):
        check_format_version(new)


def test_families_name_projections_and_embeddings_and_nothing_else() -> None:
    for model_type, sizes in families.FAMILIES.items():
        family = find_architecture({"model_type": model_type, **families.COMMON, **sizes})
        names = quantizable(family)
        assert all(
            name.endswith(("_proj", "_proj_with_mqa", "self_attn.output_gate", "in_proj_qkvz", "in_proj_ba"))
            for name in names["attention"]
        ), family.name
        assert names["embeddings"] == ("model.embed_tokens", "lm_head")
    sizes = {**families.COMMON, **families.FAMILIES["deepseek_v3"]}
    latent = quantizable(find_architecture({"model_type": "deepseek_v3", **sizes}))
    assert "model.layers.0.self_attn.kv_a_proj_with_mqa" in latent["attention"]

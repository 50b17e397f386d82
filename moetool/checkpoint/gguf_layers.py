"""Which layers of the model in a GGUF file have attention, a state or experts, by the tensors that they have."""

from collections.abc import Sequence

from moetool.checkpoint.gguf_metadata import GgufMetadata
from moetool.format.gguf.words import layer_in_file

_ATTENTION, _ROUTER = "attn_q.weight", "ffn_gate_inp.weight"
# Of layers that do one thing only, what tells which.
_KINDS = {
    _ATTENTION: "full_attention",
    "ssm_in.weight": "linear_attention",
    _ROUTER: "moe",
    "ffn_up.weight": "mlp",
}


def kinds_of_layers(metadata: GgufMetadata, layers: int) -> list[str]:
    """What each layer is in a model whose layers do one thing only."""
    found = []
    for layer in range(layers):
        kinds = [kind for name, kind in _KINDS.items() if layer_in_file(layer, name) in metadata.shapes]
        if len(kinds) != 1:
            raise metadata.unread(f"a layer ({layer}) that is {' and '.join(kinds) or 'nothing'}")
        found += kinds
    return found


def turns_of_layers(metadata: GgufMetadata, layers: int) -> dict[str, int]:
    """Every which layer, from which on, has attention in a Jamba, and which has experts."""
    found = dict[str, int]()
    for kind, name in (("attn", _ATTENTION), ("expert", _ROUTER)):
        period, offset = _turns([layer_in_file(layer, name) in metadata.shapes for layer in range(layers)])
        if period == 0:
            raise metadata.unread(f"layers that do not take turns ({name})")
        found |= {f"{kind}_layer_period": period, f"{kind}_layer_offset": offset}
    return found


def _turns(has: Sequence[bool]) -> tuple[int, int]:
    """Every which one is, from which on; the first 0 if they do not take turns."""
    places, count = [place for place, one in enumerate(has) if one], len(has)
    first, second = [*places, count, 2 * count][:2]
    period = max(second - first, first + 1)
    return (period if [place % period == first for place in range(count)] == [*has] else 0), first

"""What the GGUF file of a Gemma 4 says that others do not: heads of two widths, bounds of logits."""

from moetool.checkpoint.gguf_metadata import GgufMetadata, decimal
from moetool.format.gguf.words import COUNTS, HEAD_WIDTHS, WIDTH, layer_in_file

_BOUND = 30.0  # of logits, which llama.cpp takes if a file says nothing
_TOKENS_OF_LAYERS = "per_layer_token_embd.weight"


def entries_of_gemma4(metadata: GgufMetadata) -> dict[str, object]:
    """Return entries of `config.json` that say how wide heads and networks are, and the bound of logits."""
    whole, own = (int(metadata.number(f"{HEAD_WIDTHS[0]}{end}")) for end in ("", "_swa"))
    for key, width in ((HEAD_WIDTHS[1], whole), (f"{HEAD_WIDTHS[1]}_swa", own), (f"{HEAD_WIDTHS[2]}_swa", own)):
        if (said := metadata.entry(key)) not in (None, width):
            raise metadata.unread(f"{key} = {said} beside heads of {width} channels")
    bound, widths = metadata.entry("final_logit_softcapping"), metadata.entry(WIDTH)
    found: dict[str, object] = {
        "head_dim": own,
        "global_head_dim": whole,
        "final_logit_softcapping": (_BOUND if bound is None else decimal(bound)) or None,
        "use_double_wide_mlp": isinstance(widths, list) and len({*widths}) > 1,
    }
    if _TOKENS_OF_LAYERS in metadata.shapes:
        found["vocab_size_per_layer_input"] = metadata.shapes[_TOKENS_OF_LAYERS][0]
    return found


def heads_of_gemma4(metadata: GgufMetadata, windows: list[bool], heads: list[int]) -> dict[str, object]:
    """Return entries of `config.json` that say how many heads of keys both kinds of layers have, and whether layers
    that attend to all of a text take keys for values.

    Args:
        metadata: of the file.
        windows: whether each layer attends to a window of the text only.
        heads: of keys, by layer.
    """
    key = COUNTS["num_key_value_heads"]
    by_kind = [
        {count for count, windowed in zip(heads, windows, strict=True) if windowed == kind} for kind in (True, False)
    ]
    if [len(counts) for counts in by_kind] != [1, 1]:
        raise metadata.unread(f"layers of one kind that differ in {key}")
    [[own], [whole]] = by_kind
    values = {layer_in_file(layer, "attn_v.weight") for layer, windowed in enumerate(windows) if not windowed}
    takes_keys = not values & metadata.shapes.keys()
    if own != whole and not takes_keys:
        raise metadata.unread(f"layers with values of their own that differ in {key}")
    found: dict[str, object] = {"num_key_value_heads": own, "attention_k_eq_v": takes_keys}
    return {**found, "num_global_key_value_heads": whole} if takes_keys else found

"""Notes for who exports a model: where llama.cpp differs from transformers on it, and what is left out."""

from collections.abc import Collection

from moetool.checkpoint.stored.mxfp4 import TurnedExperts
from moetool.export.gguf.model import GgufSource
from moetool.export.gguf.rope import LONG_ROPE
from moetool.format.gguf.blocks import MXFP4, NumberType


def remarks(source: GgufSource, types: Collection[NumberType]) -> list[str]:
    """Sentences on a model that is exported in these types."""
    config, rope, found = source.config, source.rope, list[str]()
    window = getattr(config, "sliding_window", None)
    is_seen_whole = source.family.window_period is None and not source.family.sees_windows
    if window and getattr(config, "use_sliding_window", True) and is_seen_whole:
        found.append(f"llama.cpp does not keep to this model's window of {window} tokens: longer texts differ.")
    if rope.get("rope_type") == "yarn" and not rope.get("truncate", True):
        found.append("llama.cpp rounds where YaRN begins and ends, which this model does not: logits differ slightly.")
    if rope.get("rope_type") == LONG_ROPE:
        length = rope["original_max_position_embeddings"]
        found.append(
            f"In a context of more than {length} tokens llama.cpp takes every text for a long one, transformers only "
            "those that are longer: shorter ones differ there."
        )
    if (own := source.family.remark(config)) is not None:
        found.append(own)
    if source.is_within:
        found.append("The file has the language model alone: for pictures llama.cpp wants a second one (mmproj).")
    stored = any(isinstance(form, TurnedExperts) for form in source.checkpoint.forms.values())
    if stored and MXFP4 not in types:
        found.append("The experts are published in MXFP4: --experts-type mxfp4 keeps them as they are.")
    return found

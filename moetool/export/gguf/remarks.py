"""Notes for who exports a model: where llama.cpp differs from transformers on it, and what is left out."""

import inspect
from collections.abc import Collection

from moetool.architectures.described import class_of
from moetool.checkpoint.stored.mxfp4 import TurnedExperts
from moetool.export.gguf.model import GgufSource
from moetool.export.gguf.rope import LONG_ROPE
from moetool.format.gguf.blocks import MXFP4, NumberType
from moetool.format.gguf.seeing import SEEN_BY_CONVERTER

# Entries by which the class of a language model changes its logits, and classes of models around it may not.
_OF_LOGITS = ("logit_scale", "logits_scaling", "final_logit_softcapping")


def remarks(source: GgufSource, types: Collection[NumberType]) -> list[str]:
    """Sentences on a model that is exported in these types."""
    config, rope, found = source.config, source.rope, list[str]()
    window = getattr(config, "sliding_window", None)
    is_seen_whole = source.family.window_period is None and not source.family.sees_windows
    if window and getattr(config, "use_sliding_window", True) and is_seen_whole:
        found.append(f"llama.cpp does not keep to this model's window of {window} tokens: longer texts differ.")
    if rope.get("rope_type") == "yarn" and not rope.get("truncate", True):
        found.append("llama.cpp rounds where YaRN begins and ends, which this model does not: logits differ slightly.")
    if rope.get("rope_type") == "dynamic" and not source.family.stretches_rope:
        found.append(
            f"llama.cpp does not stretch rotary embeddings for texts of more than {config.max_position_embeddings} "
            "tokens, as transformers does (rope_type dynamic): longer texts differ."
        )
    if rope.get("rope_type") == LONG_ROPE:
        length = rope["original_max_position_embeddings"]
        found.append(
            f"In a context of more than {length} tokens llama.cpp takes every text for a long one, transformers only "
            "those that are longer: shorter ones differ there."
        )
    if (own := source.family.remark(config)) is not None:
        found.append(own)
    if source.is_within:
        found += _of_one_within(source)
    stored = any(isinstance(form, TurnedExperts) for form in source.checkpoint.forms.values())
    if stored and MXFP4 not in types:
        found.append("The experts are published in MXFP4: --experts-type mxfp4 keeps them as they are.")
    return found


def _of_one_within(source: GgufSource) -> list[str]:
    """Sentences on a language model that lies in a model that sees or hears."""
    whole, told = source.whole_config, "The file has the language model alone, and nothing that sees or hears: for "
    told += "pictures llama.cpp wants a second one (mmproj)"
    if whole.model_type in SEEN_BY_CONVERTER:
        told += ", which its convert_hf_to_gguf.py --mmproj makes of the model"
    forward = inspect.getsource(found.forward) if (found := class_of(whole)) is not None else ""
    keys = [key for key in _OF_LOGITS if getattr(source.config, key, None) not in (None, 1) and key not in forward]
    differing = [
        f"transformers' class of {whole.model_type} does not change logits as this language model does alone, and as "
        f"llama.cpp does ({key}): it gives other probabilities."
        for key in keys
    ]
    return [f"{told}.", *differing]

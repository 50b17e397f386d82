"""Whether the predictions of two models can be compared, or one learnt from the other's."""

from moetool.architectures.base import whole_number
from moetool.architectures.dense import is_encoder
from moetool.calibration.opening import Tokenizer
from moetool.calibration.windows import load_tokenizer
from moetool.checkpoint.reader import Checkpoint
from moetool.errors import InvalidInputError, UsageError


def check_comparable(original: Checkpoint, model: Checkpoint, tokenizer: Tokenizer) -> None:
    """Raise unless both predict tokens of the same vocabulary, from what is before them or from all others."""
    check_same_tokens(original, model, tokenizer)
    sizes = [whole_number(one.settings, "vocab_size") for one in (original, model)]
    if None not in sizes and sizes[0] != sizes[1]:
        raise InvalidInputError(
            f"{original.source} predicts {sizes[0]} tokens and {model.source} {sizes[1]}: models of different "
            "vocabularies cannot be compared token by token."
        )


def difference_in_shape(original: Checkpoint, model: Checkpoint) -> str | None:
    """Sentence that says how two models differ in layers or hidden size; `None` if they do not, as far as their
    `config.json` tells."""
    shapes = [
        [whole_number(one.settings, name) for name in ("num_hidden_layers", "hidden_size")] for one in (original, model)
    ]
    if shapes[0] == shapes[1] or any(None in shape for shape in shapes):
        return None
    (ours, width), (theirs, their_width) = shapes
    return (
        f"{model.source} has {theirs} layers of hidden size {their_width}, {original.source} {ours} of {width}. These "
        "are two separate models: their numbers do not say what a compression loses."
    )


def check_same_tokens(original: Checkpoint, model: Checkpoint, tokenizer: Tokenizer) -> None:
    """Raise unless a text is the same tokens to both, predicted in the same way; `tokenizer` is the second's.

    Raises:
        UsageError: one is an encoder, and the other is not.
        InvalidInputError: the vocabularies of their tokenizers differ.
    """
    if is_encoder(original.config) != is_encoder(model.config):
        encoder = original if is_encoder(original.config) else model
        raise UsageError(f"{encoder.path} is an encoder, and the other is not: they do not predict the same.")
    theirs, ours = load_tokenizer(original.path).get_vocab(), tokenizer.get_vocab()
    if theirs != ours:
        different = len(theirs.items() ^ ours.items())
        raise InvalidInputError(
            f"The tokenizers of {original.source} and {model.source} differ in {different} entries: the same text is "
            "other tokens to each, so neither predictions nor perplexities can be compared. Evaluate each by itself."
        )

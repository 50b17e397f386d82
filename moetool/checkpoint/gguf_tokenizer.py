"""The tokenizer of a GGUF file, as a checkpoint has it: read by transformers, with the rules of llama.cpp's names."""

import json
import logging
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from moetool.errors import InvalidInputError, in_one_line
from moetool.format.gguf.tokenizer import CUTTINGS

if TYPE_CHECKING:
    from tokenizers import Tokenizer

_LOGGER = logging.getLogger(__name__)

OF_TOKENIZER = "tokenizer.ggml."  # metadata that begin so are the tokenizer's
_UNUSED = 5  # the kind of a token that is none


def write_tokenizer(file: Path, directory: Path, field: Callable[[str], Any]) -> None:
    """Write the tokenizer of a GGUF file into the directory of a checkpoint; `field` gives the file's metadata by key.

    Raises:
        InvalidInputError: transformers cannot read it.
    """
    from transformers import PreTrainedTokenizerFast

    try:
        tokenizer = PreTrainedTokenizerFast.from_pretrained(file.parent, gguf_file=file.name)
    except Exception as error:  # transformers knows some tokenizers only, and says so in many ways
        reason = in_one_line(error, 200)
        raise InvalidInputError(f"transformers cannot read the tokenizer of {file}: {reason}") from error
    if field(f"{OF_TOKENIZER}model") == "gpt2":
        _cut_as_said(file, str(field(f"{OF_TOKENIZER}pre")), tokenizer.backend_tokenizer)
    tokenizer.save_pretrained(directory)
    made = directory / "tokenizer.json"
    kinds = field(f"{OF_TOKENIZER}token_type") or []
    rules = _without_additions(json.loads(made.read_text(encoding="utf-8")), kinds)
    made.write_text(json.dumps(rules, ensure_ascii=False), encoding="utf-8")


def _without_additions(rules: dict[str, Any], kinds: Sequence[int]) -> dict[str, Any]:
    """The rules of a tokenizer without tokens that its model does not know: those that fill up the embeddings
    (`[PAD288]`), and GPT-2's `<|endoftext|>`, which transformers adds to files that have no such token."""
    vocabulary = rules["model"].get("vocab")
    if not isinstance(vocabulary, dict):
        return rules
    ids = {*vocabulary.values()}
    fillers = {f"[PAD{token}]": token for token, kind in enumerate(kinds) if kind == _UNUSED}
    added = [token for token in rules["added_tokens"] if token["id"] in ids]
    own = {text: token for text, token in vocabulary.items() if fillers.get(text) != token}
    return {**rules, "added_tokens": added, "model": {**rules["model"], "vocab": own}}


def _cut_as_said(file: Path, name: str, tokenizer: "Tokenizer") -> None:
    """transformers knows some names only of how a text is cut, and takes the others for GPT-2's."""
    from tokenizers import Regex, pre_tokenizers

    if (cutting := CUTTINGS.get(name)) is None:
        _LOGGER.warning(
            "The tokenizer in %s cuts a text in a way of which moetool does not know the rules (%s): tokens may "
            "differ from the model's own. Give its own checkpoint where that matters.",
            file,
            name,
        )
        return
    steps: list[Any] = [pre_tokenizers.Digits(individual_digits=True)] if cutting.digits else []
    steps += [pre_tokenizers.Split(Regex(pattern), behavior="isolated") for pattern in cutting.patterns]
    steps.append(pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=not cutting.patterns))
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(steps)
    tokenizer.model.ignore_merges = cutting.ignores_merges

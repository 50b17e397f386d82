"""The tokens, BOS or none, with which each window of a text begins."""

from typing import TYPE_CHECKING, Literal, TypeAlias

from moetool.errors import UsageError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

Tokenizer: TypeAlias = "PreTrainedTokenizerBase"  # transformers takes seconds to import, and not only for --help
Bos = Literal["auto", "always", "never"]
BOS_HELP = "Begin every window with the tokenizer's BOS token (auto: only if the tokenizer adds one)."


def opening_of(tokenizer: Tokenizer, bos: Bos = "auto") -> list[int]:
    """The tokens that a window begins with.

    Args:
        tokenizer: a transformers tokenizer.
        bos: `auto` for those that the tokenizer itself puts before every text (those of Llama, Mistral and Gemma put
            their BOS token there, without which Gemma does not work; GPT-2's, Qwen's and others nothing), `always` for
            its BOS token, `never` for none.

    Raises:
        UsageError: it is to be the BOS token, and there is none.
    """
    if bos == "never":
        return []
    if bos == "always":
        if tokenizer.bos_token_id is None:
            raise UsageError("--bos always: this tokenizer has no BOS token.")
        return [int(tokenizer.bos_token_id)]
    plain, marked = (list(tokenizer("a", add_special_tokens=special)["input_ids"]) for special in (False, True))
    places = (place for place in range(len(marked)) if marked[place : place + len(plain)] == plain)
    return marked[: next(places, 0)] if plain else []


def opening_text(tokenizer: Tokenizer, bos: Bos) -> str | None:
    """The tokens that each window begins with, spelled as the vocabulary spells them; `None` if there are none."""
    ids = opening_of(tokenizer, bos)
    return "".join(tokenizer.convert_ids_to_tokens(ids)) or None

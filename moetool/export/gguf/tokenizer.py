"""Translation of a checkpoint's tokenizer into GGUF's metadata."""

import json
import re
from collections.abc import Iterable, Mapping, Set
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from moetool.calibration.opening import Tokenizer
from moetool.calibration.windows import load_tokenizer
from moetool.errors import InvalidInputError, UsageError
from moetool.format.gguf.tokenizer import CUTTINGS, OTHER_CUTTINGS, changes_text, cutting_name, cutting_of

if TYPE_CHECKING:
    from gguf import GGUFWriter
    from tokenizers.normalizers import Normalizer

# llama.cpp's kinds of tokens.
_NORMAL, _UNKNOWN, _CONTROL, _USER_DEFINED, _UNUSED, _BYTE = range(1, 7)
_SPECIAL = {"bos": "bos", "eos": "eos", "unk": "unknown", "pad": "padding", "sep": "seperator", "mask": "mask"}
_SPACE = "▁"
_PROBE = "A  é① \t\n b "  # what normalizers change: case, spaces in a row and at the end, forms of characters
_CUTTINGS = (*CUTTINGS, *OTHER_CUTTINGS)
# llama.cpp takes a model of such a name for a Phi-3: its special tokens take the spaces after them, but for these
# three, and it does not load a file without these tokens (llama-vocab.cpp).
_PHI_3 = re.compile("phi-?3", re.IGNORECASE)
_STRIPS_NOTHING = {"<unk>", "<s>", "<|endoftext|>"}


@dataclass(frozen=True)
class GgufTokenizer:
    """A tokenizer as GGUF's metadata describe it.

    Attributes:
        model: `gpt2` for byte-level BPE, `llama` or `gemma4` for SentencePiece's.
        pre: llama.cpp's name of the way in which a text is cut before BPE.
        is_assumed: whether `pre` is that of published tokenizers of the model's family, as rules do not tell.
        tokens, kinds: text and kind of each token by id, as many as the model has embeddings.
        scores: of each token of a `llama` or `gemma4`: of neighbours, those with the highest are merged first.
        merges: pairs of tokens of a `gpt2` or `gemma4` that are merged, the first pair first.
        special: ids of special tokens, by their names in the metadata.
        begins, ends: whether it puts its first and last token around a text by itself.
        adds_space: whether it puts a space before a text.
        strips: whether its special tokens take the spaces after them, as those of Phi-3.
        normalizes: whether it is of pieces and changes a text before it cuts it, which llama.cpp does for none.
        template: the chat template, if it has one.
    """

    model: str
    pre: str
    is_assumed: bool
    tokens: list[str]
    kinds: list[int]
    scores: list[float]
    merges: list[str]
    special: Mapping[str, int]
    begins: bool
    ends: bool
    adds_space: bool
    strips: bool
    normalizes: bool
    template: str | None

    @property
    def remark(self) -> str | None:
        """Sentence for the user where llama.cpp may cut a text otherwise; `None` if it does not."""
        if self.is_assumed:
            pre = f"'{self.pre}', as in this family's published tokenizers"
            return f"The tokenizer's rules have no name in llama.cpp: the file has {pre} (--pre-tokenizer: another)."
        if self.normalizes:
            return (
                "The tokenizer changes some texts before it cuts them (spaces in a row, forms of characters), which "
                "llama.cpp does not: such texts have other tokens there."
            )
        return None

    def name_of(self, model: str) -> str:
        """Return the name that a model has in its file: llama.cpp tells from it alone what special tokens strip."""
        if self.strips:
            return model if _PHI_3.search(model) else f"{model}-phi-3"
        return _PHI_3.sub("phi 3", model)

    def add_to(self, writer: "GGUFWriter") -> None:
        """Write the tokenizer into the metadata of the gguf library's `GGUFWriter`."""
        writer.add_tokenizer_model(self.model)
        writer.add_tokenizer_pre(self.pre)
        writer.add_token_list(self.tokens)
        writer.add_token_types(self.kinds)
        if self.scores:
            writer.add_token_scores(self.scores)
        if self.merges:
            writer.add_token_merges(self.merges)
        for name, token in self.special.items():
            writer.add_uint32(f"tokenizer.ggml.{name}_token_id", token)
        writer.add_add_bos_token(self.begins)
        writer.add_add_eos_token(self.ends)
        writer.add_add_space_prefix(self.adds_space)
        if self.template is not None:
            writer.add_chat_template(self.template)


def has_tokenizer(path: Path) -> bool:
    """Whether the directory of a checkpoint holds the files of a tokenizer."""
    return any((path / name).exists() for name in ("tokenizer.json", "tokenizer.model", "vocab.json"))


def read_tokenizer(path: Path, vocabulary: int, *, cut: str | None, usual: str | None, pieces: str) -> GgufTokenizer:
    """Read the tokenizer of a checkpoint.

    Args:
        path: the directory of the checkpoint.
        vocabulary: number of the model's embeddings.
        cut: llama.cpp's name of the way in which the tokenizer cuts a text, if the user gives one.
        usual: llama.cpp's name for published tokenizers of the model's family, where rules do not tell.
        pieces: llama.cpp's name of the family's tokenizers of pieces.

    Raises:
        InvalidInputError: llama.cpp has no tokenizer of its kind, or it has more tokens than the model, special ones
            left out, which a class of tokenizers may add by itself.
        UsageError: `cut` is not known.
    """
    loaded = load_tokenizer(path)
    backend = getattr(loaded, "backend_tokenizer", None)
    if backend is None:
        raise InvalidInputError(f"The tokenizer of {path} has no tokenizer.json, which its tokens are read from.")
    rules = json.loads(backend.to_str())
    model = rules["model"]
    if model["type"] != "BPE":
        raise InvalidInputError(f"The tokenizer of {path} is a {model['type']} model; llama.cpp's are read from BPE.")
    is_pieces = bool(model.get("byte_fallback"))
    by_id = {token: text for text, token in loaded.get_vocab().items()}
    added = {token["id"]: token for token in rules["added_tokens"]}
    if beyond := [token for token in by_id if token >= vocabulary and token not in added]:
        raise InvalidInputError(
            f"The tokenizer of {path} has tokens up to {max(beyond)}, the model embeddings for {vocabulary}."
        )
    tokens = [by_id.get(token, f"[PAD{token}]") for token in range(vocabulary)]
    kinds = [
        _kind(token, by_id, added, is_pieces=is_pieces, unknown=model.get("unk_token")) for token in range(vocabulary)
    ]
    marked, plain = (loaded("a", add_special_tokens=special)["input_ids"] for special in (True, False))
    special = {
        name: int(token)
        for kind, name in _SPECIAL.items()
        if (token := getattr(loaded, f"{kind}_token_id", None)) is not None and token < vocabulary
    }
    known = None if is_pieces else cutting_name(cutting_of(rules))
    return GgufTokenizer(
        model=pieces if is_pieces else "gpt2",
        pre="default" if is_pieces else _pre(path, rules, cut, known or usual),
        is_assumed=not is_pieces and cut is None and known is None,
        tokens=[_as_text(text, kind) for text, kind in zip(tokens, kinds, strict=True)],
        kinds=kinds,
        scores=[_score(token, kind) for token, kind in enumerate(kinds)] if is_pieces else [],
        merges=[] if is_pieces and pieces == "llama" else [_merge(pair) for pair in model["merges"]],
        special=special,
        begins=len(marked) > len(plain) and marked[0] == special.get("bos"),
        ends=len(marked) > len(plain) and marked[-1] == special.get("eos"),
        adds_space=is_pieces and _puts_space(rules),
        strips=_strips(set(tokens), added.values()),
        normalizes=is_pieces and _normalizes(backend.normalizer),
        template=_template(loaded),
    )


def _pre(path: Path, rules: Mapping[str, object], cut: str | None, name: str | None) -> str:
    """Return llama.cpp's name of the way in which a byte-level tokenizer cuts a text: `cut`, if the user gives one, or
    `name`, if there is one."""
    if cut is not None:
        if cut not in _CUTTINGS:
            raise UsageError(f"--pre-tokenizer {cut}: there is {', '.join(_CUTTINGS)}.")
        return cut
    if (change := changes_text(rules)) is not None:
        raise InvalidInputError(
            f"The tokenizer of {path} {change} before it cuts a text, which llama.cpp does not. If that does "
            f"not matter, --pre-tokenizer says how to cut it: {', '.join(_CUTTINGS)}."
        )
    if name is None:
        raise InvalidInputError(
            f"The tokenizer of {path} cuts a text in a way that llama.cpp has no name for that moetool knows. "
            f"--pre-tokenizer chooses what comes nearest: {', '.join(_CUTTINGS)}."
        )
    return name


def _puts_space(rules: Mapping[str, object]) -> bool:
    """Whether the tokenizer puts a space before a text, in its normalizer or in its pre-tokenizer."""
    normalizer, pre_tokenizer = (json.dumps(rules.get(step)) for step in ("normalizer", "pre_tokenizer"))
    return '"Prepend"' in normalizer or ('"Metaspace"' in pre_tokenizer and '"never"' not in pre_tokenizer)


def _strips(texts: Set[str], added: Iterable[Mapping[str, Any]]) -> bool:
    """Whether special tokens take the spaces after them, most of those that do so where llama.cpp knows a Phi-3."""
    others = [token["rstrip"] for token in added if token["content"] not in _STRIPS_NOTHING]
    return texts >= {*_STRIPS_NOTHING, "</s>"} and 2 * sum(others) > len(others)


def _normalizes(normalizer: "Normalizer | None") -> bool:
    """Whether a tokenizer of pieces changes a text beside marking its spaces and putting one before it."""
    if normalizer is None:
        return False
    marked: str = normalizer.normalize_str(_PROBE)
    return marked.replace(_SPACE, " ").lstrip(" ") != _PROBE


def _kind(
    token: int,
    by_id: Mapping[int, str],
    added: Mapping[int, Mapping[str, Any]],
    *,
    is_pieces: bool,
    unknown: str | None,
) -> int:
    text = by_id.get(token)
    if text is None:
        return _UNUSED
    if is_pieces and text == unknown:
        return _UNKNOWN
    if token in added:
        looks_special = text.startswith("<|") and text.endswith("|>")
        return _CONTROL if added[token]["special"] or looks_special else _USER_DEFINED
    is_byte = is_pieces and len(text) == 6 and text.startswith("<0x") and text.endswith(">")
    return _BYTE if is_byte else _NORMAL


def _as_text(text: str, kind: int) -> str:
    return text.replace(_SPACE, " ") if kind == _USER_DEFINED else text


def _score(token: int, kind: int) -> float:
    """The score of a piece: pieces are numbered in the order in which training merged them, and are merged in it."""
    return -float(token) if kind == _NORMAL else 0.0 if kind in (_BYTE, _UNKNOWN) else -1000.0


def _merge(pair: str | list[str]) -> str:
    return pair if isinstance(pair, str) else " ".join(part.replace(" ", "Ġ") for part in pair)


def _template(tokenizer: Tokenizer) -> str | None:
    template = tokenizer.chat_template
    if isinstance(template, dict):
        template = template.get("default")
    return template if isinstance(template, str) else None

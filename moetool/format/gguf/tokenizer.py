"""llama.cpp's names for the pre-tokenizers of byte-level tokenizers, and the rules behind each name.

Source: https://github.com/ggml-org/llama.cpp/blob/master/src/llama-vocab.cpp (`llm_tokenizer_bpe`). Its converter knows
published tokenizers by a hash of what they make of a text; here they are known by their own rules, so that one that
was trained on another text is known, too.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

_TAIL = r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
_WORDS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|"
_CASED = (
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+%s|"
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*%s|"
)
_CASED_TAIL = r"| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
_CONTRACTION = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)?"


@dataclass(frozen=True)
class Cutting:
    """A pre-tokenizer of llama.cpp: the way in which a text is cut before BPE.

    Attributes:
        pattern: a regular expression that cuts it before bytes become characters; `None` for GPT-2's, which is built
            into what makes characters of bytes.
        digits: whether every digit is cut off first.
        ignores_merges: whether a piece that is a token is not merged from smaller ones.
    """

    pattern: str | None = None
    digits: bool = False
    ignores_merges: bool = False


# The first name of several alike is written.
CUTTINGS: Mapping[str, Cutting] = {
    "gpt-2": Cutting(),
    "olmo": Cutting(),
    "smollm": Cutting(digits=True),
    "starcoder": Cutting(digits=True),
    "refact": Cutting(digits=True),
    "command-r": Cutting(digits=True),
    "qwen2": Cutting(_WORDS + r"\p{N}" + _TAIL),
    "llama-bpe": Cutting(_WORDS + r"\p{N}{1,3}" + _TAIL, ignores_merges=True),
    "smaug-bpe": Cutting(_WORDS + r"\p{N}{1,3}" + _TAIL),
    "dbrx": Cutting(_WORDS + r"\p{N}{1,3}" + _TAIL),
    "tekken": Cutting(_CASED % ("", "") + r"\p{N}" + _CASED_TAIL, ignores_merges=True),
    "gpt-4o": Cutting(_CASED % (_CONTRACTION, _CONTRACTION) + r"\p{N}{1,3}" + _CASED_TAIL),
}

# Names whose rules are not among these: they are taken for models of families that have them, or when a user says so.
OTHER_CUTTINGS: tuple[str, ...] = (
    "afmoe", "bailingmoe", "bailingmoe2", "bloom", "chatglm-bpe", "cohere2moe", "deepseek-coder", "deepseek-llm",
    "deepseek-v3", "exaone", "exaone4", "exaone-moe", "falcon", "falcon3", "falcon-h1", "glm4", "hunyuan",
    "hunyuan-dense", "hy_v4", "joyai-llm", "kimi-k2", "laguna", "lfm2", "llama4", "mellum2", "minimax-m2", "pixtral",
    "qwen35", "seed-coder", "solar-open", "stablelm2", "youtu",
)  # fmt: skip


def cutting_of(tokenizer: Mapping[str, object]) -> Cutting | None:
    """Rules by which a byte-level tokenizer cuts a text, from its `tokenizer.json`; `None` if llama.cpp has no such
    rules."""
    model = tokenizer.get("model")
    ignores = bool(isinstance(model, Mapping) and model.get("ignore_merges"))
    pattern, digits, last = None, False, None
    for step in _steps(tokenizer.get("pre_tokenizer")):
        last = step
        if step.get("type") == "Digits" and step.get("individual_digits"):
            digits = True
        elif step.get("type") == "Split" and step.get("behavior") == "Isolated" and not step.get("invert"):
            regex = step.get("pattern")
            pattern = str(regex.get("Regex")) if isinstance(regex, Mapping) and pattern is None else ""
        elif step.get("type") != "ByteLevel" or step.get("add_prefix_space"):
            return None
    if last is None or last.get("type") != "ByteLevel" or bool(last.get("use_regex", True)) != (pattern is None):
        return None
    return Cutting(pattern, digits, ignores)


def cutting_name(cutting: Cutting | None) -> str | None:
    """llama.cpp's name of it; `None` if it has none. Whether a piece is merged that is a token itself matters only
    where there are names for both."""
    known = [(name, one) for name, one in CUTTINGS.items() if cutting is not None and _alike(one, cutting)]
    exact = [name for name, one in known if one == cutting]
    return next(iter([*exact, *(name for name, _ in known)]), None)


def changes_text(tokenizer: Mapping[str, object]) -> str | None:
    """What a byte-level tokenizer does to a text before it cuts it, from its `tokenizer.json`, that llama.cpp does for
    none; `None` if nothing. Composed characters (NFC), which most texts have, are let pass."""
    for step in _steps(tokenizer.get("normalizer")):
        if step.get("type") != "NFC":
            return f"normalizes it ({step.get('type')})"
    if any(step.get("add_prefix_space") for step in _steps(tokenizer.get("pre_tokenizer"))):
        return "begins it with a space (add_prefix_space)"
    return None


def _alike(one: Cutting, other: Cutting) -> bool:
    return (one.pattern, one.digits) == (other.pattern, other.digits)


def _steps(found: object) -> Iterator[Mapping[str, object]]:
    """The steps of a pre-tokenizer or of a normalizer."""
    if not isinstance(found, Mapping):
        return
    if found.get("type") == "Sequence":
        for step in found.get("pretokenizers", found.get("normalizers", [])):
            yield from _steps(step)
    else:
        yield found

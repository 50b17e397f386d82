"""llama.cpp's names for the pre-tokenizers of byte-level tokenizers, and the rules behind each name.

Source: https://github.com/ggml-org/llama.cpp/blob/master/src/llama-vocab.cpp (`llm_tokenizer_bpe`). Its converter knows
published tokenizers by a hash of what they make of a text; here they are known by their own rules, so that one that
was trained on another text is known, too.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

_TAIL = r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
_CASED_TAIL = r"| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
_CONTRACTION = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_WORDS = _CONTRACTION + r"|[^\r\n\p{L}\p{N}]?\p{L}+|"
_OF_GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
_OF_QWEN2, _OF_LLAMA3 = _WORDS + r"\p{N}" + _TAIL, _WORDS + r"\p{N}{1,3}" + _TAIL


def _cased(end: str = "", but: str = "") -> str:
    """Words that begin with capitals or not: what may be at the end of one, and letters that are in none."""
    before, rest = r"[^\r\n\p{L}\p{N}]?", rf"\p{{Lm}}\p{{Lo}}\p{{M}}{but}]"
    upper, lower = rf"[\p{{Lu}}\p{{Lt}}{rest}", rf"[\p{{Ll}}{rest}"
    return f"{before}{upper}*{lower}+{end}|{before}{upper}+{lower}*{end}|"


_OF_GPT4O = _cased(f"{_CONTRACTION}?") + r"\p{N}{1,3}" + _CASED_TAIL
_OF_BAILING = (
    r"'(?i:[sdmt]|ll|ve|re)|[^\r\n\p{L}\p{N}]?+\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]++[\r\n]*|\s*[\r\n]|\s+(?!\S)|\s+"
)
_CHINESE = "[一-龥ࠀ-一가-퟿]+"
_LETTERS = (
    "A-Za-zµÀ-ÖØ-öø-ƺƼ-ƿǄ-ʓʕ-ʯͰ-ͳͶͷͻ-ͽͿΆΈ-ΊΌΎ-ΡΣ-ϵϷ-ҁҊ-ԯԱ-ՖႠ-ჅᎠ-Ᏽᏸ-ᏽᲐ-ᲺᲽ-Ჿᴀ-ᴫᵫ-ᵷᵹ-ᶚḀ-"
    "ἕἘ-Ἕἠ-ὅὈ-Ὅὐ-ὗὙὛὝὟ-ώᾀ-ᾴᾶ-ᾼιῂ-ῄῆ-ῌῐ-ΐῖ-Ίῠ-Ῥῲ-ῴῶ-ῼℂℇℊ-ℓℕℙ-ℝℤΩℨK-ℭℯ-ℴℹℼ-ℿⅅ-ⅉⅎↃↄⰀ-ⱻⱾ-"
    "ⳤⳫ-ⳮⳲⳳꙀ-ꙭꚀ-ꚛꜢ-ꝯꝱ-ꞇꞋ-ꞎꭰ-ꮿﬀ-ﬆﬓ-ﬗＡ-Ｚａ-ｚ𐐀-𐑏𐒰-𐓓𐓘-𐓻𐲀-𐲲𐳀-𐳲𑢠-𑣟𞤀-𞥃"
)
_OF_DEEPSEEK3 = (
    r"\p{N}{1,3}",
    "[一-龥぀-ゟ゠-ヿ]+",
    r"""[!"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+| ?[\p{P}\p{S}]+[\r\n]*|"""
    r"\s*[\r\n]+|\s+(?!\S)|\s+",
)


@dataclass(frozen=True)
class Cutting:
    """A pre-tokenizer of llama.cpp: the way in which a text is cut before BPE.

    Attributes:
        patterns: regular expressions that cut it one after the other before bytes become characters; none for GPT-2's,
            which is built into what makes characters of bytes.
        digits: whether every digit is cut off first.
        ignores_merges: whether a piece that is a token is not merged from smaller ones.
    """

    patterns: tuple[str, ...] = ()
    digits: bool = False
    ignores_merges: bool = False


_STARCODER, _LLAMA3 = Cutting(digits=True), Cutting((_OF_LLAMA3,), ignores_merges=True)
_QWEN2, _GPT4O, _DEEPSEEK3 = Cutting((_OF_QWEN2,)), Cutting((_OF_GPT4O,)), Cutting(_OF_DEEPSEEK3)
_BLOOM = " ?[^(\\s|.,!?…。，、।۔،)]+"
# The first name of several alike is written.
CUTTINGS: Mapping[str, Cutting] = {
    **dict.fromkeys(("gpt-2", "olmo"), Cutting()),
    **dict.fromkeys(("smollm", "starcoder", "refact", "command-r"), _STARCODER),
    "qwen2": _QWEN2,
    "llama-bpe": _LLAMA3,
    **dict.fromkeys(("smaug-bpe", "dbrx"), Cutting((_OF_LLAMA3,))),
    "tekken": Cutting((_cased() + r"\p{N}" + _CASED_TAIL,), ignores_merges=True),
    "gpt-4o": _GPT4O,
    **dict.fromkeys(("deepseek-v3", "hunyuan-dense", "joyai-llm", "hy_v4"), _DEEPSEEK3),
    "deepseek-llm": Cutting(
        (r"[\r\n]", rf"\s?[{_LETTERS}]+", r"\s?[!-/:-~！-／：-～‘-‟　-。]+", r"\s+$", _CHINESE, r"\p{N}+")
    ),
    "deepseek-coder": Cutting((r"[\r\n]", r"\s?\p{L}+", r"\s?\p{P}+", _CHINESE, r"\p{N}")),
    "kimi-k2": Cutting((r"[\p{Han}]+|" + _cased(f"{_CONTRACTION}?", r"&&[^\p{Han}]") + r"\p{N}{1,3}" + _TAIL,)),
    "qwen35": Cutting(
        (
            _CONTRACTION + r"|[^\r\n\p{L}\p{N}]?[\p{L}\p{M}]+|\p{N}| ?[^\s\p{L}\p{M}\p{N}]+[\r\n]*|"
            r"\s*[\r\n]+|\s+(?!\S)|\s+",
        )
    ),
    "cohere2moe": Cutting((r"\d{1,3}(?=(?:\d{3})*\b)", _OF_GPT4O)),
    "seed-coder": Cutting((_WORDS + r"\p{N}{1}| ?[^\s\p{L}\p{N}\r\n]+|\s*[\r\n]+|\s+(?!\S)|\s+",)),
    "exaone-moe": Cutting(
        (
            _CONTRACTION + r"|[^\r\n\p{L}\p{N}]?(?:\p{L}\p{M}*(?: \p{L}\p{M}*)*)+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n/]?|"
            r"\s*[\r\n]|\s+(?!\S)|\s+",
        )
    ),
    **dict.fromkeys(("bailingmoe", "bailingmoe2"), Cutting((_OF_BAILING,))),
    "laguna": Cutting((r"[^\n]+|[\n]+", _OF_QWEN2)),
    "bloom": Cutting((_BLOOM,)),
    "falcon": Cutting((r"[\p{P}\$\+<=>\^~\|`]+", _OF_GPT2, "[0-9][0-9][0-9]")),
    **dict.fromkeys(("exaone4", "phi-2", "gigachat", "trillion"), Cutting()),
    **dict.fromkeys(("exaone", "mellum2"), _STARCODER),
    **dict.fromkeys(("hunyuan", "solar-open", "stablelm2", "deepseek-r1-qwen", "megrez"), _QWEN2),
    **dict.fromkeys(("glm4", "glm5", "lfm2", "pixtral", "falcon3", "falcon-h1", "llama3", "llama-v3"), _LLAMA3),
    "chatglm-bpe": Cutting((_OF_LLAMA3,)),
    **dict.fromkeys(("llama4", "minimax-m2", "kanana2"), _GPT4O),
}
# Names whose rules are not among these: they are taken for models of families that have them, or when a user says so.
OTHER_CUTTINGS = ("afmoe", "youtu")


def cutting_of(tokenizer: Mapping[str, object]) -> Cutting | None:
    """Rules by which a byte-level tokenizer cuts a text, from its `tokenizer.json`; `None` if llama.cpp has no such
    rules."""
    model = tokenizer.get("model")
    ignores = bool(isinstance(model, Mapping) and model.get("ignore_merges"))
    patterns, digits, last = list[str](), False, None
    for step in _steps(tokenizer.get("pre_tokenizer")):
        last = step
        if step.get("type") == "Digits" and step.get("individual_digits"):
            digits = True
        elif step.get("type") == "Split" and step.get("behavior") == "Isolated" and not step.get("invert"):
            regex = step.get("pattern")
            patterns.append(str(regex.get("Regex")) if isinstance(regex, Mapping) else "")
        elif step.get("type") != "ByteLevel" or step.get("add_prefix_space"):
            return None
    if last is None or last.get("type") != "ByteLevel" or bool(last.get("use_regex", True)) == bool(patterns):
        return None
    return Cutting(tuple(patterns), digits, ignores)


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
    return (one.patterns, one.digits) == (other.patterns, other.digits)


def _steps(found: object) -> Iterator[Mapping[str, object]]:
    """The steps of a pre-tokenizer or of a normalizer."""
    if not isinstance(found, Mapping):
        return
    if found.get("type") == "Sequence":
        for step in found.get("pretokenizers", found.get("normalizers", [])):
            yield from _steps(step)
    else:
        yield found

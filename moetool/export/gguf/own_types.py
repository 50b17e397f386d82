"""Types that moetool can give to the tensors of a GGUF file, whose codes it chooses itself."""

from collections.abc import Sequence

from moetool.export.choosing.menu import Menu
from moetool.export.gguf.file import GgufTensor
from moetool.format.gguf.blocks import BLOCK_TYPES, BlockType

# Left out are those that lose more than another of as many bytes: q2_k more than iq2_s, q3_k more than iq3_s.
_SUPER_BLOCKS = ("iq2_xxs", "iq2_xs", "iq2_s", "iq3_xxs", "iq3_s", "iq4_xs", "q4_k", "q5_k", "q6_k", "q8_0")
_SHORT = ("iq4_nl", "q5_0", "q5_1", "q8_0")  # where super-blocks do not divide a row
_TABLES = ("iq3_s", "iq4_xs", "q4_k", "q5_k", "q6_k", "q8_0")  # of embeddings and head, whose tokens a text has in part


def own_menu(tensors: Sequence[GgufTensor]) -> Menu[BlockType]:
    """The types that moetool can give to each tensor of a file: to those that are not always fp32."""
    types = {tensor.name: own for tensor in tensors if (own := _offered(tensor))}
    return Menu(tensors, types, "llama.cpp", "embeddings and head have at least 3 bits there, norms and routers 32")


def _offered(tensor: GgufTensor) -> tuple[BlockType, ...]:
    columns = tensor.shape[-1]
    if tensor.is_always_wide or not tensor.has_inputs or columns % 32:
        return ()
    names = _SHORT if columns % 256 else _SUPER_BLOCKS if tensor.layer >= 0 else _TABLES
    return tuple(BLOCK_TYPES[name] for name in names)

"""Names of the tensors in a model's decoder layers: the layer of a name, and the beginning of a layer's names."""

import re
from functools import cached_property


def decoder_layer(name: str) -> str:
    """`model.layers.3` of a tensor in a decoder layer, or in a module of another list that is numbered so; an empty
    string of any other tensor."""
    found = re.match(r".*?\.\d+(?=\.)", name)
    return found[0] if found else ""


class DecoderLayers:
    """Names of the tensors of a model's `layers` decoder layers, each of which begins with `layer`, in which `{layer}`
    stands for its number."""

    layers: int
    layer: str
    layer_module: str

    def layer_path(self, layer: int) -> str:
        """`model.layers.3`, the path of a decoder layer's module in memory."""
        return (self.layer_module or self.layer).format(layer=layer)

    def layer_prefix(self, layer: int) -> str:
        """The beginning of all tensor names of a decoder layer, such as `model.layers.3.`, with its dot."""
        return self.layer.format(layer=layer) + "."

    @property
    def layer_prefixes(self) -> tuple[str, ...]:
        """The beginnings of the tensor names of every decoder layer, in order."""
        return tuple(map(self.layer_prefix, range(self.layers)))

    def layer_of(self, name: str) -> int:
        """The number of the decoder layer that a tensor or a module in it is in; −1 for what is outside of all."""
        found = self._numbered.match(name)
        layer = -1 if found is None else int(found[1])
        return layer if layer < self.layers else -1

    @cached_property
    def _numbered(self) -> re.Pattern[str]:
        before, after = map(re.escape, self.layer.split("{layer}"))
        return re.compile(rf"{before}(\d+){after}\.")

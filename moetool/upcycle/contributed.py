"""A dense model whose FFNs are to become one more expert of an MoE model: whether it fits, and what of it is left
out."""

from collections.abc import Iterator, Sequence
from functools import cached_property

import torch
from torch import Tensor

from moetool.architectures import Role
from moetool.architectures.dense import FEATURES
from moetool.calibration.windows import load_tokenizer
from moetool.checkpoint.names import has_vocabulary
from moetool.checkpoint.reader import Checkpoint
from moetool.checkpoint.settings import settings_of
from moetool.convert.parts import Made
from moetool.errors import InvalidInputError
from moetool.format.kinds import custom_module
from moetool.format.kinds.moe import MoESpec
from moetool.job.job import DenseSource, Source
from moetool.job.writing import down_scale, passed_on
from moetool.upcycle.experts import Copies
from moetool.upcycle.targets import Target, targets
from moetool.upcycle.upcycling import Upcycled

# What both models have to agree on beyond the shapes of their tensors: with others they are not of one base, or the FFN
# would compute something else.
_COMMON = ("num_attention_heads", "num_key_value_heads", "hidden_act", "tie_word_embeddings", "embedding_multiplier",
           "attention_multiplier", "residual_multiplier", "logits_scaling")  # fmt: skip
# What may differ, since attention and norms are the MoE model's, but changes what the FFN is given.
_INPUTS = ("rope_parameters", "rms_norm_eps", "sliding_window")


class Contributed:
    """A dense model from which an MoE model gets an expert.

    Attributes:
        name: as the user gave it.
        dense: the model.

    Raises:
        InvalidInputError: on construction, if the model does not fit; the message says why.
    """

    def __init__(self, source: Source, name: str, checkpoint: Checkpoint) -> None:
        self.name, self._source = name, source
        self._spec = custom_module(source.checkpoint.config)
        self._target = self._target_of_moe()
        self.dense = DenseSource.of(checkpoint).dense
        self._scale = down_scale(source.checkpoint)
        self._check_family()
        self._check_network()
        self._check_rest()
        self._check_settings()

    def matrix(self, layer: int, role: Role) -> Tensor:
        """The matrix `[out, in]` of the new expert, in the dtype that it is stored in, scaled as theirs were."""
        matrix = self.dense.matrix(layer, role)
        return matrix * self._scale if role == "down" and self._scale != 1.0 else matrix

    @property
    def _place(self) -> str:
        return self._source.checkpoint.source

    def _target_of_moe(self) -> Target:
        """The family that the MoE model is of, as what upcycling writes."""
        if self._spec is not None:
            return targets()["moetool"]
        model_type, known = str(self._source.checkpoint.config.get("model_type")), targets()
        if model_type not in known:
            native = [name for name, target in known.items() if target.is_native]
            raise InvalidInputError(
                f"{self._place} is a {model_type}: no dense family is known whose FFNs could be experts of it. An "
                f"expert can be added to {', '.join(native)}, and to what upcycle makes of other families."
            )
        return known[model_type]

    def _check_family(self) -> None:
        """Whether upcycling would make of this model one of the MoE model's family."""
        source, own = self._source.checkpoint, str(self.dense.checkpoint.config["model_type"])
        recorded = passed_on(source).upcycled
        config = source.config if recorded is None and self._spec is not None else None
        of = recorded.source_config if recorded is not None else config
        if of is not None and of.get("model_type") != own:
            raise InvalidInputError(
                f"{self.name} is a {own}, and {self._place} was made of a {of.get('model_type')}: an FFN of another "
                "family cannot be an expert of it. Add a model that was fine-tuned from the same base."
            )
        features = (*self.dense.features, *({"shared_half"} & self._target.needs))
        if missing := self._target.missing(features):
            wrong = "has no" if missing[0] in self._target.needs else "has"
            raise InvalidInputError(
                f"{self.name} ({own}) is not of the family that {self._place} ({self._target.name}) can be made of: "
                f"it {wrong} {FEATURES[missing[0]]}."
            )

    def _check_network(self) -> None:
        """Whether the FFN has the shape of the experts, in every layer that has experts."""
        dense, reader = self.dense, self._source.experts
        shape, architecture = reader.shape, self._source.architecture
        pairs: dict[str, tuple[object, object]] = {
            "decoder layers": (dense.layers, architecture.layers),
            "hidden channels": (dense.hidden, shape.hidden),
            "channels in an FFN, or an expert": (dense.intermediate, shape.intermediate),
            "matrices in it": (list(dense.architecture.roles), list(shape.roles)),
            "biases in it": (list(dense.biases), list(shape.biases)),
        }
        for what, (own, expected) in pairs.items():
            if own != expected:
                raise InvalidInputError(
                    f"{self.name} cannot become an expert of {self._place}: {what} are {own} there and {expected} here."
                )
        if lacking := set(reader.moe_layers) - set(dense.ffn_layers):
            raise InvalidInputError(f"{self.name} has no FFN in layer {min(lacking)}, where {self._place} has experts.")

    def _check_rest(self) -> None:
        """Whether both have the same tensors around the experts."""
        own, theirs = self._source, {made.spec.name: made.spec.shape for made in self._rest}
        for name, shape in theirs.items():
            if self.dense.may_lack(name):
                continue
            if name not in own.checkpoint.tensors:
                raise InvalidInputError(f"{self.name} has a tensor {name}, which {self._place} has not: not one base.")
            if (found := own.checkpoint.tensors[name].shape) != shape:
                by_token = ("embed" in name or "lm_head" in name) and found[0] != shape[0]
                raise InvalidInputError(
                    f"{self.name} and {self._place} are of different {'vocabularies' if by_token else 'shapes'}: "
                    f"{name} has shape {list(shape)} there and {list(found)} here."
                )
        for name in own.checkpoint.tensors:
            if not (name in theirs or self._is_inside(name) or self.dense.may_lack(name)):
                raise InvalidInputError(f"{self.name} has no tensor {name}, which {self._place} has: not one base.")

    def _check_settings(self) -> None:
        """Whether both compute alike, but for what only changes the inputs of the FFN."""
        for key, (theirs, ours) in self._differing(_COMMON).items():
            raise InvalidInputError(
                f"{self.name} has {key} {theirs!r} and {self._place} has {ours!r}: they are not of one base, or the "
                "FFN would compute something else. Add a model that was fine-tuned from the same base."
            )

    def _differing(self, keys: Sequence[str]) -> dict[str, tuple[object, object]]:
        """Settings that differ, each with its value of the dense model and of the MoE model."""
        theirs = settings_of(self._converted.config(), self.dense.checkpoint.path)
        ours = self._source.checkpoint.settings
        return {key: (theirs.get(key), ours.get(key)) for key in keys if theirs.get(key) != ours.get(key)}

    def notes(self) -> list[str]:
        """Sentences on what differs between the models without being a reason to refuse."""
        found = [
            f"{self.name} has {key} {theirs!r} and {self._place} has {ours!r}, so that the new expert is given other "
            "inputs than it was trained on."
            for key, (theirs, ours) in self._differing(_INPUTS).items()
        ]
        if tokens := self._different_tokens:
            found.append(
                f"The tokenizers of {self.name} and {self._place} differ in {tokens} entries: some tokens may have "
                "meant something else where the new expert was trained."
            )
        return found

    def _is_inside(self, name: str) -> bool:
        """Whether a tensor belongs to experts, a router or a shared expert."""
        architecture = self._source.architecture
        return any(
            name.startswith(architecture.block_prefix(layer))
            or name in architecture.shared_expert_names(layer).values()
            for layer in self._source.experts.moe_layers
        )

    @cached_property
    def _converted(self) -> Upcycled:
        """What upcycling makes of the model: its tensors under the names of the MoE model's family."""
        reader = self._source.experts
        shape, dense = reader.shape, self.dense
        spec = self._spec if isinstance(self._spec, MoESpec) else None
        return Upcycled(
            dense=dense,
            target=self._target,
            spec=spec
            or MoESpec(
                experts=shape.experts,
                top_k=shape.top_k,
                intermediate=shape.intermediate,
                layers=reader.moe_layers,
                shared="none",
                of=dense.layers,
                hidden=dense.hidden,
                roles=shape.roles,
                biases=shape.biases,
            ),
            experts=Copies([dense]),
            router=lambda layer: torch.zeros(shape.experts, shape.hidden),
            rest=[dense],
            dtype=None,
            seed=0,
        )

    @cached_property
    def _rest(self) -> list[Made]:
        """What is neither in an expert nor in a router, under the names that it has in the MoE model."""
        return [made for _, unit in self._converted.units() for made in unit if not self._is_inside(made.spec.name)]

    @property
    def rest_bytes(self) -> int:
        """Bytes of what is left out of the model, which `difference` reads."""
        return sum(made.spec.nbytes for made in self._rest)

    def difference(self) -> float:
        """How far the model's attention, norms and embeddings are from those of the MoE model: ‖difference‖ / ‖MoE
        model's‖ over all of these tensors. The new expert does without what they have learnt."""
        lost = total = 0.0
        for made in self._rest:
            if made.spec.name not in self._source.checkpoint.tensors:
                continue
            ours, start = self._source.checkpoint.read(made.spec.name).flatten(), 0
            for part in _parts(made):
                own = ours[start : start + part.numel()].double()
                lost += float((part.flatten().double() - own).square().sum())
                total += float(own.square().sum())
                start += part.numel()
        return (lost / total) ** 0.5 if total else 0.0

    @cached_property
    def _different_tokens(self) -> int:
        """Number of entries in which the vocabularies of the two tokenizers differ; 0 where one has none."""
        paths = [self._source.checkpoint.path, self.dense.checkpoint.path]
        if not all(path.is_dir() and has_vocabulary(path) for path in paths):
            return 0
        ours, theirs = (load_tokenizer(path).get_vocab().items() for path in paths)
        return len(ours ^ theirs)


def _parts(made: Made) -> Iterator[Tensor]:
    whole = made.make()
    yield from (whole,) if isinstance(whole, Tensor) else whole.parts

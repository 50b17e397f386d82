"""`moetool.json`: where a checkpoint comes from and how it was made, without anything that changes between runs."""

from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from moetool.checkpoint.json_files import read_object
from moetool.checkpoint.names import MANIFEST
from moetool.checkpoint.reader import Checkpoint
from moetool.checkpoint.sealed import write_sealed
from moetool.errors import InvalidInputError
from moetool.version import __version__

MANIFEST_VERSION = 5
_WITH_PROVENANCE = 3  # the first format that has it apart; before, it stood among the statistics
_WITH_CARD = 4  # the first whose README.md is moetool's, and with the options that were chosen
LIBRARIES = ("torch", "transformers", "safetensors", "tokenizers", "datasets")


class Origin(BaseModel):
    """One stage in the history of a checkpoint, with its source and options as in a `Manifest`."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    stage: str
    source: str
    source_fingerprint: str
    chosen: dict[str, object] | None = None


class DenseOrigin(BaseModel):
    """The dense model that another was made of: its `config.json`, and its dtype as torch calls it (not in the oldest
    manifests)."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    source_config: dict[str, object]
    dtype: str | None = None


class Upcycling(DenseOrigin):
    """Record of upcycling a dense model, with all that un-merging needs.

    Attributes:
        target: the family that was written.
        mixture: its shape, as `MoESpec.to_config` says it.
        granularity: pieces into which each copy of an FFN was cut.
        whole: whether the experts are whole copies still, all pieces of one after the other.
    """

    target: str
    mixture: dict[str, object]
    granularity: int = 1
    whole: bool = True

    @property
    def shared(self) -> str:
        """Role of the original FFN beside the experts, in the words of `MoESpec.shared`."""
        return str(self.mixture.get("shared", "none"))


class ExpertOrigin(BaseModel):
    """The dense model whose FFNs an expert of every layer started as.

    Attributes:
        model: as the user named it.
        fingerprint: of its checkpoint or adapter; `None` where older manifests did not note it.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    model: str
    fingerprint: str | None = None


class Provenance(BaseModel):
    """The dense models that a model was made from.

    Attributes:
        upcycled: by upcycling to an MoE model of whole FFNs, if it can be turned back into a dense one.
        moefied: by splitting the FFNs of a dense model.
        experts: by number, the model that each expert came from; `None` where it is not known. Empty if it is known of
            none.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    upcycled: Upcycling | None = None
    moefied: DenseOrigin | None = None
    experts: tuple[ExpertOrigin | None, ...] = ()


class Manifest(BaseModel):
    """The record of one conversion. The same run gives the same bytes, so it has no times and no hosts.

    Attributes:
        format_version: of this record.
        moetool_version: of the moetool that wrote it.
        source: the checkpoint that was converted, as the user named it.
        source_fingerprint: `Checkpoint.fingerprint()` of it.
        recipe: the method and every option, defaults included.
        chosen: the options that are not at their defaults, of local files the names alone, for the model card; `None`
            in older records.
        seed: of all random choices.
        versions: of the libraries that computed it.
        statistics: what was measured on the calibration data.
        provenance: what the model was made of.
        layers: per layer, what was chosen and the errors that came of it.
        files: SHA-256 of every file of the checkpoint but this one and the job's costs, in hexadecimal, by its path
            there.
        lineage: how the source came about, its last step first, as far as moetool did it.
        run: hash of everything that decided the result, by which a finished run is known again.
        digest: SHA-256 of all the rest of this record; empty in one that is not written yet.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    format_version: int = MANIFEST_VERSION
    moetool_version: str = __version__
    source: str
    source_fingerprint: str
    recipe: dict[str, object]
    chosen: dict[str, object] | None = None
    seed: int
    versions: dict[str, str] = Field(default_factory=lambda: library_versions())
    statistics: dict[str, object] = {}
    provenance: Provenance = Provenance()
    layers: dict[str, dict[str, object]] = {}
    files: dict[str, str] = {}
    lineage: tuple[Origin, ...] = ()
    run: str | None = None
    digest: str = ""

    @property
    def origins(self) -> tuple[Origin, ...]:
        """The stages that led to the checkpoint and what each of them read, the last one first."""
        stage = str(self.recipe.get("stage", ""))
        own = Origin(stage=stage, source=self.source, source_fingerprint=self.source_fingerprint, chosen=self.chosen)
        return own, *self.lineage

    @property
    def has_card(self) -> bool:
        """Whether moetool wrote the `README.md` that lies beside it; earlier ones were copied from the source."""
        return self.format_version >= _WITH_CARD


def library_versions() -> dict[str, str]:
    """The versions of the libraries that results depend on, of those that are installed."""
    found = {}
    for name in LIBRARIES:
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            continue
    return found


def write_manifest(directory: Path, manifest: Manifest) -> Path:
    """Write `moetool.json` into a checkpoint's directory; returns its path.

    Raises:
        ResourceError: it cannot be written.
    """
    write_sealed(directory / MANIFEST, manifest.model_dump(mode="json", exclude={"digest"}))
    return directory / MANIFEST


def manifest_of(directory: Path) -> Manifest | None:
    """That of a checkpoint's directory, if moetool wrote it. Raises as `read_manifest`."""
    return read_manifest(directory) if (directory / MANIFEST).exists() else None


def noted_in(checkpoint: Checkpoint) -> Path:
    """The directory with a checkpoint's manifest: that of the export for a GGUF file that moetool wrote, else its own.
    Raises as `read_manifest`."""
    file = checkpoint.gguf_file
    manifest = None if file is None else manifest_of(file.parent)
    return checkpoint.path if file is None or manifest is None or file.name not in manifest.files else file.parent


def read_manifest(directory: Path) -> Manifest:
    """Read `moetool.json` of a checkpoint's directory.

    Raises:
        InvalidInputError: there is none, it was written by a newer moetool, or it is damaged.
    """
    file = directory / MANIFEST
    _, content = read_object(file, lambda: f"{directory} has no {MANIFEST}: moetool did not write this checkpoint.")
    written = content.get("format_version")
    if isinstance(written, int) and written > MANIFEST_VERSION:
        raise InvalidInputError(
            f"{file} has format version {written}; this moetool reads up to {MANIFEST_VERSION}. Upgrade moetool."
        )
    statistics = content.get("statistics")
    if isinstance(written, int) and written < _WITH_PROVENANCE and isinstance(statistics, dict):
        hidden = {topic: statistics.get(topic) for topic in ("upcycled", "moefied")}
        content = {**content, "provenance": hidden}
    try:
        return Manifest.model_validate(content)
    except ValidationError as error:
        problems = "; ".join(f"{'.'.join(map(str, item['loc'])) or 'it'}: {item['msg']}" for item in error.errors())
        raise InvalidInputError(f"{file} is not a manifest ({problems}).") from error

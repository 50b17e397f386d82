"""Files that stages leave beside the weights for later stages: statistics, and a manifest."""

from collections.abc import Iterable, Mapping
from pathlib import Path

from safetensors import SafetensorError
from safetensors.torch import load_file

from moetool.calibration.collectors import LayerStatistics
from moetool.calibration.output_gradients import metric_path, moment_shape
from moetool.checkpoint.files import copy_file, save_tensors
from moetool.checkpoint.json_files import read_object
from moetool.checkpoint.manifest import manifest_of
from moetool.checkpoint.names import TOKENIZER
from moetool.checkpoint.source import first_line
from moetool.checkpoint.writer import is_finite
from moetool.errors import InvalidInputError
from moetool.job.job import Input, Source

RECORDS = Path("moetool")  # the directory beside the weights where no loader looks
STATISTICS = RECORDS / "statistics.safetensors"


def write_statistics(directory: Path, statistics: Mapping[int, LayerStatistics]) -> list[Path]:
    """Keep what was measured beside the weights, and return the files."""
    if not statistics:
        return []
    tensors = {
        f"{layer}.{name}": tensor
        for layer, measured in sorted(statistics.items())
        for name, tensor in measured.tensors().items()
    }
    save_tensors(directory / STATISTICS, tensors)
    return [directory / STATISTICS]


def read_statistics(source: Source) -> dict[int, LayerStatistics]:
    """Inverse of `write_statistics`; empty if nothing was measured.

    Raises:
        InvalidInputError: the file is damaged, or does not fit the model.
    """
    path, shape = source.checkpoint.path / STATISTICS, source.experts.shape
    if not path.exists():
        return {}
    try:
        tensors = load_file(path)
        layers = sorted({int(name.split(".")[0]) for name in tensors})
        found = {
            layer: LayerStatistics.from_tensors(
                {name.partition(".")[2]: tensor for name, tensor in tensors.items() if name.startswith(f"{layer}.")}
            )
            for layer in layers
        }
    except (SafetensorError, OSError, KeyError, ValueError, RuntimeError) as error:
        raise InvalidInputError(
            f"{path} is damaged ({first_line(error)}). Delete it: what a stage needs of it is measured again."
        ) from error
    rows = {role: (shape.experts, shape.matrix(role)[0]) for role in shape.roles}
    for layer, measured in found.items():
        fits = layer in source.experts.moe_layers and measured.tokens.shape == (shape.experts,)
        fits = fits and measured.channel_energy.shape == (shape.intermediate,)
        fits = fits and {role: tuple(fisher.shape) for role, fisher in measured.fisher.items()} == rows
        if not fits or not all(map(is_finite, measured.tensors().values())):
            raise InvalidInputError(
                f"{path} does not fit the experts of layer {layer}. Delete it: what a stage needs of it is measured "
                "again."
            )
    return found


def metrics_of(source: Source) -> dict[int, Path]:
    """Find, by layer, the files that say how errors at the output of its experts count together, which stages hand on
    from `fisher-merge`."""
    paths = {layer: metric_path(source.checkpoint.path / RECORDS, layer) for layer in source.experts.moe_layers}
    return {layer: path for layer, path in paths.items() if path.exists()}


def keep_metrics(directory: Path, metrics: Iterable[Path]) -> list[Path]:
    """Keep files of `metrics_of`, or of a base, beside the weights, and return the copies."""
    return [copy_file(path, directory / RECORDS / path.name) for path in metrics]


def check_records(source: Input) -> None:
    """Read what earlier stages have left in a checkpoint's directory beside the weights, if they have, and the
    tokenizer, which is passed on as it is.

    Raises:
        InvalidInputError: the manifest, the statistics, metrics of outputs or `tokenizer.json` are damaged.
    """
    _check_tokenizer(source.checkpoint.path)
    manifest_of(source.checkpoint.path)
    if isinstance(source, Source):
        read_statistics(source)
        _check_metrics(source)


def _check_metrics(source: Source) -> None:
    """Read the heads of all files of `metrics_of`; their numbers, which are many, are checked where they are loaded."""
    hidden = source.experts.shape.hidden
    for path in metrics_of(source).values():
        try:
            shape = moment_shape(path)
        except (SafetensorError, OSError) as error:
            raise InvalidInputError(
                f"{path} is damaged ({first_line(error)}). Delete it: errors then count by channel."
            ) from error
        if shape != (hidden, hidden):
            raise InvalidInputError(f"{path} does not fit the model. Delete it: errors then count by channel.")


def _check_tokenizer(directory: Path) -> None:
    """Check that `tokenizer.json`, where there is one, was not cut off or replaced. No more: a model whose tokenizer
    this machine's library does not know yet can be converted all the same."""
    file = directory / TOKENIZER
    if file.exists() and not isinstance(read_object(file, lambda: f"{file} is gone.")[1].get("model"), Mapping):
        raise InvalidInputError(f"{file} holds no tokenizer: it has no 'model'. Download or write it again.")

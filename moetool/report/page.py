"""A report as one HTML file: nothing is loaded, no script runs, light or dark as its reader has it."""

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import NamedTuple

from jinja2 import Environment, FileSystemLoader, StrictUndefined
from markupsafe import Markup

from moetool.checkpoint.files import storage_errors
from moetool.checkpoint.source import model_name
from moetool.errors import UsageError
from moetool.job.checks import output_file
from moetool.job.progress import SILENT, Progress, phase
from moetool.measure.inspected import Masks
from moetool.report import pictures
from moetool.report.experts import landed, merged, neurons, reached, stored
from moetool.report.jobs import time_and_memory, training
from moetool.report.likeness import analysed
from moetool.report.parts import Section
from moetool.report.quality import quality
from moetool.report.results import Report
from moetool.report.sections import headline, how_made, options, size
from moetool.version import __version__

TEMPLATE = "page.html"


class Drawn(NamedTuple):
    """A chart as the page holds it: its title, and its drawing as SVG."""

    title: str
    svg: Markup


def sections(report: Report) -> list[Section]:
    """All sections that apply to the model, in the order of the page."""
    return [section for section in _candidates(report) if section is not None]


def _candidates(report: Report) -> Iterator[Section | None]:
    if report.made is not None:
        yield how_made(report.made)
    yield size(report)
    yield quality(report)
    if report.stored is not None:
        yield stored(report.stored)
    if report.merged:
        yield merged(report.merged)
    if report.activations is not None:
        yield neurons(report.activations)
    if (inspection := report.inspection) is not None:
        if isinstance(inspection.moe, Masks):
            yield landed(inspection.moe)
        if inspection.analysis is not None:
            yield from analysed(inspection.analysis)
    if report.coverage:
        yield reached(report.coverage, report.routing)
    yield training(report)
    yield time_and_memory(report)
    if report.made is not None:
        yield options(report.made)


def page(report: Report, progress: Progress = SILENT) -> str:
    """Render the report as one HTML file, byte by byte equal for equal reports and matplotlib versions. Without
    matplotlib it has no charts."""
    found = sections(report)
    environment = Environment(
        loader=FileSystemLoader(Path(__file__).parent),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
    )
    return environment.get_template(TEMPLATE).render(
        report=report,
        name=model_name(report.model),
        facts=_facts(report),
        headline=list(headline(report)),
        sections=found,
        charts=_drawn(found, progress),
        version=__version__,
    )


def _drawn(found: list[Section], progress: Progress) -> Mapping[str, list[Drawn]]:
    """The charts of every section, by its name."""
    if not pictures.is_there():
        return {section.name: [] for section in found}
    drawn: dict[str, list[Drawn]] = {section.name: [] for section in found}
    with phase(progress, "Draw", sum(len(section.charts) for section in found), "charts"):
        for section in found:
            for number, chart in enumerate(section.charts):
                svg = pictures.draw(chart, f"{section.name}-{number}")
                drawn[section.name].append(Drawn(chart.title, Markup(svg)))
                progress.advance()
    return drawn


def _facts(report: Report) -> str:
    """One line of facts: family, layers, widths, dtype, and the rule by which experts are weighed."""
    if (found := report.inspection) is None:
        return report.model_type
    layers = "" if found.layers is None else f"{found.layers} layers, "
    width = f"hidden size {found.hidden_size}, intermediate size {found.intermediate_size}"
    router = f"How the router weighs a token's experts: {found.router_rule}."
    return f"{found.architecture}: {layers}{width}, {found.dtype}. {router}"


def page_file(model: str, output: Path | None) -> Path:
    """Path of the page: `output`, or by default a file in this directory under the model's name.

    Raises:
        UsageError, ResourceError: no page can be written there.
    """
    file = Path(f"{model_name(model)}.html") if output is None else output
    if file.suffix not in (".html", ".htm"):
        raise UsageError(f"{file}: a report's name ends in .html.")
    return output_file(file)


def write_page(report: Report, file: Path, progress: Progress = SILENT) -> None:
    """Write the page into a file. Raises `ResourceError` if it cannot be written."""
    content = page(report, progress)
    with storage_errors(file):
        file.write_text(content, encoding="utf-8")

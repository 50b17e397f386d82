"""`moetool inspect`."""

from typing import Annotated, Any

import typer

from moetool.architectures import ROLES
from moetool.cli.app import COMMANDS
from moetool.cli.display import Display, print_fields, print_json, print_table
from moetool.cli.generate import HintingCommand, build_options, make_command, with_options
from moetool.errors import UsageError
from moetool.job.sizes import format_bytes, format_change
from moetool.measure.analysis import AnalysisOptions, analyse
from moetool.measure.inspection import inspect_checkpoint
from moetool.representations import describe, parse_representation
from moetool.runtime.modules.batch_dependence import BATCH_DEPENDENT


def build(name: str, arguments: list[str]) -> HintingCommand:
    """The command."""

    def command(
        model: Annotated[str, typer.Argument(help="A checkpoint, compressed or not.", show_default=False)],
        analysis: Annotated[
            bool, typer.Option("--analysis", help="Similarity of experts, energy of singular values, sensitivity.")
        ] = False,
        json: Annotated[bool, typer.Option("--json", help="The result as one JSON object.")] = False,
        **typed: object,
    ) -> None:
        options = build_options(AnalysisOptions, typed)
        if options.model_fields_set and not analysis:
            raise UsageError("--layers limits --analysis: give both.")
        result = inspect_checkpoint(model)
        if analysis:
            result["analysis"] = analyse(model, options, Display())
        if json:
            print_json(result)
            return
        _print(result)
        if analysis:
            _print_analysis(result["analysis"])

    return make_command(name, with_options(command, AnalysisOptions), COMMANDS[name][1])


def _print(result: dict[str, Any]) -> None:
    counts = result["parameters"]
    files = "in 1 file" if result["files"] == 1 else f"in {result['files']} files"
    if not result["files"]:
        files = "by config.json alone: there are no weight files"
    change = f", {format_change(result['ratio'])}" if result["ratio"] else ""
    print_fields(
        [
            ("model", result["path"]),
            ("architecture", f"{result['architecture']} ({result['router_rule']})"),
            ("layers", f"{result['layers']}, of which {result['moe_layers']} with experts"),
            ("experts", f"{result['experts']}, top-{result['top_k']}, {result['dtype']}"),
            ("width", f"hidden {result['hidden_size']}, intermediate {result['intermediate_size']}"),
            ("parameters", f"{counts['total']:,} total, {counts['active']:,} active, {counts['stored']:,} stored"),
            ("added", f"{counts['added']:,} beyond one dense FFN per layer, in numbers of 16 bits"),
            ("bytes", f"{format_bytes(result['bytes'])} {files}{change}"),
        ]
    )
    if all(layer["representation"] == "native" for layer in result["moe"]):
        return
    if "overlap" in result:
        _print_masks(result)
        return
    roles = [role for role in ROLES if any(role in layer for layer in result["moe"])]
    rows = [
        (str(layer["layer"]), *(_weights(layer.get(role, "native")) for role in roles), _base(layer))
        for layer in result["moe"]
    ]
    print_table(("layer", *roles, "base channels"), rows)
    if result["depends_on_batch"]:
        print("(−n): so many more are skipped for every batch.")
        print(f"note: {BATCH_DEPENDENT}")


def _print_masks(result: dict[str, Any]) -> None:
    """Where experts landed, by layer and by type of linear layer, and what they have in common (SIMoE, Fig. 4, 5)."""
    print_fields([("density", f"{result['mean_density']:.1%} of the channels per expert, {result['union_density']:.1%} "
                   "for any of them")])  # fmt: skip
    for title, part in (("layer", 0), ("type", 1)):
        groups: dict[str, list[dict[str, Any]]] = {}
        for site in result["moe"]:
            groups.setdefault(_place(site["site"])[part], []).append(site)
        rows = [
            (name, *(f"{_weighted(sites, density):.1%}" for density in ("mean_density", "union_density")))
            for name, sites in groups.items()
        ]
        print_table((title, "per expert", "any expert"), rows)
    rows = [(str(expert), *(f"{value:.2f}" for value in row)) for expert, row in enumerate(result["overlap"])]
    header = ("expert", *(str(expert) for expert in range(len(rows))))
    print_table(header, rows, title="Overlap: the share of an expert's channels that another leaves open too")


def _place(site: str) -> tuple[str, str]:
    """The layer and the type of a linear layer, from its name."""
    parts = site.split(".")
    number = next(index for index, part in enumerate(parts) if part.isdigit())
    return parts[number], parts[-1]


def _weighted(sites: list[dict[str, Any]], density: str) -> float:
    channels = sum(site["channels"] for site in sites)
    return float(sum(site[density] * site["channels"] for site in sites) / channels)


def _weights(specs: str | list[str]) -> str:
    """`rank 12 … 96, mean 40; 1 × dense` for a role's experts, or `5 × 2 bits; 3 × rank 5 … 23 in 3 bits`."""
    return specs if isinstance(specs, str) else describe(map(parse_representation, specs))


def _base(layer: dict[str, Any]) -> str:
    if "base_channels" not in layer:
        return "-"
    return f"{layer['base_channels']}" + (f" (−{layer['dynamic_channels']})" if layer["dynamic_channels"] else "")


def _print_analysis(analysis: dict[str, Any]) -> None:
    present = [role for role in ROLES if role in analysis["layers"][0]]
    roles = [(str(entry["layer"]), role, entry[role]) for entry in analysis["layers"] for role in present]
    print_table(
        ("layer", "role", "experts", "factors V", "factors U"),
        [
            (layer, role, *(_similarity(entry[kind]) for kind in ("cka", "cka_v", "cka_u")))
            for layer, role, entry in roles
        ],
        title="Similarity: CKA between experts, mean (min … max)",
    )
    print_table(
        ("layer", "role", "of", *(f"{share} %" for share in analysis["shares"])),
        [
            (
                layer,
                role,
                _KINDS[kind].format(entry["base"]),
                *_energies(entry["energy"][kind], len(analysis["shares"])),
            )
            for layer, role, entry in roles
            for kind in _KINDS
        ],
        title="Energy retained by the largest singular values, by their share",
    )
    print_table(
        ("layer", "sensitivity", *present, "tokens per expert"),
        [
            (
                str(entry["layer"]),
                *(
                    _scientific(value)
                    for value in (entry["sensitivity"], *(entry[role]["sensitivity"] for role in present))
                ),
                _range(entry["token_share"]),
            )
            for entry in analysis["layers"]
        ],
        title="Sensitivity: cost of errors of the same relative size",
    )
    for note in analysis["notes"]:
        print(f"note: {note}")


_KINDS = {"experts": "experts", "base": "{} base", "delta": "deltas"}


def _similarity(similarity: dict[str, Any] | None) -> str:
    if similarity is None or similarity["mean"] is None:
        return "-"
    return "{mean:.3f} ({min:.3f} … {max:.3f})".format(**similarity)


def _energies(retained: list[float] | None, count: int) -> list[str]:
    return ["-"] * count if retained is None else [f"{value:.3f}" for value in retained]


def _scientific(value: float | None) -> str:
    return "-" if value is None else f"{value:.2e}"


def _range(shares: list[float] | None) -> str:
    return "-" if shares is None else f"{min(shares):.1%} … {max(shares):.1%}"

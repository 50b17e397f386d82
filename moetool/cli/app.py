"""The list of commands. Each is imported only when it is called, so that `moetool --help` is instant."""

import importlib
from typing import Any

import typer
from typer.core import TyperCommand, TyperGroup

from moetool.errors import did_you_mean

# Name → (module with a function `build(name, arguments)`, one line for --help).
COMMANDS: dict[str, tuple[str, str]] = {
    "upcycle": ("stage", "Turn a dense model into an MoE model (--method vanilla, drop, fine-grained …)."),
    "moefy": ("stage", "Split a dense model's FFNs into experts and skip most of them, without training."),
    "tune": ("stage", "Fine-tune on instructions or text, with a load-balancing loss for MoE models."),
    "compress": ("stage", "Make an MoE model smaller in one streamed pass (--method d2moe, ders-quantize …)."),
    "fisher-merge": ("stage", "Stage 1: merge each layer's experts into one shared base."),
    "decompose": ("stage", "Stage 2: experts into base and deltas, without loss."),
    "svd-compress": ("stage", "Stage 3: make the deltas low-rank."),
    "prune-base": ("stage", "Stage 4: prune intermediate channels of the base."),
    "quantize-delta": ("stage", "Store deltas, or their low-rank factors, quantized."),
    "sparsify-delta": ("stage", "Store deltas sparse."),
    "export": ("stage", "Back to the original layout, for any engine; or to a dense model (--format dense)."),
    "eval": ("evaluate", "Perplexity of a model on a text."),
    "routing": ("routing", "Which experts a model chooses on which text."),
    "inspect": ("inspect", "What a checkpoint holds: layers, experts, ranks, parameters, bytes."),
    "verify": ("verify", "Check a checkpoint's files, and its tensors against the source it was made from."),
    "demo": ("demo", "Train a small model, upcycle it, compress it, evaluate it: two minutes, offline."),
    "list": ("listing", "Known methods, architectures, targets, presets and representations."),
}


class LazyGroup(TyperGroup):
    """A group whose help needs one line per command, and whose calls load one module."""

    def list_commands(self, ctx: Any) -> list[str]:
        return list(COMMANDS)

    def get_command(self, ctx: Any, cmd_name: str) -> Any:
        if cmd_name not in COMMANDS:
            return None
        return TyperCommand(cmd_name, help=COMMANDS[cmd_name][1], short_help=COMMANDS[cmd_name][1])

    def resolve_command(self, ctx: Any, args: list[str]) -> tuple[Any, Any, list[str]]:
        if args[0] not in COMMANDS and not args[0].startswith("-"):
            ctx.fail(f"No such command '{args[0]}'.{did_you_mean(args[0], COMMANDS)}")
        name, command, rest = super().resolve_command(ctx, args)
        if command is not None and name in COMMANDS:
            module = importlib.import_module(f"moetool.cli.commands.{COMMANDS[name][0]}")
            command = module.build(name, rest)
        return name, command, rest


app = typer.Typer(
    cls=LazyGroup,
    name="moetool",
    help="Turn dense checkpoints into MoE models, and make MoE models smaller.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
)


def _version(wanted: bool) -> None:
    if wanted:
        from moetool.version import __version__

        print(f"moetool {__version__}")
        raise typer.Exit


@app.callback()
def root(
    version: bool = typer.Option(False, "--version", callback=_version, is_eager=True, help="Show the version."),
) -> None:
    """Options before the command."""

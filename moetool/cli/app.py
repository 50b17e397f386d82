"""The `moetool` command. What it calls is imported only then, so that `moetool --help` is instant."""

from typing import Any

import typer
from typer.core import TyperCommand, TyperGroup

from moetool.cli.front import front
from moetool.cli.names import COMMAND_GROUPS, commands
from moetool.errors import did_you_mean


class LazyGroup(TyperGroup):
    """A group whose help needs one line per command, and whose calls load one command."""

    def list_commands(self, ctx: Any) -> list[str]:
        return list(commands())

    def get_command(self, ctx: Any, cmd_name: str) -> Any:
        if (known := commands().get(cmd_name)) is None:
            return None
        return TyperCommand(cmd_name, help=known[1], short_help=known[1])

    def format_commands(self, ctx: Any, formatter: Any) -> None:
        """One line for each command, in groups."""
        known = commands()
        grouped = {name for names in COMMAND_GROUPS.values() for name in names}
        *groups, (last, names) = COMMAND_GROUPS.items()
        for title, those in (*groups, (last, (*names, *(name for name in known if name not in grouped)))):
            with formatter.section(title):
                formatter.write_dl([(name, known[name][1]) for name in those])

    def resolve_command(self, ctx: Any, args: list[str]) -> tuple[Any, Any, list[str]]:
        known = commands()
        if args[0] not in known and not args[0].startswith("-"):
            ctx.fail(f"No such command '{args[0]}'.{did_you_mean(args[0], known)}")
        name, command, rest = super().resolve_command(ctx, args)
        if command is not None and name in known:
            command = front(name, rest)
        return name, command, rest


app = typer.Typer(
    cls=LazyGroup,
    name="moetool",
    help="Turn dense checkpoints into MoE models, and make MoE models smaller.",
    no_args_is_help=True,
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

"""Entry point `nvrx-sre`: finds the command, loads only its module, turns errors into one line and an exit code.

Model: a table of commands, each in a module of its own that is imported when the command is named, so that
`--help` and read-only commands never load torch. Errors of ours (`core.errors.NvrxError`) own their exit code;
click's own are usage errors (2); anything else is an internal error (70).

Must not: show a traceback to a user who did not ask for one (`nvrx-sre --traceback COMMAND ...`).
"""

from __future__ import annotations

import importlib
import os
import re
import sys
from collections.abc import Sequence

import click

import nvrx_sre
from nvrx_sre.core.errors import ExitCode, NvrxError
from nvrx_sre.core.output import masked, print_error

COMMANDS: dict[str, str] = {
    "train": "nvrx_sre.cli.train:command",
    "launch": "nvrx_sre.cli.launch:command",
    "demo": "nvrx_sre.cli.demo:command",
    "generate": "nvrx_sre.cli.generate:command",
    "events": "nvrx_sre.cli.events:command",
    "runs": "nvrx_sre.cli.runs:command",
    "exporter": "nvrx_sre.cli.exporter:command",
    "policy": "nvrx_sre.cli.policy:command",
    "halt": "nvrx_sre.cli.halt:halt",
    "resume": "nvrx_sre.cli.halt:resume",
    "brake": "nvrx_sre.cli.brake:command",
    "monitor": "nvrx_sre.cli.monitor:command",
    "checkpoint": "nvrx_sre.cli.checkpoint:command",
    "runbook": "nvrx_sre.cli.runbook:command",
    "doctor": "nvrx_sre.cli.doctor:command",
    "bench": "nvrx_sre.cli.bench:command",
    "simulate": "nvrx_sre.cli.simulate:command",
}
"""Command -> `module:attribute`. One file a command group."""
LEAST_STEM = len("--abc")
"""Of an unknown option: what is shorter begins too many."""
FILE_KEY = "nvrx_sre.config_file"
"""Where a command notes the file from which its options' defaults come."""


class LazyGroup(click.Group):
    """A group whose commands are imported when they are asked for."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        return list(COMMANDS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        target = COMMANDS.get(cmd_name)
        if target is None:
            return None
        module, attribute = target.split(":")
        loaded: click.Command = getattr(importlib.import_module(module), attribute)
        return loaded


@click.group(cls=LazyGroup, context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 110})
@click.version_option(nvrx_sre.__version__, "--version", prog_name="nvrx-sre", message="%(prog)s %(version)s")
@click.option("--traceback", "show_traceback", is_flag=True, help="Show the traceback of an error, for a bug report.")
@click.pass_context
def group(ctx: click.Context, show_traceback: bool) -> None:
    """A resilient PyTorch trainer and the observability to prove that it recovered."""
    ctx.find_root().meta["nvrx_sre.show_traceback"] = show_traceback


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line and return its exit code. Blocks for as long as the command runs.

    `argv` is without the program's name; None takes the process's own.
    """
    arguments = list(sys.argv[1:] if argv is None else argv)
    try:
        result = group.main(args=arguments, prog_name="nvrx-sre", standalone_mode=False)
        sys.stdout.flush()
        return result if isinstance(result, int) else ExitCode.FINISHED
    except BrokenPipeError:
        _discard_stdout()
        return ExitCode.FINISHED
    # The process's outermost boundary: whatever arrives here becomes one line and an exit code.
    except BaseException as error:  # noqa: BLE001
        return _report(error, show_traceback="--traceback" in arguments[:1])


def _report(error: BaseException, *, show_traceback: bool) -> int:
    """Say what went wrong in one line on stderr; the exit code that belongs to it."""
    if show_traceback and isinstance(error, Exception):
        print_error(error)
    if isinstance(error, SystemExit):
        return error.code if isinstance(error.code, int) else ExitCode.FINISHED
    if isinstance(error, click.exceptions.Exit):
        return error.exit_code
    if isinstance(error, click.exceptions.NoArgsIsHelpError):
        click.echo(error.format_message(), err=True)
        return ExitCode.USAGE
    if isinstance(error, click.ClickException):
        _say(_usage_line(error))
        return ExitCode.CONFIG if _file_of(error) else ExitCode.USAGE
    if isinstance(error, NvrxError):
        _say(str(error))
        return error.exit_code
    if isinstance(error, (KeyboardInterrupt, click.Abort)):
        _say("interrupted")
        return ExitCode.INTERRUPTED
    said = masked(f"{type(error).__name__}: {error}")
    _say(f"internal error: {said} (run 'nvrx-sre --traceback ...' for the details)")
    return ExitCode.INTERNAL


def _usage_line(error: click.ClickException) -> str:
    """click's message, with the command whose help says more."""
    context = getattr(error, "ctx", None)
    if context is None:
        return error.format_message()
    file = _file_of(error)
    place = f"{file}: " if file else ""
    message = error.format_message()
    if isinstance(error, click.BadParameter):
        message = _range_line(error) or message
    elif isinstance(error, click.NoSuchOption):
        message = _unknown_line(error, context) or message
    return f"{place}{message} (see '{context.command_path} --help')"


def _file_of(error: click.ClickException) -> str:
    """The configuration file whose value the error is about: as wrong as a key of it would be. Empty if of none."""
    context = getattr(error, "ctx", None)
    if context is None or not isinstance(error, click.BadParameter) or error.param is None:
        return ""
    source = context.get_parameter_source(str(error.param.name))
    return str(context.meta[FILE_KEY]) if source is click.core.ParameterSource.DEFAULT_MAP else ""


def _unknown_line(error: click.NoSuchOption, context: click.Context) -> str:
    """Which option was meant, '' unless one alone begins as the unknown one does but for its last letter: click looks
    for the most similar ones, which of `--nprocs` are short ones."""
    stem = error.option_name[:-1]
    spelled = [[name for name in item.opts if name.startswith(stem)] for item in context.command.get_params(context)]
    meant = [names[0] for names in spelled if names and len(stem) >= LEAST_STEM]
    return f"No such option {error.option_name!r}. Did you mean {meant[0]!r}?" if len(meant) == 1 else ""


def _range_line(error: click.BadParameter) -> str:
    """What may stand there, '' if a range is not what the value offends: click says 'not a valid integer range'."""
    parameter = error.param
    wanted = None if parameter is None else parameter.type
    if not isinstance(wanted, (click.IntRange, click.FloatRange)):
        return ""
    value = _OFFENDER.match(error.message)
    if parameter is None or value is None:
        return ""
    name = parameter.opts[0] if isinstance(parameter, click.Option) else parameter.human_readable_name.strip("[].")
    number = "a whole number" if isinstance(wanted, click.IntRange) else "a number"
    return f"{name} is {value[1]}: use {number}{_bounds(wanted)}"


_OFFENDER = re.compile(r"(.+?) is not (?:in the range|a valid) ")
"""How click says which value it does not take."""


def _bounds(wanted: click.IntRange | click.FloatRange) -> str:
    least, most = wanted.min, wanted.max
    if least is None or most is None or wanted.min_open or wanted.max_open:
        above = "" if least is None else f" above {least:.12g}" if wanted.min_open else f" of {least:.12g} or more"
        return above + ("" if most is None else f" below {most:.12g}" if wanted.max_open else f" up to {most:.12g}")
    return f" from {least:.12g} to {most:.12g}"


def _say(message: str) -> None:
    """One line on stderr, prefixed like every message of the program."""
    line = " ".join(message.split())
    click.echo(f"nvrx-sre: {line}", err=True)


def _discard_stdout() -> None:
    """The reader of our output left: keep the interpreter's exit from failing on the same pipe again."""
    descriptor = os.open(os.devnull, os.O_WRONLY)
    os.dup2(descriptor, sys.stdout.fileno())
    os.close(descriptor)

"""`nvrx-sre launch`: a user's own script under the resilient launcher, with torchrun's flags.

The flags come from `torchrun_flags`; those of the run directory, checkpoints and faults from `run_options`.
Everything after the script's name belongs to the script. Must not import torch: the ranks do.
"""

from __future__ import annotations

import dataclasses
import os
import re
import shlex
from collections.abc import Callable
from pathlib import Path
from typing import Any

import click

from nvrx_sre.cli.devices import num_nvidia_devices
from nvrx_sre.cli.nodes import nodes_from, notices_for_one_node
from nvrx_sre.cli.run_options import DEFAULT_RUNS, RunOptions, build_run_config, run_options
from nvrx_sre.cli.running import check_fault_specs, run_and_report
from nvrx_sre.cli.torchrun_flags import TORCHRUN_FLAGS, TorchrunFlag, Treatment
from nvrx_sre.core.errors import UsageError, UserError
from nvrx_sre.core.ids import run_name_from
from nvrx_sre.core.limits import Limits
from nvrx_sre.telemetry.redact import Redactor

_SECTIONS = {
    None: "Options",
    Treatment.HONOURED: "Options",
    Treatment.MAPPED: "Flags of torchrun that are met another way",
    Treatment.REFUSED: "Flags of torchrun that are refused",
}
_UNDERSCORED = re.compile(r", --[a-z]*_[a-z_]*")
_TREATMENTS = {flag.parameter: flag.treatment for flag in TORCHRUN_FLAGS}


class SectionedCommand(click.Command):
    """Shows torchrun's flags by what becomes of them, each in its spelling with dashes (both are accepted)."""

    def format_options(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """Write the options as sections."""
        sections: dict[str, list[tuple[str, str]]] = {title: [] for title in _SECTIONS.values()}
        for parameter in self.get_params(ctx):
            record = parameter.get_help_record(ctx) if isinstance(parameter, click.Option) else None
            if record is not None:
                names = _UNDERSCORED.sub("", record[0])
                sections[_SECTIONS[_TREATMENTS.get(str(parameter.name))]].append((names, record[1]))
        for title, rows in sections.items():
            with formatter.section(title):
                formatter.write_dl(rows)


def _help_of(flag: TorchrunFlag) -> str:
    return f"{flag.note[0].upper()}{flag.note[1:]}."


def torchrun_options(function: Callable[..., Any]) -> Callable[..., Any]:
    """Decorator: add torchrun's flags; each arrives as text (None if not given) or bool."""
    for flag in reversed(TORCHRUN_FLAGS):
        if flag.takes_value:
            option = click.option(
                *flag.names, flag.parameter, envvar=flag.variable, metavar="VALUE", help=_help_of(flag)
            )
        else:
            option = click.option(*flag.names, flag.parameter, is_flag=True, envvar=flag.variable, help=_help_of(flag))
        function = option(function)
    return function


@click.command("launch", cls=SectionedCommand, context_settings={"allow_interspersed_args": False})
@torchrun_options
@click.option(
    "--token-file",
    type=click.Path(path_type=Path, dir_okay=False),
    default=None,
    help="Several nodes: secret that their launchers share, mode 0600.  [default: link.token in the run directory]",
)
@run_options
@click.argument("script")
@click.argument("script_args", nargs=-1, type=click.UNPROCESSED)
def command(
    options: RunOptions, token_file: Path | None, script: str, script_args: tuple[str, ...], **flags: Any
) -> int:
    """Run your own SCRIPT on the ranks, with torchrun's flags."""
    refuse(flags)
    nproc = num_ranks(flags["nproc_per_node"])
    options = dataclasses.replace(
        named(options, flags["rdzv_id"], script, is_module=flags["module"]),
        limits=mapped_limits(options.limits, flags["max_restarts"], flags["shutdown_timeout"]),
    )
    nodes = nodes_from(flags, token_file, options.run_dir)
    config = build_run_config(
        options,
        command=worker_command(script, script_args, is_module=flags["module"]),
        nproc=nproc,
        config_items={"script": script},
        nodes=nodes,
    )
    config = dataclasses.replace(config, reported_items=reported(script_args))
    check_fault_specs(options.fault_specs, config.world_size)
    return run_and_report(
        config, num_steps=None, notices=notices(flags) + (notices_for_one_node(flags) if nodes is None else [])
    )


def reported(script_args: tuple[str, ...]) -> dict[str, str]:
    """What a script is told, which is no part of the run's identity: more steps are the same run (docs/adr/0028).

    It may be shown, so secrets in it are masked.
    """
    return {"arguments": shlex.join(Redactor().argv(script_args))}


def refuse(flags: dict[str, Any]) -> None:
    """Raise `UsageError` for the first flag whose value asks for something that is not done here."""
    for flag in TORCHRUN_FLAGS:
        value = flags.get(flag.parameter)
        given = value is not None and value is not False
        if flag.treatment is Treatment.REFUSED and given and value not in flag.harmless:
            shown = f"{flag.option} {value}" if flag.takes_value else flag.option
            raise UsageError(f"{shown} is not supported: {flag.note}")


def notices(flags: dict[str, Any]) -> list[str]:
    """A line for every mapped flag that was given: an option that does something else says so."""
    return [
        f"{flag.option}: {flag.note}"
        for flag in TORCHRUN_FLAGS
        if flag.treatment is Treatment.MAPPED and flags.get(flag.parameter) not in (None, False)
    ]


def num_ranks(text: str | None) -> int:
    """torchrun's `--nproc-per-node`: a number, `cpu`, `gpu`, `auto`; 1 if not given."""
    if text is None:
        return 1
    num_gpus = num_nvidia_devices()
    if text == "gpu" and not num_gpus:
        raise UserError("--nproc-per-node gpu: this machine has no NVIDIA device; use a number, or cpu")
    if text in ("gpu", "cpu", "auto"):
        return num_gpus if num_gpus and text != "cpu" else os.cpu_count() or 1
    try:
        number = int(text)
    except ValueError:
        raise UsageError(f"--nproc-per-node {text!r} is neither a number nor cpu, gpu or auto") from None
    if number < 1:
        raise UsageError(f"--nproc-per-node is {number}: use 1 or more, or cpu, gpu, auto")
    return number


def mapped_limits(limits: Limits, max_restarts: str | None, shutdown_timeout: str | None) -> Limits:
    """Limits with what torchrun's flags say about restarts and shutdown."""
    if max_restarts is not None:
        attempts = _at_least_zero("--max-restarts", max_restarts, int) + 1
        caps = dataclasses.replace(
            limits.caps,
            same_fingerprint_attempts=attempts,
            consecutive_attempts=attempts,
            window_attempts=attempts,
            device_faults=max(attempts, limits.caps.device_faults),
        )
        limits = dataclasses.replace(limits, caps=caps)
    if shutdown_timeout is not None:
        teardown_s = _at_least_zero("--shutdown-timeout", shutdown_timeout, float)
        limits = dataclasses.replace(limits, deadlines=dataclasses.replace(limits.deadlines, teardown_s=teardown_s))
    return limits


def worker_command(script: str, script_args: tuple[str, ...], *, is_module: bool) -> tuple[str, ...]:
    """What a worker runs after the interpreter. Raises `UserError` for a script that is not there."""
    if is_module:
        return ("-m", script, *script_args)
    if not Path(script).is_file():
        raise UserError(f"there is no script {script}")
    return (script, *script_args)


def named(options: RunOptions, rdzv_id: str | None, script: str, *, is_module: bool) -> RunOptions:
    """Options with a run name of torchrun's run id, else of the script, where neither name nor directory is given."""
    if _is_given("name"):
        return options
    stem = script.rpartition(".")[2] if is_module else Path(script).stem
    if rdzv_id not in (None, "none"):
        options = dataclasses.replace(options, run=run_name_from(str(rdzv_id)))
    elif not _is_given("run_dir"):
        options = dataclasses.replace(options, run=run_name_from(stem))
    if _is_given("run_dir"):
        return options
    return dataclasses.replace(options, run_dir=(DEFAULT_RUNS / options.run).absolute())


def _is_given(parameter: str) -> bool:
    return click.get_current_context().get_parameter_source(parameter) is not click.core.ParameterSource.DEFAULT


def _at_least_zero(name: str, text: str, kind: type[int] | type[float]) -> Any:
    try:
        value = kind(text)
    except ValueError:
        raise UsageError(f"{name} {text!r} is not a number") from None
    if not 0 <= value < float("inf"):
        raise UsageError(f"{name} is {text}: use 0 or more")
    return value

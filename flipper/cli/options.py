"""Options that several commands share, each spelled once."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

import click

from flipper.cli.output import FORMATS

Command = TypeVar("Command", bound=Callable[..., Any])

SELECTION = ("layers", "exclude", "roles", "dtypes", "bits")
DRAWING = (
    "count", "ber", "fraction", "fit", "hours", "spread", "weights", "field_weights", "effect", "burst",
    "finite", "max_abs", "direction",
)  # fmt: skip
"""The parameters that the two stacks of options hand to a command: the fields of FaultModel."""

CHECKPOINT = click.Path(exists=True, readable=False, path_type=Path)
"""A path that must exist; that it can't be read is for flipper to say, with the exit code of such checkpoints."""
FILE = click.Path(path_type=Path)


def output_options(command: Command) -> Command:
    """--format and the common options: on every command that prints data."""
    style = click.Choice(FORMATS)
    return _stack(
        click.option("--format", "style", type=style, help="Default: table on a terminal, cut to fit, jsonl else."),
        common_options,
    )(command)


def common_options(command: Command) -> Command:
    """-q, -v, --traceback: on every command."""
    return _stack(
        click.option("-q", "--quiet", is_flag=True, help="Say nothing on stderr but errors."),
        click.option("-v", "--verbose", is_flag=True, help="Say more on stderr."),
        click.option("--traceback", is_flag=True, help="Show where an error came from."),
    )(command)


def seed_option(command: Command) -> Command:
    """--seed: on every command that draws."""
    seed = click.IntRange(0, 2**64 - 1)
    return click.option("--seed", type=seed, metavar="N", help="Seed of the draw; without it one is drawn, and said.")(
        command
    )


def selection_options(command: Command) -> Command:
    """Which bits: the population."""
    many: dict[str, Any] = {"multiple": True}
    return _stack(
        click.option(
            "--layer", "layers", metavar="PATTERN", help="A name, module prefix, glob or re:REGEX; repeatable.", **many
        ),
        click.option("--exclude", metavar="PATTERN", help="Taken away from the above; repeatable.", **many),
        click.option(
            "--role", "roles", metavar="ROLE", help="parameter, buffer, optimizer or other; repeatable.", **many
        ),
        click.option(
            "--dtype", "dtypes", metavar="NAME", help="Default: all float and complex ones; repeatable.", **many
        ),
        click.option("--bits", metavar="SPEC", help="any, sign, exponent[-msb], mantissa[-msb], 30, 23-30; commas."),
    )(command)


def drawing_options(command: Command) -> Command:
    """How many faults, where, what they do, and what they must not do."""
    return _stack(
        click.option("--count", type=click.IntRange(0), metavar="N", help="This many faults.  [default: 1]"),
        click.option("--ber", metavar="P", help="Each eligible bit with this probability."),
        click.option("--fraction", metavar="F", help="This part of the eligible elements, one bit in each."),
        click.option("--fit", metavar="F", help="Field rate in FIT per Mbit, with --hours."),
        click.option("--hours", metavar="H", help="Time of exposure to --fit."),
        click.option("--spread", metavar="HOW", help="uniform, per-layer, layer-uniform, tensor-uniform, weighted."),
        click.option(
            "--weight", "weights", metavar="PATTERN=W", multiple=True, help="With --spread weighted; repeatable."
        ),
        click.option("--field-weight", "field_weights", metavar="sign=1,...", help="Weights of the three fields."),
        click.option("--effect", metavar="E", help="flip, set0, set1, random, flip:0xMASK, scale:FACTOR."),
        click.option("--burst", type=click.IntRange(1, 64), metavar="L", help="L neighbouring bits as one fault."),
        click.option("--finite", is_flag=True, default=None, help="Only faults that leave a finite number."),
        click.option("--max-abs", metavar="X", help="Only faults that leave a magnitude of at most X."),
        click.option("--direction", type=click.Choice(["0to1", "1to0"]), help="Only bits that change this way."),
    )(command)


def fault_model(options: dict[str, Any]) -> Any:
    """The FaultModel that the options name; takes them out of `options`."""
    from flipper.faults.model import FaultModel, parse_weights

    given = {name: options.pop(name, None) for name in (*SELECTION, *DRAWING)}
    given["weights"] = parse_weights("--weight", given["weights"] or ()) or None
    if given["field_weights"] is not None:
        given["field_weights"] = parse_weights("--field-weight", given["field_weights"].split(","))
    return FaultModel(**{name: value for name, value in given.items() if value is not None})


def _stack(*options: Callable[[Command], Command]) -> Callable[[Command], Command]:
    def decorate(command: Command) -> Command:
        for option in reversed(options):
            command = option(command)
        return command

    return decorate

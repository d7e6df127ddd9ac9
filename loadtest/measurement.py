"""What measurements on a stack of their own have in common: arguments, and what is done with the figures."""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

from loadtest.machine import describe
from pdbus.model.default import default_checkpoint


def parser(name: str, description: str, rounds: int) -> argparse.ArgumentParser:
    """Of `python -m loadtest NAME`, with the arguments that all have."""
    made = argparse.ArgumentParser(prog=f"python -m loadtest {name}", description=description)
    made.add_argument("--rounds", type=int, default=rounds, help="each with a new stack (default: %(default)s)")
    made.add_argument("--model", type=Path, help="folder or GGUF file (default: the stack's default model)")
    made.add_argument("--up", nargs=argparse.REMAINDER, default=[], help="further arguments of `pdbus up`")
    made.add_argument("--json", type=Path, metavar="FILE", help="write all figures there")
    return made


def parsed(made: argparse.ArgumentParser, argv: list[str]) -> argparse.Namespace:
    """The arguments, with `model` resolved; everything that counts something has to be positive."""
    given = made.parse_args(argv)
    numbers = {name: value for name, value in vars(given).items() if type(value) in (int, float)}
    if wrong := [name for name, value in numbers.items() if value <= 0]:
        made.error(f"--{wrong[0].replace('_', '-')} must be positive")
    given.model = (given.model or default_checkpoint()).resolve()
    return given


def options(given: argparse.Namespace) -> tuple[str, ...]:
    """Of `pdbus up`."""
    return ("--model", str(given.model), *given.up)


def report(given: argparse.Namespace, text: str, found: dict[str, Any]) -> None:
    """Prints the words, and writes the figures where they are asked for, with the machine and the arguments."""
    machine = describe()
    print(text)
    print(f"measured at a load average of {machine['load_average']} on {machine['cores']} cores of {machine['cpu']}")
    if given.json:
        asked = {name: value for name, value in vars(given).items() if name not in ("json", "model")}
        given.json.write_text(json.dumps({"machine": machine, "asked": asked, **found}, indent=2) + "\n")

"""What the commands with a `--config` share: its flag, and how a wrong one ends."""

from __future__ import annotations

import sys
from typing import TypeVar

from absl import app, flags

Config = TypeVar("Config")


def parse_flags(argv: list[str]) -> list[str]:
    """What is left of the command line after the flags; exits with 2 where one is unknown."""
    try:
        left: list[str] = app.parse_flags_with_usage(argv)
    except KeyError as error:  # config_flags' word for a field that the config does not have
        print(f"error: {error.args[0]}; train/config.py lists the fields", file=sys.stderr)
        raise SystemExit(2) from None
    return left


def given_config(kind: type[Config]) -> Config:
    """The config that the flags give.

    Raises:
        ValueError: it is of another kind.
    """
    config = flags.FLAGS.config
    if not isinstance(config, kind):
        raise ValueError(f"--config gives a {type(config).__name__}, and this command needs a {kind.__name__}")
    return config

"""Checks of single config fields, and how messages name them."""

from __future__ import annotations

from typing import Any

_REASONS = {"quantization_config": "no quantization is supported"}


def check_int(name: str, value: Any, least: int) -> None:
    """Raises ValueError, naming the field, unless `value` is an integer of at least `least`."""
    if isinstance(value, bool) or not isinstance(value, int) or value < least:
        raise ValueError(f"{name} must be an integer of at least {least}, got {value!r}")


def check_positive(name: str, value: Any) -> None:
    """Raises ValueError, naming the field, unless `value` is a number above 0."""
    if isinstance(value, bool) or not isinstance(value, int | float) or not value > 0:
        raise ValueError(f"{name} must be a positive number, got {value!r}")


def check_bool(name: str, value: Any) -> None:
    """Raises ValueError, naming the field, unless `value` is true or false."""
    if not isinstance(value, bool):
        raise ValueError(f"{name} must be true or false, got {value!r}")


def described(name: str, value: Any) -> str:
    """A field that is not supported, as messages name it."""
    reason = f" ({_REASONS[name]})" if name in _REASONS else ""
    return f"{name}={value!r}{reason}"

"""Configs of how rotary wavelengths are stretched for long texts, read from Hugging Face `config.json`."""

from __future__ import annotations

import dataclasses
from typing import Any, ClassVar

from jetspec_jax.checks import check_bool, check_int, check_positive, described


@dataclasses.dataclass(frozen=True)
class YarnScaling:
    """YaRN: long rotary wavelengths are stretched by `factor`, short ones kept, and those between blended.

    A wavelength counts by how often it turns within `original_max_position_embeddings` tokens: `beta_fast` times or
    more is short, `beta_slow` or less is long; `truncate` rounds the two limits to whole features. Cosines and sines
    are scaled by `attention_factor`, when None by what `mscale`, `mscale_all_dim` and `factor` give.
    """

    rope_type: ClassVar[str] = "yarn"

    factor: float
    original_max_position_embeddings: int
    attention_factor: float | None = None
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    mscale: float | None = None
    mscale_all_dim: float | None = None
    truncate: bool = True

    def __post_init__(self) -> None:
        check_int("original_max_position_embeddings", self.original_max_position_embeddings, 1)
        for name in ("factor", "beta_fast", "beta_slow"):
            check_positive(name, getattr(self, name))
        for name in ("attention_factor", "mscale", "mscale_all_dim"):
            if getattr(self, name) is not None:
                check_positive(name, getattr(self, name))
        check_bool("truncate", self.truncate)


@dataclasses.dataclass(frozen=True)
class Llama3Scaling:
    """Llama 3.1's scaling: wavelengths over `original / low_freq_factor` tokens are stretched by `factor`.

    Those under `original / high_freq_factor` are kept, and those between blended.
    """

    rope_type: ClassVar[str] = "llama3"

    factor: float
    low_freq_factor: float
    high_freq_factor: float
    original_max_position_embeddings: int

    def __post_init__(self) -> None:
        check_int("original_max_position_embeddings", self.original_max_position_embeddings, 1)
        for name in ("factor", "low_freq_factor", "high_freq_factor"):
            check_positive(name, getattr(self, name))
        if not self.low_freq_factor < self.high_freq_factor:
            raise ValueError(
                f"high_freq_factor ({self.high_freq_factor}) must be above low_freq_factor ({self.low_freq_factor})"
            )


RopeScaling = YarnScaling | Llama3Scaling
_ROPE_SCALINGS: dict[str, type[RopeScaling]] = {kind.rope_type: kind for kind in (YarnScaling, Llama3Scaling)}


def read_rope(data: dict[str, Any]) -> tuple[dict[str, Any], list[str]]:
    """A copy with `rope_theta` and a `RopeScaling` (or None) in `rope_scaling`, and what of it is not supported.

    `rope_parameters` (transformers 5) holds the base too; before it, `rope_scaling` stood beside `rope_theta`.
    """
    data = dict(data)
    new, old = data.pop("rope_parameters", None), data.pop("rope_scaling", None)
    data["rope_scaling"] = None
    name = "rope_parameters" if new else "rope_scaling"
    given = new or old
    if new and old and new != old:
        return data, [described("rope_parameters", new), f"{described('rope_scaling', old)} beside it"]
    if given is not None and not isinstance(given, dict):
        return data, [described(name, given)]
    rest = {k: v for k, v in (given or {}).items() if v is not None}
    # Without one, the base is transformers' default for all of these architectures.
    base = [rest.pop("rope_theta", None), data.get("rope_theta"), 10_000.0]
    data["rope_theta"] = next(value for value in base if value is not None)
    legacy = rest.pop("type", "default")
    kind = rest.pop("rope_type", legacy)
    if rest.get("partial_rotary_factor") == 1:
        del rest["partial_rotary_factor"]
    if kind == "default" and not rest:
        return data, []
    scaling = _ROPE_SCALINGS.get(kind) if isinstance(kind, str) else None
    if scaling is None:
        return data, [f"{described(name, given)} (supported rope types: default, {', '.join(_ROPE_SCALINGS)})"]
    rest.setdefault("original_max_position_embeddings", data.get("max_position_embeddings"))
    fields = {f.name: f for f in dataclasses.fields(scaling)}
    missing = [n for n, f in fields.items() if f.default is dataclasses.MISSING and rest.get(n) is None]
    wrong = [f"lacks {n}" for n in missing] + [f"{n} is unknown" for n in rest if n not in fields]
    if wrong:
        return data, [f"{described(name, given)} ({', '.join(wrong)})"]
    try:
        data["rope_scaling"] = scaling(**rest)
    except ValueError as error:
        return data, [f"{described(name, given)} ({error})"]
    return data, []

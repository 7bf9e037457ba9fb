"""Architecture configs: frozen, hashable, read from and written as Hugging Face `config.json`."""

from __future__ import annotations

import dataclasses
from typing import Any, Self

# Fields of a Qwen3 config.json that change nothing in inference, so that reading past them is right.
_INERT = frozenset(
    [
        "_from_model_config",
        "_name_or_path",
        "architectures",
        "attention_dropout",
        "auto_map",
        "bos_token_id",
        "dtype",
        "eos_token_id",
        "initializer_range",
        "layer_types",
        "max_window_layers",
        "model_type",
        "output_router_logits",
        "pad_token_id",
        "router_aux_loss_coef",
        "sliding_window",
        "torch_dtype",
        "transformers_version",
        "unsloth_version",
        "use_cache",
    ]
)
# Fields that are understood at one setting only; any other is refused by name.
_FIXED: dict[str, tuple[Any, ...]] = {
    "attention_bias": (False, None),
    "hidden_act": ("silu",),
    "quantization_config": (None,),
    "rope_scaling": (None,),
    "use_sliding_window": (False, None),
}


@dataclasses.dataclass(frozen=True)
class DecoderConfig:
    """What the target and the draft head share: the shape of a Qwen3 decoder layer, and their number.

    Sizes are counts of features, heads or tokens; `rope_theta` is the base of the rotary wavelengths.
    """

    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_hidden_layers: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    rms_norm_eps: float = 1e-6
    rope_theta: float = 1e6
    max_position_embeddings: int = 32768

    def __post_init__(self) -> None:
        for name in (
            "vocab_size",
            "hidden_size",
            "intermediate_size",
            "num_hidden_layers",
            "num_attention_heads",
            "num_key_value_heads",
            "head_dim",
            "max_position_embeddings",
        ):
            check_int(name, getattr(self, name), 1)
        for name in ("rms_norm_eps", "rope_theta"):
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, int | float) or not value > 0:
                raise ValueError(f"{name} must be a positive number, got {value!r}")
        if self.num_attention_heads % self.num_key_value_heads:
            raise ValueError(
                f"num_attention_heads ({self.num_attention_heads}) must be a multiple of "
                f"num_key_value_heads ({self.num_key_value_heads})"
            )
        if self.head_dim % 2:
            raise ValueError(f"head_dim must be even for rotary embeddings, got {self.head_dim}")

    @classmethod
    def from_hf(cls, data: dict[str, Any]) -> Self:
        """The config that a Hugging Face `config.json` describes.

        Raises:
            ValueError: a field is missing, has a value that is not supported, or is unknown; all are named.
        """
        data = _with_rope_theta(data)
        fields = {f.name: f for f in dataclasses.fields(cls)}
        if data.get("head_dim") is None:
            data["head_dim"] = 128  # as in transformers' Qwen3Config
        missing = [n for n, f in fields.items() if f.default is dataclasses.MISSING and data.get(n) is None]
        refused = [
            f"{n}={v!r}"
            for n, v in data.items()
            if (n in _FIXED and v not in _FIXED[n])
            or (n not in fields and n not in _FIXED and n not in _INERT and v is not None)
        ]
        if any(kind != "full_attention" for kind in data.get("layer_types") or ()):
            refused.append(f"layer_types={data['layer_types']!r}")
        problems = []
        if missing:
            problems.append(f"missing fields: {', '.join(missing)}")
        if refused:
            problems.append(f"unsupported fields: {', '.join(refused)}")
        if problems:
            raise ValueError("; ".join(problems))
        return cls(**{n: _tuple(data[n]) for n in fields if data.get(n) is not None})

    def to_hf(self) -> dict[str, Any]:
        """The fields as they stand in a Hugging Face `config.json`, with what other loaders require."""
        return {
            "attention_bias": False,
            "attention_dropout": 0.0,
            "hidden_act": "silu",
            "model_type": "qwen3",
            "rope_scaling": None,
            "use_sliding_window": False,
            **dataclasses.asdict(self),
        }


@dataclasses.dataclass(frozen=True)
class TargetConfig(DecoderConfig):
    """A dense Qwen3 target. With `tie_word_embeddings` the lm_head is the embedding table."""

    tie_word_embeddings: bool = False

    @classmethod
    def from_hf(cls, data: dict[str, Any]) -> Self:
        """As `DecoderConfig.from_hf`; refuses architectures other than `Qwen3ForCausalLM`."""
        names = data.get("architectures") or ["(none)"]
        if names != ["Qwen3ForCausalLM"]:
            raise ValueError(f"architecture {', '.join(names)} is not supported; expected Qwen3ForCausalLM")
        return super().from_hf(data)

    def to_hf(self) -> dict[str, Any]:
        """As `DecoderConfig.to_hf`, for `Qwen3ForCausalLM`."""
        return {"architectures": ["Qwen3ForCausalLM"], **super().to_hf()}


@dataclasses.dataclass(frozen=True)
class HeadConfig(DecoderConfig):
    """A draft head (paper section 3; published as `DFlashDraftModel`).

    `block_size` slots: slot 0 holds the anchor, slot i predicts the token i places after it.
    `target_layer_ids` are 0-based; id j taps the output of target layer j. `causal_head` says whether slot i
    sees slots <= i (JetSpec) or all of its block (DFlash). `mixed_fill` is the share of training blocks whose
    first slots held true tokens (0 for published heads); `enable_thinking` is the chat template's mode the
    head was trained for, None when unknown.
    """

    block_size: int = dataclasses.field(kw_only=True)
    num_target_layers: int = dataclasses.field(kw_only=True)
    target_layer_ids: tuple[int, ...] = dataclasses.field(kw_only=True)
    mask_token_id: int = dataclasses.field(kw_only=True)
    causal_head: bool = dataclasses.field(kw_only=True)
    mixed_fill: float = dataclasses.field(kw_only=True, default=0.0)
    enable_thinking: bool | None = dataclasses.field(kw_only=True, default=None)

    _NESTED = ("target_layer_ids", "mask_token_id", "causal_head", "mixed_fill", "enable_thinking")

    def __post_init__(self) -> None:
        super().__post_init__()
        check_int("block_size", self.block_size, 2)
        check_int("num_target_layers", self.num_target_layers, 1)
        check_int("mask_token_id", self.mask_token_id, 0)
        if not isinstance(self.causal_head, bool):
            raise ValueError(f"causal_head must be true or false, got {self.causal_head!r}")
        if not isinstance(self.target_layer_ids, tuple) or not self.target_layer_ids:
            raise ValueError(f"target_layer_ids must list at least one target layer, got {self.target_layer_ids!r}")
        for layer in self.target_layer_ids:
            check_int("target_layer_ids", layer, 0)
        bad = [i for i in self.target_layer_ids if i >= self.num_target_layers]
        if bad:
            raise ValueError(f"target_layer_ids {bad} are outside the target's {self.num_target_layers} layers")
        if self.mask_token_id >= self.vocab_size:
            raise ValueError(f"mask_token_id {self.mask_token_id} is outside the vocabulary of {self.vocab_size}")

    @classmethod
    def from_hf(cls, data: dict[str, Any]) -> Self:
        """As `DecoderConfig.from_hf`; the layout keys of `dflash_config` are required and checked."""
        names = data.get("architectures") or ["(none)"]
        if names != ["DFlashDraftModel"]:
            raise ValueError(f"architecture {', '.join(names)} is not a draft head; expected DFlashDraftModel")
        nested = data.get("dflash_config") or {}
        unknown = sorted(set(nested) - set(cls._NESTED))
        if unknown:
            raise ValueError(f"unsupported fields in dflash_config: {', '.join(unknown)}")
        flat = {k: v for k, v in data.items() if k not in ("dflash_config", "tie_word_embeddings")}
        return super().from_hf({**flat, **nested})

    def to_hf(self) -> dict[str, Any]:
        """As `DecoderConfig.to_hf`, in the published layout of draft heads."""
        flat = super().to_hf()
        nested = {name: flat.pop(name) for name in self._NESTED}
        nested["target_layer_ids"] = list(self.target_layer_ids)
        return {
            "architectures": ["DFlashDraftModel"],
            **flat,
            "tie_word_embeddings": False,
            "dflash_config": {k: v for k, v in nested.items() if v is not None},
        }


def check_int(name: str, value: Any, least: int) -> None:
    """Raises ValueError, naming the field, unless `value` is an integer of at least `least`."""
    if isinstance(value, bool) or not isinstance(value, int) or value < least:
        raise ValueError(f"{name} must be an integer of at least {least}, got {value!r}")


def default_target_layer_ids(num_target_layers: int, num_taps: int) -> tuple[int, ...]:
    """The target layers tapped by default: evenly spaced from layer 1 to the third-last (reference code)."""
    if num_taps == 1:
        return (num_target_layers // 2,)
    step = (num_target_layers - 4) / (num_taps - 1)
    return tuple(round(1 + i * step) for i in range(num_taps))


def _with_rope_theta(data: dict[str, Any]) -> dict[str, Any]:
    """A copy with `rope_parameters` (transformers 5) folded into `rope_theta`; other rope kinds are refused."""
    data = dict(data)
    parameters = data.pop("rope_parameters", None)
    if parameters:
        if parameters.get("rope_type", "default") != "default":
            raise ValueError(f"unsupported fields: rope_parameters={parameters!r}")
        data["rope_theta"] = parameters.get("rope_theta", data.get("rope_theta"))
    return data


def _tuple(value: Any) -> Any:
    return tuple(value) if isinstance(value, list) else value

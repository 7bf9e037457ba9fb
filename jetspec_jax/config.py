"""Architecture configs: frozen, hashable, read from and written as Hugging Face `config.json`."""

from __future__ import annotations

import dataclasses
from typing import Any, Self

from jetspec_jax.checks import check_bool, check_int, check_positive, described
from jetspec_jax.rope_scaling import RopeScaling, YarnScaling, read_rope

# Fields of a config.json that change nothing in inference, so that reading past them is right.
_INERT = frozenset(
    [
        "_attn_implementation_autoset",
        "_from_model_config",
        "_name_or_path",
        "architectures",
        "attention_dropout",
        "auto_map",
        "bos_token_id",
        "dtype",
        "eos_token_id",
        "initializer_range",
        "is_llama_config",
        "layer_types",
        "max_window_layers",
        "model_type",
        "output_router_logits",
        "pad_token_id",
        "router_aux_loss_coef",
        "sliding_window",
        "torch_dtype",
        "transformers.js_config",
        "transformers_version",
        "unsloth_fixed",
        "unsloth_version",
        "use_cache",
    ]
)
# Fields that are understood at one setting only; any other is refused by name.
_FIXED: dict[str, tuple[Any, ...]] = {
    "attention_bias": (False, None),
    "hidden_act": ("silu",),
    "mlp_bias": (False, None),
    "partial_rotary_factor": (1, None),
    "pretraining_tp": (1, None),
    "qkv_bias": (False, None),
    "quantization_config": (None,),
    "rope_interleaved": (False, None),
    "shared_expert_intermediate_size": (0, None),
    "use_sliding_window": (False, None),
}

_QWEN3_MOE = "Qwen3MoeForCausalLM"
_LLAMA = "LlamaForCausalLM"
_MODEL_TYPES = {"Qwen3ForCausalLM": "qwen3", _QWEN3_MOE: "qwen3_moe", _LLAMA: "llama"}
_EXPERT_SIZES = ("num_experts", "num_experts_per_tok", "moe_intermediate_size")
_EXPERT_FIELDS = (*_EXPERT_SIZES, "norm_topk_prob", "decoder_sparse_step", "mlp_only_layers")


@dataclasses.dataclass(frozen=True)
class DecoderConfig:
    """What the target and the draft head share: the shape of a decoder layer, and their number.

    Sizes are counts of features, heads or tokens; `rope_theta` is the base of the rotary wavelengths, which
    `rope_scaling` stretches for long texts.
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
    rope_scaling: RopeScaling | None = None

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
            check_positive(name, getattr(self, name))
        if self.num_attention_heads % self.num_key_value_heads:
            raise ValueError(
                f"num_attention_heads ({self.num_attention_heads}) must be a multiple of "
                f"num_key_value_heads ({self.num_key_value_heads})"
            )
        if self.head_dim % 2:
            raise ValueError(f"head_dim must be even for rotary embeddings, got {self.head_dim}")

    @property
    def max_tokens(self) -> int:
        """The most tokens of a prompt and its answer: `max_position_embeddings`, or as far as YaRN stretches."""
        scaling = self.rope_scaling
        if not isinstance(scaling, YarnScaling):  # Llama 3's configs state the stretched length themselves
            return self.max_position_embeddings
        return max(self.max_position_embeddings, int(scaling.factor * scaling.original_max_position_embeddings))

    @property
    def has_attention_bias(self) -> bool:
        """Whether the projections to and from attention add a bias."""
        return False

    @property
    def has_qk_norm(self) -> bool:
        """Whether queries and keys are normalised per head."""
        return True

    @classmethod
    def from_hf(cls, data: dict[str, Any]) -> Self:
        """The config that a Hugging Face `config.json` describes.

        Raises:
            ValueError: a field is missing, has a value that is not supported, or is unknown; all are named.
        """
        return cls._read(data)

    @classmethod
    def _read(cls, data: dict[str, Any], required: tuple[str, ...] = (), absent: tuple[str, ...] = ()) -> Self:
        """As `from_hf`; fields of `required` have no defaults, and those of `absent` are unknown."""
        data, refused = read_rope(data)
        fixed = {**_FIXED, "use_qk_norm": (data.get("architecture") != _LLAMA, None)}
        fields = {f.name: f for f in dataclasses.fields(cls) if f.name not in absent}
        if data.get("head_dim") is None:
            data["head_dim"] = 128  # as in transformers' Qwen3Config
        needed = [n for n, f in fields.items() if f.default is dataclasses.MISSING or n in required]
        missing = [n for n in needed if data.get(n) is None]
        refused += [
            described(n, v)
            for n, v in data.items()
            if n not in fields
            and ((n in fixed and v not in fixed[n]) or (n not in fixed and n not in _INERT and v is not None))
        ]
        if any(kind != "full_attention" for kind in data.get("layer_types") or ()):
            refused.append(described("layer_types", data["layer_types"]))
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
        flat = dataclasses.asdict(self)
        if self.rope_scaling is not None:
            given = {k: v for k, v in flat["rope_scaling"].items() if v is not None}
            flat["rope_scaling"] = {"rope_type": self.rope_scaling.rope_type, **given}
        return {
            "attention_bias": False,
            "attention_dropout": 0.0,
            "hidden_act": "silu",
            "model_type": "qwen3",
            "use_sliding_window": False,
            **flat,
        }


@dataclasses.dataclass(frozen=True)
class TargetConfig(DecoderConfig):
    """A target: `architecture` is `Qwen3ForCausalLM`, `Qwen3MoeForCausalLM` or `LlamaForCausalLM` (no q/k norms).

    With `tie_word_embeddings` the lm_head is the embedding table. `attention_bias` is that of all four projections.

    Mixture of experts: in every `decoder_sparse_step`-th layer (counted from 1) that is not in `mlp_only_layers`
    (counted from 0), each token goes to `num_experts_per_tok` of `num_experts` MLPs of `moe_intermediate_size`
    features, weighted by the router's probabilities, which `norm_topk_prob` scales to a sum of 1.
    """

    tie_word_embeddings: bool = False
    attention_bias: bool = False
    architecture: str = "Qwen3ForCausalLM"
    num_experts: int = 0
    num_experts_per_tok: int = 0
    moe_intermediate_size: int = 0
    norm_topk_prob: bool = False
    decoder_sparse_step: int = 1
    mlp_only_layers: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.architecture not in _MODEL_TYPES:
            raise ValueError(
                f"architecture {self.architecture} is not supported; expected one of {', '.join(_MODEL_TYPES)}"
            )
        for name in ("tie_word_embeddings", "attention_bias", "norm_topk_prob"):
            check_bool(name, getattr(self, name))
        for name in _EXPERT_SIZES:
            check_int(name, getattr(self, name), 1 if self.architecture == _QWEN3_MOE else 0)
        check_int("decoder_sparse_step", self.decoder_sparse_step, 1)
        if not isinstance(self.mlp_only_layers, tuple):
            raise ValueError(f"mlp_only_layers must be a list of layers, got {self.mlp_only_layers!r}")
        for layer in self.mlp_only_layers:
            check_int("mlp_only_layers", layer, 0)
        if self.architecture != _QWEN3_MOE and self.num_experts:
            raise ValueError(f"num_experts={self.num_experts} is not a field of {self.architecture}")
        if self.num_experts_per_tok > self.num_experts:
            raise ValueError(
                f"num_experts_per_tok ({self.num_experts_per_tok}) is more than num_experts ({self.num_experts})"
            )

    @property
    def has_attention_bias(self) -> bool:
        """As `DecoderConfig.has_attention_bias`."""
        return self.attention_bias

    @property
    def has_qk_norm(self) -> bool:
        """As `DecoderConfig.has_qk_norm`."""
        return self.architecture != _LLAMA

    def is_sparse(self, layer: int) -> bool:
        """Whether the MLP of `layer`, counted from 0, is a mixture of experts."""
        return (
            self.num_experts > 0 and (layer + 1) % self.decoder_sparse_step == 0 and layer not in self.mlp_only_layers
        )

    @classmethod
    def from_hf(cls, data: dict[str, Any]) -> Self:
        """As `DecoderConfig.from_hf`; refuses other architectures by name."""
        names = data.get("architectures") or ["(none)"]
        if len(names) != 1 or names[0] not in _MODEL_TYPES:
            expected = ", ".join(_MODEL_TYPES)
            raise ValueError(f"architecture {', '.join(names)} is not supported; expected one of {expected}")
        data = {**data, "architecture": names[0]}
        if names[0] == "Qwen3ForCausalLM":
            return cls._read(data, absent=_EXPERT_FIELDS)
        heads, hidden = data.get("num_attention_heads"), data.get("hidden_size")
        if data.get("head_dim") is None and isinstance(heads, int) and isinstance(hidden, int) and heads > 0:
            data["head_dim"] = hidden // heads
        if names[0] == _QWEN3_MOE:
            renamed = data.get("num_local_experts")  # what transformers 5 writes
            if renamed is not None and data.get("num_experts") in (None, renamed):
                data["num_experts"] = data.pop("num_local_experts")
            return cls._read(data, required=_EXPERT_SIZES)
        if data.get("num_key_value_heads") is None:
            data["num_key_value_heads"] = heads
        return cls._read(data, absent=_EXPERT_FIELDS)

    def to_hf(self) -> dict[str, Any]:
        """As `DecoderConfig.to_hf`, for its architecture."""
        flat = super().to_hf()
        name = flat.pop("architecture")
        if name == _QWEN3_MOE:
            flat["mlp_only_layers"] = list(self.mlp_only_layers)
        else:
            flat = {k: v for k, v in flat.items() if k not in _EXPERT_FIELDS}
        if name == _LLAMA:
            del flat["use_sliding_window"]
            flat["mlp_bias"] = False
        return {**flat, "architectures": [name], "model_type": _MODEL_TYPES[name]}


@dataclasses.dataclass(frozen=True)
class HeadConfig(DecoderConfig):
    """A draft head (paper section 3; published as `DFlashDraftModel`).

    `block_size` slots: slot 0 holds the anchor, slot i predicts the token i places after it.
    `target_layer_ids` are 0-based; id j taps the output of target layer j. `causal_head` says whether slot i
    sees slots <= i (JetSpec) or all of its block (DFlash). `mixed_fill` is the share of training blocks whose
    first slots held true tokens (0 for published heads); `enable_thinking` is the chat template's mode the
    head was trained for, None when unknown. `parent_rank` is the rank of the term that a drafted token's parent
    adds to its logits (`jetspec_jax.path_tree`); 0, as in published heads, is no term.
    """

    block_size: int = dataclasses.field(kw_only=True)
    num_target_layers: int = dataclasses.field(kw_only=True)
    target_layer_ids: tuple[int, ...] = dataclasses.field(kw_only=True)
    mask_token_id: int = dataclasses.field(kw_only=True)
    causal_head: bool = dataclasses.field(kw_only=True)
    mixed_fill: float = dataclasses.field(kw_only=True, default=0.0)
    enable_thinking: bool | None = dataclasses.field(kw_only=True, default=None)
    parent_rank: int = dataclasses.field(kw_only=True, default=0)

    _NESTED = ("target_layer_ids", "mask_token_id", "causal_head", "mixed_fill", "enable_thinking", "parent_rank")

    def __post_init__(self) -> None:
        super().__post_init__()
        check_int("block_size", self.block_size, 2)
        check_int("num_target_layers", self.num_target_layers, 1)
        check_int("mask_token_id", self.mask_token_id, 0)
        check_bool("causal_head", self.causal_head)
        check_int("parent_rank", self.parent_rank, 0)
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
        """As `DecoderConfig.from_hf`; the layout keys of `dflash_config` are required and checked.

        `causal_head` may stand under vLLM's name, `causal`; where both stand, they must say the same. A head with
        neither, as DFlash's are published, is bidirectional.
        """
        names = data.get("architectures") or ["(none)"]
        if names != ["DFlashDraftModel"]:
            raise ValueError(f"architecture {', '.join(names)} is not a draft head; expected DFlashDraftModel")
        nested = dict(data.get("dflash_config") or {})
        mirror, own = nested.pop("causal", None), nested.pop("causal_head", None)
        if None not in (mirror, own) and mirror != own:
            raise ValueError(f"dflash_config says causal={mirror} and causal_head={own}")
        nested["causal_head"] = next((value for value in (own, mirror) if value is not None), False)
        unknown = sorted(set(nested) - set(cls._NESTED))
        if unknown:
            raise ValueError(f"unsupported fields in dflash_config: {', '.join(unknown)}")
        flat = {k: v for k, v in data.items() if k not in ("dflash_config", "tie_word_embeddings")}
        return super().from_hf({**flat, **nested})

    def to_hf(self) -> dict[str, Any]:
        """As `DecoderConfig.to_hf`, in the published layout of draft heads, with `causal` for vLLM."""
        flat = super().to_hf()
        nested = {name: flat.pop(name) for name in self._NESTED}
        nested["target_layer_ids"] = list(self.target_layer_ids)
        nested["causal"] = self.causal_head
        nested["parent_rank"] = self.parent_rank or None  # a head without the term is written as published ones are
        return {
            "architectures": ["DFlashDraftModel"],
            **flat,
            "tie_word_embeddings": False,
            "dflash_config": {k: v for k, v in nested.items() if v is not None},
        }


def default_target_layer_ids(num_target_layers: int, num_taps: int) -> tuple[int, ...]:
    """The target layers tapped by default: evenly spaced from layer 1 to the third-last (reference code)."""
    if num_taps == 1:
        return (num_target_layers // 2,)
    step = (num_target_layers - 4) / (num_taps - 1)
    return tuple(round(1 + i * step) for i in range(num_taps))


def _tuple(value: Any) -> Any:
    return tuple(value) if isinstance(value, list) else value

"""The step of `train.step` as one would plainly write it in PyTorch, for `train.bench_torch` to compare with.

Scaled dot-product attention, autograd, torch.optim. It shares no code with the JAX step but the data and the configs.

Axis letters: B rows, L row length, A anchors of a row, S slots of a block, H query heads, K kv heads, D head_dim,
E features, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import torch
from torch.nn import functional as F

from jetspec_jax.config import DecoderConfig, HeadConfig, TargetConfig
from train.config import OptimizerConfig
from train.data import Packed
from train.objective import Blocks

Weights = Mapping[str, torch.Tensor]
Rope = tuple[torch.Tensor, torch.Tensor]


class PlainStep:
    """A target and a head with the given weights, and the head's optimizer. Calling it takes one step.

    Args:
        target, head: weights by Hugging Face name, float32.
        rates: the learning rates of a step, counted from 0: AdamW's, and Muon's.
    """

    def __init__(
        self,
        target: Mapping[str, np.ndarray],
        target_config: TargetConfig,
        head: Mapping[str, np.ndarray],
        head_config: HeadConfig,
        optimizer: OptimizerConfig,
        rates: Callable[[int], tuple[float, float]],
    ):
        # Copies: torch updates in place.
        self._target = {name: torch.tensor(np.array(value)) for name, value in target.items()}
        self._head = {name: torch.tensor(np.array(value)).requires_grad_() for name, value in head.items()}
        self._target_config, self._config = target_config, head_config
        self._rates, self._clip, self._taken = rates, optimizer.clip_norm, 0
        by_muon = [
            name for name, value in self._head.items()
            if optimizer.matrix_learning_rate and name.startswith("layers.") and value.ndim == 2
        ]  # fmt: skip
        rest = [value for name, value in self._head.items() if name not in by_muon]
        decay = optimizer.weight_decay
        self._optimizers: list[torch.optim.Optimizer] = [torch.optim.AdamW(rest, betas=(0.9, 0.95), weight_decay=decay)]
        if by_muon:
            self._optimizers.append(torch.optim.Muon([self._head[name] for name in by_muon], weight_decay=decay))

    def __call__(self, batch: Packed, blocks: Blocks) -> tuple[float, np.ndarray]:
        """The loss of one step, and how many guesses `[S - 1]` of MASK slots of unfilled blocks are the target's."""
        loss, agreeing = self._loss(_tensors(batch), _tensors(blocks))
        loss.backward()
        torch.nn.utils.clip_grad_norm_(self._head.values(), self._clip)
        for optimizer, rate in zip(self._optimizers, self._rates(self._taken), strict=False):
            for group in optimizer.param_groups:
                group["lr"] = rate
            optimizer.step()
            optimizer.zero_grad()
        self._taken += 1
        return loss.item(), agreeing.numpy()

    def _loss(self, batch: Packed, blocks: Blocks) -> tuple[torch.Tensor, torch.Tensor]:
        """The mean forward KL of the supervised slots, gamma 0 and temperature 1."""
        words = self._target["lm_head.weight" if "lm_head.weight" in self._target else "model.embed_tokens.weight"]
        with torch.no_grad():
            hidden, taps = self._target_forward(batch)
        drafted = self._draft(batch, taps, blocks)
        source, supervised = _supervision(batch, blocks, self._config.block_size)
        row = torch.arange(len(source))[:, None, None].expand_as(source)
        with torch.no_grad():
            taught = hidden[row[supervised], source[supervised]] @ words.T
        logits = drafted[supervised] @ words.T
        if self._config.parent_rank:
            parents = batch.tokens[row[supervised], source[supervised]]
            logits = logits + self._head["parent.embed.weight"][parents] @ self._head["parent.unembed.weight"].T
        divergence = F.kl_div(logits.log_softmax(-1), taught.log_softmax(-1), reduction="sum", log_target=True)
        right = torch.zeros(supervised.shape, dtype=torch.bool)
        right[supervised] = logits.argmax(-1) == taught.argmax(-1)
        agreeing = (right & (blocks.filled == 0)[..., None]).sum((0, 1))[1:]
        return divergence / supervised.sum(), agreeing

    def _target_forward(self, batch: Packed) -> tuple[torch.Tensor, torch.Tensor]:
        """Final hidden states `[B, L, E]` and the taps side by side."""
        config, length = self._target_config, batch.tokens.shape[1]
        rope = _rope(batch.positions, config)
        one_document = bool(batch.documents.max() == 1)  # then padding comes last, where no document token sees it
        causal = torch.ones(length, length, dtype=torch.bool).tril()
        mask = None if one_document else (batch.documents[:, :, None] == batch.documents[:, None]) & causal
        x, taps = self._target["model.embed_tokens.weight"][batch.tokens], {}
        for index in range(config.num_hidden_layers):
            name = f"model.layers.{index}."
            normed = _rms_norm(x, self._target[name + "input_layernorm.weight"], config)
            query = _query(self._target, name, normed, rope, config)
            key, value = _key_value(self._target, name, normed, rope, config)
            attended = F.scaled_dot_product_attention(
                query, key, value, None if mask is None else mask[:, None], is_causal=mask is None, enable_gqa=True
            )
            x = _rest_of_layer(self._target, name, x, attended, config)
            taps[index] = x
        hidden = _rms_norm(x, self._target["model.norm.weight"], config)
        return hidden, torch.cat([taps[index] for index in self._config.target_layer_ids], -1)

    def _draft(self, batch: Packed, taps: torch.Tensor, blocks: Blocks) -> torch.Tensor:
        """The head's final hidden states `[B, A, S, E]`: all blocks of a row side by side behind its context."""
        config, (rows, length) = self._config, batch.tokens.shape
        count, size = blocks.anchors.shape[1], config.block_size
        slots = torch.arange(size)
        index = (blocks.anchors[..., None] + slots).clamp(max=length - 1).reshape(rows, -1)
        shown = (slots <= blocks.filled[..., None]).reshape(rows, -1)
        tokens = torch.where(shown, batch.tokens.gather(1, index), config.mask_token_id)
        starts = batch.positions.gather(1, blocks.anchors)
        rope = _rope((starts[..., None] + slots).reshape(rows, -1), config)
        documents = batch.documents.gather(1, blocks.anchors)
        seen = (torch.arange(length) < blocks.anchors[..., None]) & (batch.documents[:, None] == documents[..., None])
        seen = seen.repeat_interleave(size, dim=1)
        within = torch.ones(size, size, dtype=torch.bool)
        within = torch.block_diag(*[within.tril() if config.causal_head else within] * count).bool()
        mask = torch.cat([seen, within.expand(rows, -1, -1)], -1)[:, None]
        features = _rms_norm(taps @ self._head["fc.weight"].T, self._head["hidden_norm.weight"], config)
        of_row = _rope(batch.positions, config)
        x = self._target["model.embed_tokens.weight"][tokens]
        for layer in range(config.num_hidden_layers):
            name = f"layers.{layer}."
            normed = _rms_norm(x, self._head[name + "input_layernorm.weight"], config)
            query = _query(self._head, name, normed, rope, config)
            context = _key_value(self._head, name, features, of_row, config)
            own = _key_value(self._head, name, normed, rope, config)
            key, value = (torch.cat(pair, dim=2) for pair in zip(context, own, strict=True))
            attended = F.scaled_dot_product_attention(query, key, value, mask, enable_gqa=True)
            x = _rest_of_layer(self._head, name, x, attended, config)
        return _rms_norm(x, self._head["norm.weight"], config).reshape(rows, count, size, -1)


def _tensors(arrays: Any) -> Any:
    """Batches and blocks as tensors, integers as int64, which torch indexes with."""
    return type(arrays)(*(torch.from_numpy(np.asarray(x, x.dtype if x.dtype == bool else np.int64)) for x in arrays))


def _supervision(batch: Packed, blocks: Blocks, size: int) -> tuple[torch.Tensor, torch.Tensor]:
    """The place `[B, A, S]` of each slot's teacher, and whether the slot has a loss (as `train.objective`)."""
    rows, length = batch.tokens.shape
    slots, filled = torch.arange(size), blocks.filled[..., None]
    source = blocks.anchors[..., None] + torch.where(slots <= filled, slots, slots - 1)
    following = (source + 1).clamp(max=length - 1).reshape(rows, -1)
    documents = batch.documents.gather(1, blocks.anchors)[..., None]
    inside = (source + 1 < length) & (batch.documents.gather(1, following).reshape(source.shape) == documents)
    inside &= batch.response.gather(1, following).reshape(source.shape)
    inside = inside.cumprod(-1).bool()
    return source.clamp(0, length - 1), inside & blocks.live[..., None] & ((slots > 0) | (filled > 0))


def _rms_norm(x: torch.Tensor, weight: torch.Tensor, config: DecoderConfig) -> torch.Tensor:
    return F.rms_norm(x, (x.shape[-1],), weight, config.rms_norm_eps)


def _rope(positions: torch.Tensor, config: DecoderConfig) -> Rope:
    """Cosines and sines `[B, 1, N, D]`."""
    frequencies = config.rope_theta ** (-torch.arange(0, config.head_dim, 2) / config.head_dim)
    angles = (positions[:, None, :, None] * frequencies).repeat(1, 1, 1, 2)
    return angles.cos(), angles.sin()


def _rotate(x: torch.Tensor, rope: Rope) -> torch.Tensor:
    first, second = x.chunk(2, dim=-1)
    return x * rope[0] + torch.cat([-second, first], -1) * rope[1]


def _heads(x: torch.Tensor, weight: torch.Tensor, config: DecoderConfig) -> torch.Tensor:
    """`x @ weight.T` apart by heads, `[B, heads, N, D]`."""
    return (x @ weight.T).unflatten(-1, (-1, config.head_dim)).transpose(1, 2)


def _query(weights: Weights, name: str, x: torch.Tensor, rope: Rope, config: DecoderConfig) -> torch.Tensor:
    query = _heads(x, weights[name + "self_attn.q_proj.weight"], config)
    return _rotate(_rms_norm(query, weights[name + "self_attn.q_norm.weight"], config), rope)


def _key_value(
    weights: Weights, name: str, x: torch.Tensor, rope: Rope, config: DecoderConfig
) -> tuple[torch.Tensor, torch.Tensor]:
    key = _heads(x, weights[name + "self_attn.k_proj.weight"], config)
    key = _rotate(_rms_norm(key, weights[name + "self_attn.k_norm.weight"], config), rope)
    return key, _heads(x, weights[name + "self_attn.v_proj.weight"], config)


def _rest_of_layer(
    weights: Weights, name: str, x: torch.Tensor, attended: torch.Tensor, config: DecoderConfig
) -> torch.Tensor:
    """The residual stream after a layer's attention `[B, H, N, D]` and its MLP."""
    x = x + attended.transpose(1, 2).flatten(2) @ weights[name + "self_attn.o_proj.weight"].T
    normed = _rms_norm(x, weights[name + "post_attention_layernorm.weight"], config)
    gate, up = (normed @ weights[f"{name}mlp.{part}_proj.weight"].T for part in ("gate", "up"))
    return x + (F.silu(gate) * up) @ weights[name + "mlp.down_proj.weight"].T

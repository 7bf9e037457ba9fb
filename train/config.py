"""Typed training configs. Files in `configs/` state what differs; `--config.field=value` overrides one field.

Annotations are not postponed here, since config_flags reads the fields' types from them.
"""

import dataclasses
import operator


@dataclasses.dataclass
class OptimizerConfig:
    """Muon for the layers' matrices, Adam with Nesterov momentum and weight decay for everything else.

    Linear warmup over `warmup_steps`, then cosine to `final_scale` of the peak.

    `learning_rate` is Adam's, `matrix_learning_rate` Muon's; with `matrix_learning_rate` 0 plain AdamW does all.
    """

    learning_rate: float = 3e-4
    matrix_learning_rate: float = 0.0
    weight_decay: float = 0.0
    warmup_steps: int = 50
    final_scale: float = 0.0
    clip_norm: float = 1.0


@dataclasses.dataclass
class PretrainConfig:
    """Pretraining of a small target on generated problems.

    `length` tokens a packed row, `batch_size` rows a step; `prompt_weight` is the loss weight of tokens outside
    answers (answers have 1). `out` receives the checkpoint and the log. `documents` distinct problems are used.
    """

    out: str = "runs/target"
    seed: int = 0
    steps: int = 1000
    batch_size: int = 32
    length: int = 256
    documents: int = 200_000
    prompt_weight: float = 0.1
    log_every: int = 50
    vocab_size: int = 1024
    hidden_size: int = 192
    intermediate_size: int = 512
    num_hidden_layers: int = 4
    num_attention_heads: int = 6
    num_key_value_heads: int = 2
    head_dim: int = 32
    max_position_embeddings: int = 2048
    rope_theta: float = 10_000.0
    optimizer: OptimizerConfig = dataclasses.field(default_factory=OptimizerConfig)


@dataclasses.dataclass
class DistillConfig:
    """Distillation of a draft head (paper section 3; docs/design.md).

    `target` is a checkpoint directory, `data` a directory of train.regenerate, or another source that
    `train.sources.open_documents` reads. Each row of `length` tokens gives `anchors` blocks of `block_size`. A row
    holds several documents with `packed`, else one (see docs/data.md).
    `mixed_fill` is the share of blocks whose first slots hold true tokens; `gamma` the loss decay over slots
    (0: none); `loss` is a name of train.losses and `temperature` that of both distributions. `logit_chunk` slots of
    each row have their logits in memory at once (0: by the vocabulary's size). `target_layer_ids` empty means the
    default spacing; `mask_token_id` -1 the tokenizer's, or else the first embedding that no token has. `parent_rank` is
    the rank of the term that a token's parent adds to its logits (0: none).
    `init_head` is a draft head's directory or hub id to start from; its layers, taps, block size and causality then
    count, not those given here. `train_only` names the part of it that is trained, such as "parent", the rest being
    frozen; empty is all of it.
    `mesh` splits target, head and batch over devices ("data=2,fsdp=4"; empty: one device). The target is held in
    `target_dtype`; the head has float32 weights and computes in `compute_dtype`. A step takes its batch in
    `micro_batches` equal parts, one after another.
    Every `log_every` steps metrics are written, every `save_every` a checkpoint, of which the newest `keep_last` stay.
    Every `eval_every` steps (0: never) the head drafts for the first `eval_count` prompts of `eval_prompts` (as for
    train.regenerate's --prompts), `eval_batch_size` at a time and up to `eval_max_new_tokens` each: as a chain and in
    trees of each of `eval_budgets` nodes.
    """

    target: str = ""
    data: str = ""
    out: str = "runs/head"
    seed: int = 0
    steps: int = 1000
    batch_size: int = 16
    length: int = 256
    packed: bool = True
    anchors: int = 8
    block_size: int = 16
    num_hidden_layers: int = 2
    target_layer_ids: tuple[int, ...] = ()
    mask_token_id: int = -1
    causal_head: bool = True
    mixed_fill: float = 0.0
    parent_rank: int = 0
    init_head: str = ""
    train_only: str = ""
    gamma: float = 0.0
    loss: str = "forward_kl"
    temperature: float = 1.0
    logit_chunk: int = 0
    mesh: str = ""
    micro_batches: int = 1
    target_dtype: str = "float32"
    compute_dtype: str = "float32"
    log_every: int = 50
    save_every: int = 500
    keep_last: int = 2
    eval_every: int = 0
    eval_prompts: str = ""
    eval_count: int = 20
    eval_batch_size: int = 4
    eval_budgets: tuple[int, ...] = (16, 64, 256)
    eval_max_new_tokens: int = 256
    optimizer: OptimizerConfig = dataclasses.field(default_factory=OptimizerConfig)


def check_positive(config: object, *names: str) -> None:
    """Raises ValueError naming the first of the fields, such as "steps" or "optimizer.clip_norm", not above 0."""
    for name in names:
        if not (value := operator.attrgetter(name)(config)) > 0:
            raise ValueError(f"--config.{name} must be above 0, got {value}")


def check_from(config: object, least: float, *names: str) -> None:
    """Raises ValueError naming the first of the fields, as for `check_positive`, that is below `least`."""
    for name in names:
        if not (value := operator.attrgetter(name)(config)) >= least:
            raise ValueError(f"--config.{name} must be at least {least}, got {value}")


def check_fill(mixed_fill: float, causal: bool) -> None:
    """Raises ValueError when blocks of a bidirectional head are to hold true tokens."""
    if mixed_fill and not causal:
        raise ValueError(
            "--config.mixed_fill needs a causal head: a bidirectional one sees, in the next filled slot, the token "
            "that a filled slot learns; set --config.mixed_fill=0"
        )

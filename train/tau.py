"""What a head is trained for: its accepted length in real speculative decoding of held-out prompts."""

from __future__ import annotations

import dataclasses

import jax

import jetspec_jax
from jetspec_jax.engine import check_prompt, prompt_ids
from jetspec_jax.head import DraftHead
from jetspec_jax.models import Target
from jetspec_jax.sharding import batch_ways
from train.config import DistillConfig, check_positive
from train.prompts import Prompt, read_prompts

CHAIN = "chain"


@dataclasses.dataclass(frozen=True)
class HeldOut:
    """Prompts as the target reads them, and how they are answered; see `DistillConfig`."""

    prompts: tuple[str, ...]
    budgets: tuple[int, ...]
    batch_size: int
    max_new_tokens: int

    def tau(self, target: Target, head: DraftHead) -> dict[str, float]:
        """Tokens committed per target forward, greedily, over all prompts: as a chain, and for each budget.

        The head computes in the target's dtype, as when it is loaded. Equal shapes compile once in a process.
        """
        dtype = target.model.model.norm.weight[...].dtype
        head = jax.tree.map(lambda x: x.astype(dtype), head)
        ways = {CHAIN: ("chain", head.depth), **{str(budget): ("jetspec", budget) for budget in self.budgets}}
        return {name: self._tau(target, head, method, budget) for name, (method, budget) in ways.items()}

    def _tau(self, target: Target, head: DraftHead, method: str, budget: int) -> float:
        results = jetspec_jax.generate(
            target,
            head,
            self.prompts,
            method=method,
            budget=budget,
            max_new_tokens=self.max_new_tokens,
            batch_size=self.batch_size,
        )
        return sum(sum(result.accepted_lengths) for result in results) / max(sum(r.rounds for r in results), 1)


def held_out_prompts(config: DistillConfig) -> list[Prompt]:
    """The prompts that `config` evaluates with, none when it never does; all is checked that needs no target.

    Raises:
        ValueError: a field is out of range, or the prompts cannot be read.
    """
    if not config.eval_every:
        return []
    check_positive(config, "eval_every", "eval_count", "eval_batch_size", "eval_max_new_tokens")
    if jax.process_count() > 1:
        raise ValueError(
            "--config.eval_every decodes in one process, and there are several: set it to 0 and measure tau of the "
            "run's directory with infer.generate"
        )
    if any(not isinstance(budget, int) or budget < 1 for budget in config.eval_budgets):
        raise ValueError(f"--config.eval_budgets must be whole numbers above 0, got {config.eval_budgets}")
    return read_prompts(config.eval_prompts)[0][: config.eval_count]


def held_out(
    config: DistillConfig, asked: list[Prompt], target: Target, enable_thinking: bool | None
) -> HeldOut | None:
    """What `config` evaluates with; None when it never does.

    Args:
        asked: see `held_out_prompts`.

    Raises:
        ValueError: the target cannot answer a prompt.
    """
    if not config.eval_every:
        return None
    prompts: list[str] = []
    for prompt in asked:
        text = jetspec_jax.chat_prompt(target, prompt, enable_thinking=enable_thinking)
        where = f"{config.eval_prompts}: prompt {len(prompts) + 1}"
        check_prompt(prompt_ids(target, text), target, config.eval_max_new_tokens, where)
        prompts.append(text)
    ways = batch_ways(target.mesh)
    size = -(-config.eval_batch_size // ways) * ways
    return HeldOut(tuple(prompts), tuple(config.eval_budgets), size, config.eval_max_new_tokens)


def deciding(taus: dict[str, float]) -> float:
    """The tau that makes a checkpoint the best: that of the last budget, or of the chain where there is none."""
    return list(taus.values())[-1]

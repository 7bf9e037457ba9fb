"""Messages to prompts, by the chat template of the target's tokenizer."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from jinja2 import TemplateError

from jetspec_jax.models import Target

Message = Mapping[str, str]
ROLES = ("system", "user", "assistant")


def chat_prompt(
    target: Target,
    prompt: str | Sequence[Message],
    *,
    system: str | None = None,
    enable_thinking: bool | None = None,
) -> str:
    """A conversation in the tokenizer's chat template, ready for the assistant's answer.

    Args:
        target: whose tokenizer it is. Without a chat template a text comes out as it is.
        prompt: a user's message, or messages `{"role", "content"}` (see `check_messages`).
        system: the content of a system message put before the others.
        enable_thinking: passed to the template; None leaves it to the template's default.

    Raises:
        ValueError: there is no tokenizer, the template does not know what is asked of it, or messages are wrong.
    """
    if target.tokenizer is None:
        raise ValueError(f"{target.path} has no tokenizer, so that prompts must be token ids (--prompt-ids 1,2,3)")
    template = _template(target)
    if template is None:
        asked = {"messages": None if isinstance(prompt, str) else prompt, "system": system}
        for name, value in {**asked, "enable_thinking": enable_thinking}.items():
            if value is not None:
                raise ValueError(f"{target.path} has no chat template, which {name} needs; give plain text alone")
        return str(prompt)
    if isinstance(prompt, str):
        messages = [{"role": "user", "content": prompt}]
    else:
        check_messages(list(prompt))
        messages = [dict(message) for message in prompt]
    if system is not None:
        if messages[0]["role"] == "system":
            raise ValueError("the messages have a system message of their own; give it there or as system, not both")
        messages.insert(0, {"role": "system", "content": system})
    options: dict[str, Any] = {} if enable_thinking is None else {"enable_thinking": enable_thinking}
    if options and "enable_thinking" not in template:
        raise ValueError(
            f"the chat template of {target.path} has no enable_thinking; leave --thinking/--no-thinking out"
        )
    try:
        return str(
            target.tokenizer.apply_chat_template(messages, add_generation_prompt=True, tokenize=False, **options)
        )
    except TemplateError as error:
        raise ValueError(f"the chat template of {target.path} refuses the messages: {error}") from None


def check_messages(messages: object) -> None:
    """Raises ValueError unless `messages` are `{"role", "content"}` with texts, the last of them the user's.

    Roles are system (first only), user and assistant.
    """
    if not isinstance(messages, list) or not messages:
        raise ValueError("messages must be a list of at least one message")
    for index, message in enumerate(messages):
        if not isinstance(message, Mapping) or set(message) != {"role", "content"}:
            raise ValueError(f'message {index} must be {{"role": ..., "content": ...}} and nothing else')
        role, content = message["role"], message["content"]
        if role not in ROLES:
            raise ValueError(f"message {index} has role {role!r}, expected one of {', '.join(ROLES)}")
        if not isinstance(content, str):
            raise ValueError(f"message {index} has content of type {type(content).__name__}, expected a text")
        if role == "system" and index:
            raise ValueError(f"message {index} is a system message, which must be the first")
    if messages[-1]["role"] != "user":
        raise ValueError(f"the last message is the {messages[-1]['role']}'s; it must be the user's, to be answered")
    if not messages[-1]["content"].strip():
        raise ValueError("the last message is empty; it needs some text")


def thinking_mode(target: Target, enable_thinking: bool | None) -> bool | None:
    """The mode that prompts of `chat_prompt` are in: as asked, else the template's default; None if it has no modes."""
    if enable_thinking is not None or "enable_thinking" not in (_template(target) or ""):
        return enable_thinking
    plain = chat_prompt(target, "x")
    return next((mode for mode in (True, False) if chat_prompt(target, "x", enable_thinking=mode) == plain), None)


def _template(target: Target) -> str | None:
    """The chat template; of several by name, the one that is the default."""
    template = None if target.tokenizer is None else target.tokenizer.chat_template
    if not template:
        return None
    assert target.tokenizer is not None
    return str(target.tokenizer.get_chat_template()) if isinstance(template, dict) else str(template)

"""Messages to prompts, by the chat template of the target's tokenizer."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from jinja2 import TemplateError

from jetspec_jax.models import Target
from jetspec_jax.text import check_text

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
    template = _need_template(target, None if isinstance(prompt, str) else prompt, system, enable_thinking)
    if template is None:
        return str(prompt)
    if isinstance(prompt, str):
        prompt = [{"role": "user", "content": prompt}]
    else:
        check_messages(list(prompt))
    return _render(target, _with_system(prompt, system), enable_thinking, add_generation_prompt=True)


def chat_answers(
    target: Target,
    messages: Sequence[Message],
    *,
    system: str | None = None,
    enable_thinking: bool | None = None,
) -> tuple[str, list[tuple[int, int]]]:
    """A conversation in the tokenizer's chat template, and where in it the assistant's answers are.

    An answer begins where the prompt for it ends (see `chat_prompt`) and includes the token that ends the turn, as
    the target would have generated it. A template may write earlier answers as in another mode (Qwen3 drops thoughts
    from the history); then the prompt of that mode counts.

    Args:
        messages: `{"role", "content"}`, the last of them the assistant's (see `check_messages`). Without a chat
            template they must be one message and its answer, which are put side by side.
        target, system, enable_thinking: as for `chat_prompt`.

    Returns:
        The text up to the end of the last answer, and each answer's first character and the one behind its last.

    Raises:
        ValueError: as for `chat_prompt`, or the template does not let one tell where answers begin and end.
    """
    messages = list(messages)
    check_messages(messages, last="assistant")
    single = [message["role"] for message in messages] == ["user", "assistant"]
    template = _need_template(target, None if single else messages, system, enable_thinking)
    assert target.tokenizer is not None
    ends = target.tokenizer.convert_ids_to_tokens(list(target.eos_token_ids))
    if template is None:
        prompt, answer = (message["content"] for message in messages)
        text = prompt + answer + (ends[0] if ends else "")
        return text, [(len(prompt), len(text))]
    messages = _with_system(messages, system)
    text = _render(target, messages, enable_thinking, add_generation_prompt=False)
    spans: list[tuple[int, int]] = []
    for index, message in enumerate(messages):
        if message["role"] != "assistant":
            continue
        prompts = (
            _render(target, messages[:index], mode, add_generation_prompt=True) for mode in (enable_thinking, None)
        )
        start = next((len(prompt) for prompt in prompts if text.startswith(prompt)), None)
        if start is None:
            raise ValueError(
                f"the chat template of {target.path} writes answer {len(spans) + 1} unlike the prompt for it, so that "
                "one cannot tell where it begins"
            )
        stops = [at + len(end) for end in ends if end and (at := text.find(end, start)) >= 0]
        if not stops:
            raise ValueError(
                f"the chat template of {target.path} ends an assistant's turn with none of the end-of-sequence "
                f"tokens {', '.join(map(str, ends)) or '(there are none)'}"
            )
        spans.append((start, min(stops)))
    return text[: spans[-1][1]], spans


def _need_template(target: Target, messages: object, system: str | None, enable_thinking: bool | None) -> str | None:
    """The chat template; ValueError when there is no tokenizer, or something is given that the template must know."""
    if target.tokenizer is None:
        raise ValueError(f"{target.path} has no tokenizer, so that prompts must be token ids (--prompt-ids 1,2,3)")
    template = _template(target)
    if template is None:
        asked = {"messages": messages, "system": system, "enable_thinking": enable_thinking}
        for name, value in asked.items():
            if value is not None:
                raise ValueError(f"{target.path} has no chat template, which {name} needs; give plain text alone")
    elif enable_thinking is not None and "enable_thinking" not in template:
        raise ValueError(
            f"the chat template of {target.path} has no enable_thinking; leave --thinking/--no-thinking out"
        )
    return template


def _with_system(messages: Sequence[Message], system: str | None) -> list[Message]:
    if system is None:
        return list(messages)
    if messages[0]["role"] == "system":
        raise ValueError("the messages have a system message of their own; give it there or as system, not both")
    return [{"role": "system", "content": system}, *messages]


def _render(
    target: Target, messages: Sequence[Message], enable_thinking: bool | None, *, add_generation_prompt: bool
) -> str:
    """The messages as the template writes them."""
    assert target.tokenizer is not None
    options: dict[str, Any] = {} if enable_thinking is None else {"enable_thinking": enable_thinking}
    try:
        return str(
            target.tokenizer.apply_chat_template(
                [dict(message) for message in messages],
                add_generation_prompt=add_generation_prompt,
                tokenize=False,
                **options,
            )
        )
    except TemplateError as error:
        raise ValueError(f"the chat template of {target.path} refuses the messages: {error}") from None


def check_messages(messages: object, last: str = "user") -> None:
    """Raises ValueError unless `messages` are `{"role", "content"}` with texts, the last of them by the role `last`.

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
        check_text(f"message {index}", content)
        if role == "system" and index:
            raise ValueError(f"message {index} is a system message, which must be the first")
    if messages[-1]["role"] != last:
        purpose = ", to be answered" if last == "user" else ""
        raise ValueError(f"the last message is the {messages[-1]['role']}'s; it must be the {last}'s{purpose}")
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

"""Tokens to text, piece by piece."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


_INCOMPLETE = "\N{REPLACEMENT CHARACTER}"


class TextStream:
    """Turns tokens into text as they come; a character that spans tokens appears once it is whole.

    The pieces, `finish()` included, join to the tokenizer's decoding of all tokens.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase):
        self._tokenizer = tokenizer
        self._tokens: list[int] = []
        self._start = 0  # a few tokens that have been shown stay as context: decoding may depend on them
        self._shown = 0

    def push(self, token: int) -> str:
        """The text that `token` completes; empty while a character is incomplete."""
        self._tokens.append(token)
        before, after = self._decode(self._shown), self._decode(len(self._tokens))
        if after.endswith(_INCOMPLETE):
            return ""
        self._start, self._shown = self._shown, len(self._tokens)
        return after[len(before) :]

    def finish(self) -> str:
        """What is left when no more tokens come: bytes that never became a character."""
        return self._decode(len(self._tokens))[len(self._decode(self._shown)) :]

    def _decode(self, end: int) -> str:
        return str(self._tokenizer.decode(self._tokens[self._start : end], skip_special_tokens=True))

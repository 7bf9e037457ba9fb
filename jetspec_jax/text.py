"""Texts to tokens, and tokens to text, piece by piece."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


_INCOMPLETE = "\N{REPLACEMENT CHARACTER}"


class TextStream:
    """Turns tokens into text as they come; a character that spans tokens appears once it is whole.

    Without stop texts the pieces, `finish()` included, join to `decode_tokens` of all tokens.

    With them the pieces join to what comes before the stop text that is completed first (of several completed by one
    token, the one that begins first); `stopped` turns true with that token. Text that may be the beginning of a stop
    text is held back until it is known not to be one.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase, stop: Sequence[str] = ()):
        self.stopped = False
        self._stop = tuple(stop)
        self._held = ""
        self._tokenizer = tokenizer
        self._tokens: list[int] = []
        self._start = 0  # a few tokens that have been shown stay as context: decoding may depend on them
        self._whole = 0  # tokens up to here ended with a whole character
        self._shown = 0  # characters already given of the text of the tokens from `_start` on

    def push(self, token: int) -> str:
        """The text that `token` completes; empty while a character is incomplete, and after a stop text."""
        if self.stopped:
            return ""
        self._tokens.append(token)
        text = self._decode(self._start)
        piece = text.rstrip(_INCOMPLETE)[self._shown :] if text.endswith(_INCOMPLETE) else text[self._shown :]
        if text.endswith(_INCOMPLETE):
            self._shown += len(piece)
        else:
            # Some decoders drop a space that comes first: what is left as context must have text before it.
            context = self._decode(self._whole)
            if context:
                self._start, text = self._whole, context
            self._whole, self._shown = len(self._tokens), len(text)
        return self._release(piece)

    def finish(self) -> str:
        """What is left when no more tokens come: text held back, and bytes that never became a character."""
        if self.stopped:
            return ""
        text = self._release(self._decode(self._start)[self._shown :])
        text, self._held = text + self._held, ""
        return text

    def _release(self, piece: str) -> str:
        """What may be shown of the text held back and `piece`."""
        text = self._held + piece
        found = [at for at in (text.find(stop) for stop in self._stop) if at >= 0]
        if found:
            self.stopped, self._held = True, ""
            return text[: min(found)]
        keep = max((_overlap(text, stop) for stop in self._stop), default=0)
        self._held = text[len(text) - keep :]
        return text[: len(text) - keep]

    def _decode(self, start: int) -> str:
        return decode_tokens(self._tokenizer, self._tokens[start:])


def check_text(name: str, text: str) -> None:
    """Raises ValueError for a text that no tokenizer reads: JSON can write half of a surrogate pair."""
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise ValueError(f"{name} holds half of a character, {text[error.start]!r}") from None


def encode_text(tokenizer: PreTrainedTokenizerBase, text: str) -> list[int]:
    """The ids of a text, its special tokens read as such, with the beginning-of-text token in front.

    That token is added where the tokenizer would add it and the text, as from a chat template, does not begin with it;
    no other is.
    """
    ids = list(tokenizer.encode(text, add_special_tokens=False))
    bos = tokenizer.bos_token_id
    missing = bos is not None and ids[:1] != [bos] and list(tokenizer.encode(""))[:1] == [bos]
    return [bos, *ids] if missing else ids


def decode_tokens(tokenizer: PreTrainedTokenizerBase, tokens: Sequence[int]) -> str:
    """The text of tokens; special ones, and ids that the tokenizer does not know (padded vocabularies), have none.

    Spaces stay as the tokens have them: some tokenizers would drop those before punctuation, which text that has been
    shown already cannot.
    """
    return str(tokenizer.decode(list(tokens), skip_special_tokens=True, clean_up_tokenization_spaces=False))


def decode_until(tokenizer: PreTrainedTokenizerBase, tokens: Sequence[int], stop: Sequence[str]) -> tuple[str, bool]:
    """The text of all tokens, cut before a stop text, and whether there was one."""
    stream = TextStream(tokenizer, stop)
    text = "".join([*map(stream.push, tokens), stream.finish()])
    return text, stream.stopped


def _overlap(text: str, stop: str) -> int:
    """The length of the longest end of `text` with which `stop` begins, `stop` as a whole apart."""
    return next((n for n in range(min(len(text), len(stop) - 1), 0, -1) if text.endswith(stop[:n])), 0)

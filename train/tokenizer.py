"""A byte-level BPE tokenizer with single-digit tokens and a ChatML chat template."""

from collections.abc import Iterable

from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

END_OF_TEXT = "<|endoftext|>"
IM_START = "<|im_start|>"
IM_END = "<|im_end|>"
MASK = "<|mask|>"
SPECIAL_TOKENS = (END_OF_TEXT, IM_START, IM_END, MASK)

# What the template cannot express is an error: dropping it would change the prompt unseen.
CHAT_TEMPLATE = """\
{%- if tools or documents %}
    {{- raise_exception('this chat template has no tools and no documents') }}
{%- endif %}
{%- if not messages %}
    {{- raise_exception('messages must hold at least one message') }}
{%- endif %}
{%- for message in messages %}
    {%- if message['role'] not in ['system', 'user', 'assistant'] %}
        {{- raise_exception('role must be system, user or assistant, not ' ~ message['role']) }}
    {%- elif message['role'] == 'system' and not loop.first %}
        {{- raise_exception('a system message must be the first message') }}
    {%- elif message['content'] is not string %}
        {{- raise_exception('content must be a string') }}
    {%- elif message.keys() | list | length != 2 %}
        {{- raise_exception('a message has role and content only') }}
    {%- endif %}
    {{- '<|im_start|>' + message['role'] + '\\n' + message['content'] + '<|im_end|>\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|im_start|>assistant\\n' }}
{%- endif %}
"""


def train_tokenizer(texts: Iterable[str], vocab_size: int = 1024) -> PreTrainedTokenizerFast:
    """Train a byte-level BPE tokenizer on the texts.

    Every digit is a token of its own, and all 256 bytes are in the vocabulary, so that any
    text survives encoding and decoding.  The special tokens have ids 0 to 3, in the order of
    ``SPECIAL_TOKENS``; ``<|im_end|>`` ends a turn, ``<|endoftext|>`` pads, and ``<|mask|>`` is
    the draft head's mask token.  Texts with too few distinct words give a smaller vocabulary.
    """
    if isinstance(texts, str | bytes):
        raise ValueError("texts must be an iterable of str, not a single string")
    smallest = len(SPECIAL_TOKENS) + len(pre_tokenizers.ByteLevel.alphabet())
    if isinstance(vocab_size, bool) or not isinstance(vocab_size, int) or vocab_size < smallest:
        raise ValueError(f"vocab_size must be an int of at least {smallest}, not {vocab_size!r}")
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Digits(individual_digits=True),
            pre_tokenizers.ByteLevel(add_prefix_space=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=list(SPECIAL_TOKENS),
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        eos_token=IM_END,
        pad_token=END_OF_TEXT,
        mask_token=MASK,
        additional_special_tokens=[IM_START],
        chat_template=CHAT_TEMPLATE,
        clean_up_tokenization_spaces=False,
        model_input_names=["input_ids", "attention_mask"],
    )

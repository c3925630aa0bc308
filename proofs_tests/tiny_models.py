"""What the tests of targets, drafters and commands share: tiny random models, and a tokenizer that needs no file."""

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

TEMPLATE = (
    "{% for m in messages %}{{ m.role[0] }}{{ m.content }};{% endfor %}{% if add_generation_prompt %}a{% endif %}"
)


def byte_tokenizer(chat_template: str | None = TEMPLATE, bos: str | None = None) -> PreTrainedTokenizerFast:
    """Bytes as tokens, and an end-of-sequence token behind them."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE(vocab={char: i for i, char in enumerate(alphabet)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, eos_token="<eos>", bos_token=bos, chat_template=chat_template
    )


def spread(model):
    """Larger weights than the default initialisation, so that attention really depends on what is seen."""
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() > 1:
                parameter.normal_(0, 2.0 / parameter.shape[-1] ** 0.5)
    return model.eval()

"""A token classifier in which each word decides its own label, saved as transformers saves one."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import torch
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import BertConfig, BertForTokenClassification, PreTrainedTokenizerFast


def save_classifier(folder: Path, labels: Mapping[int, str], words: Mapping[str, int]) -> Path:
    """Save it.

    Args:
        folder: Where to.
        labels: Names by number.
        words: Numbers of labels by word; all other words have label 0.
    """
    known = ["[UNK]", "[PAD]", *words]
    tokenizer = Tokenizer(models.WordLevel({word: at for at, word in enumerate(known)}, unk_token="[UNK]"))
    tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, unk_token="[UNK]", pad_token="[PAD]").save_pretrained(
        str(folder)
    )
    torch.manual_seed(0)
    config = BertConfig(
        vocab_size=len(known), hidden_size=8, num_hidden_layers=1, num_attention_heads=1,
        intermediate_size=8,
        max_position_embeddings=16, id2label=dict(labels),
        label2id={name: at for at, name in labels.items()},
    )  # fmt: skip
    model = BertForTokenClassification(config)
    with torch.no_grad():
        model.bert.encoder.layer[0].output.dense.weight.zero_()
        model.bert.encoder.layer[0].attention.output.dense.weight.zero_()
        model.bert.embeddings.position_embeddings.weight.zero_()
        model.bert.embeddings.token_type_embeddings.weight.zero_()
        embeddings = model.bert.embeddings.word_embeddings.weight
        embeddings.zero_()
        for at, word in enumerate(known):
            embeddings[at, words.get(word, 0)] = 1.0
        model.classifier.weight.zero_()
        model.classifier.bias.zero_()
        for label in labels:
            model.classifier.weight[label, label] = 1.0
    model.save_pretrained(str(folder))
    return folder

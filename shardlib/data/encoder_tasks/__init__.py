"""Data for fine-tuning encoders: labelled texts, and questions answered by spans of texts.

A row is one text, or two, in the special tokens of the tokenizer: `[CLS] text [SEP]`.
"""

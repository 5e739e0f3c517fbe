"""Text data: documents, tokenizers, tokens and packed rows."""

"""Architectures of Hugging Face that the model families read and write, a file for each kin."""

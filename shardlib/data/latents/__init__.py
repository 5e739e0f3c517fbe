"""Latents of images, and embeddings of their texts."""

"""Data for fine-tuning: chats, and prompts with completions."""

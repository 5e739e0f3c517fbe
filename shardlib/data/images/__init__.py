"""Images and their labels."""

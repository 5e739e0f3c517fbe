"""Reports as text, tables, JSON, HTML and diffs."""

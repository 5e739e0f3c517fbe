from run_lab import caches, finished, lab, losses, rows

__all__ = ["caches", "finished", "lab", "losses", "rows"]

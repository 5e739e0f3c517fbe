"""Models with logical axes only: the same code trains on any mesh."""

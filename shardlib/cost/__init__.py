"""The cost model: seconds, bytes and traffic of a training step."""

"""The position of a run in its stream of samples."""

import dataclasses


@dataclasses.dataclass(frozen=True)
class StreamPosition:
    """At optimizer step `step` a run has consumed the first `samples_seen` samples of its stream.

    Each later step takes the next `global_batch` samples, whatever that number was before, and
    however many processes, devices or mesh axes read them. Skipped samples count as seen. A sample
    is one row of a batch: a packed row of text or an image.
    """

    step: int = 0
    samples_seen: int = 0

    def __post_init__(self) -> None:
        if self.step < 0 or self.samples_seen < 0:
            raise ValueError(f"neither part of a position may be negative: {self}")

    def samples_at(self, step: int, global_batch: int) -> int:
        """Returns the samples seen at a later step, with equal batches from here on.

        Raises:
            ValueError: If the step is before this position.
        """
        if step < self.step:
            raise ValueError(f"step {step} lies before step {self.step}, where the stream begins")
        return self.samples_seen + (step - self.step) * global_batch

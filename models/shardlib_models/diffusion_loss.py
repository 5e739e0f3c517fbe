"""The loss of models that predict the noise in latents."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from shardlib.losses import Mean

NUM_STEPS = 1000
_FIRST_BETA, _LAST_BETA = 0.00085, 0.012


@functools.cache
def schedule() -> tuple[np.ndarray, np.ndarray]:
    """Returns the factors of the signal and of the noise at each noise level, float32 [1000].

    The variance beta that a level adds grows from 0.00085 to 0.012, linearly in its square root.

    Source: Ho et al. 2020, "Denoising Diffusion Probabilistic Models", equation 4; the betas come
    from the configs of Rombach et al. 2022, "High-Resolution Image Synthesis with Latent Diffusion
    Models" (CompVis/stable-diffusion, v1-inference.yaml).
    """
    betas = np.linspace(_FIRST_BETA**0.5, _LAST_BETA**0.5, NUM_STEPS) ** 2
    kept = np.cumprod(1.0 - betas)
    return np.sqrt(kept).astype(np.float32), np.sqrt(1.0 - kept).astype(np.float32)


def loss(
    model: Any, batch: dict[str, Any], rng: jax.Array, *, train: bool
) -> tuple[Mean, dict[str, Mean]]:
    """Returns the mean squared error of the predicted noise, or velocity.

    Each latent gets noise of a level that is drawn from all 1,000. The draws depend on `rng` and
    the row of the batch alone, whatever the mesh. An evaluation is given the same `rng` each time,
    so its numbers repeat.

    Args:
        model: A UNet for this step alone: it is put into training or evaluation mode.
        batch: As `shardlib.registry.LATENTS` says.
        rng: The key of noise and levels.
        train: Has no effect, because the model has no dropout.

    Source: Ho et al. 2020, equation 14; Salimans & Ho 2022, "Progressive Distillation for Fast
    Sampling of Diffusion Models", appendix D, for the velocity.
    """
    if train:
        model.train()
    else:
        model.eval()
    latents, weights = batch["latents"], batch["weights"].astype(jnp.float32)
    at_level, at_noise = jax.random.split(rng)
    levels = jax.random.randint(at_level, latents.shape[:1], 0, NUM_STEPS, jnp.int32)
    noise = jax.random.normal(at_noise, latents.shape, jnp.float32)
    signal_factor, noise_factor = (
        jnp.asarray(factors)[levels][:, None, None, None] for factors in schedule()
    )
    signal = latents.astype(jnp.float32)
    noisy = (signal_factor * signal + noise_factor * noise).astype(latents.dtype)
    conditions = {name: batch.get(name) for name in ("pooled", "sizes")}
    predicted = model(noisy, levels, batch["context"], **conditions)
    target = noise
    if model.config.prediction == "v":
        target = signal_factor * noise - noise_factor * signal
    errors = jnp.mean(jnp.square(predicted.astype(jnp.float32) - target), axis=(1, 2, 3))
    return Mean(jnp.sum(errors * weights), jnp.sum(weights)), {}

"""Code that runs beside an agent and talks to `trainer serve`: rollouts, and ART's backend."""

from trainer.client.art_backend import ArtBackend, means
from trainer.client.rollouts import Rollout, rollout, trajectory

__all__ = ["ArtBackend", "Rollout", "means", "rollout", "trajectory"]

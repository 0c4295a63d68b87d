"""What runs beside an agent and talks to `trainer serve`: ART's backend over HTTP."""

from trainer.client.art_backend import ArtBackend, means

__all__ = ["ArtBackend", "means"]

"""`trainer export`: the model of a checkpoint as a directory to load elsewhere, or on a hub."""

from trainer.export.directory import Form, export
from trainer.export.hub import Hub

__all__ = ["Form", "Hub", "export"]

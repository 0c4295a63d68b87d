"""`verifiers` finds the environment by the name of this package."""

from shop_agent.agent import load_environment

__all__ = ["load_environment"]

"""What the tables compare with and a server has no use for; importing the package registers it by name."""

from benchmarks.baseline import order, policy, strategy

__all__ = ["order", "policy", "strategy"]

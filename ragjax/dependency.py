"""Prompts as trees of dependencies: the public name of `ragjax.core.depprompt`."""

from ragjax.core.depprompt import DepPrompt, Layout, LinearNode, Positions, TreeNode, layout, merge

__all__ = ["DepPrompt", "Layout", "LinearNode", "Positions", "TreeNode", "layout", "merge"]

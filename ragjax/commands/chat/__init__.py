"""`python -m ragjax.chat`: a conversation in a terminal, with an account of reuse under each answer."""

from ragjax.commands.chat.command import main

__all__ = ["main"]

"""The choice of the tokens of a prompt that decoding sees: scorers, and GraphKV (docs/compression.md)."""

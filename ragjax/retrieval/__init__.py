"""From source texts to retrieved chunks: load, cut, embed, index, search."""

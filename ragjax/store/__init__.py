"""Where the bytes of KV live: page pool, host memory, disk, and what moves them."""

"""The shared tier: entries as the disk tier keeps them, on a server that several processes use (docs/cache.md)."""

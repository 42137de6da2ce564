"""Where KV arrays live: the device's page pool."""

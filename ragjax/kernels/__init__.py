"""Pure functions on arrays: attention over pages, rotation, reductions. They never see a request."""

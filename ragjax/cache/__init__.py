"""Host-side cache of KV: which tokens are kept where, who is using them, and what leaves first. No jax."""

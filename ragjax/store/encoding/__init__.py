"""The encodings of KV at rest, one file each; `ragjax.store.codec` chooses among them."""

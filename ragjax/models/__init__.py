"""Models: configuration, weights, tokenizer, hub, and the networks themselves."""

"""Time to first token: the prompt, the systems that answer it, and whole models on the bare runner."""

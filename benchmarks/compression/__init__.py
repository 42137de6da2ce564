"""One prefill as arrays, and the questions that are asked over it."""

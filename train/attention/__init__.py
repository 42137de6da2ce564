"""Attention of training, with gradients, under the same visibility rule."""

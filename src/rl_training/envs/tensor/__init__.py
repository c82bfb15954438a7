"""Environments that live on the training device: pure functions of tensors, stepped by the same graph that acts."""

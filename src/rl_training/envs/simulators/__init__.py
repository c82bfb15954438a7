"""Simulators whose data already lives on a device: of PyTorch (Isaac Lab, ManiSkill) and of JAX (gymnax, brax)."""

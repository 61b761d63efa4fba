"""Supervised fine-tuning on responses and values."""

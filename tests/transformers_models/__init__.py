"""Whole transformers models as their users call them, against untouched copies."""

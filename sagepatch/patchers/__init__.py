"""Finds the attention layers of a model and routes each instance to the op; every change undoes."""

"""Holds the training of the bundled demo pipeline; the installed package must not import it."""

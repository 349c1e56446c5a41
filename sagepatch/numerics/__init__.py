"""The arithmetic of quantised attention in plain torch: recipes, quantisers, smoothing, the
emulator, metrics.
"""

"""The per-layer calibration report: its values, and a renderer for each format."""

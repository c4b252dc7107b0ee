"""Datasets and what is drawn from them: files, sources, banks, glyphs; episodes, trajectories and augmentation."""

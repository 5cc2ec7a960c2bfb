"""A small model in the released V4.1 format: its shape, corpus, training and checkpoint."""

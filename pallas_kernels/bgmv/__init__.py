"""Batched gather matrix-vector: one adapter per row, without a sort; for small batches."""
